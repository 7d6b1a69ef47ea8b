"""Chapters K and L: whole models, of layers that differ, over every kind of cache, in chunks and in padded batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn import KVCache, PagedKVCache, RollingKVCache
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter
from refattn.conformance.models import HEAD_WIDTH, KV_HEADS, PAD, WIDTH, WORDS, Decoder, expect_logits
from refattn.conformance.tracked import Tracked
from refattn.dtypes import FULL

CASES = Chapter("generation")

# The first block sees three tokens and the second all, so that positions of both kinds meet in one model.
WINDOWS = (3, None)
CAPACITY = 10
# Which caches the two blocks have; without a rolling one a mask hides what lies before the window.
CACHES = ("contiguous", "paged", "rolling")
LENGTHS, STEPS = np.asarray([6, 3]), 2


def _caches(api: Api, kind: str, batch: int) -> list[Any]:
    """Empty caches for the blocks of WINDOWS."""
    like = api.array(np.zeros(1))
    if kind == "paged":
        pages = 2 * batch * (CAPACITY // 2)
        return [PagedKVCache.allocate(like, batch, KV_HEADS, pages, 2, HEAD_WIDTH) for _ in WINDOWS]
    full = KVCache.allocate(like, batch, KV_HEADS, CAPACITY, HEAD_WIDTH)
    if kind == "rolling":
        return [RollingKVCache.allocate(like, batch, KV_HEADS, 3, HEAD_WIDTH), full]
    return [KVCache.allocate(like, batch, KV_HEADS, CAPACITY, HEAD_WIDTH), full]


def _model(api: Api, cross: bool = False) -> Decoder:
    """The model on the path that is judged."""
    return Decoder(api.draw, WINDOWS, cross=cross, path=api.path)


def _tokens(api: Api, *shape: int) -> Array:
    return api.draw.rng.integers(0, WORDS, shape)


@CASES.check("K1", "L4", "M6", dtypes=FULL)
def chunks(api: Api) -> None:
    """A prompt that comes in chunks, the last one shorter, over each kind of cache, gives what one full pass gives."""
    model, tokens = _model(api), _tokens(api, 2, 8)
    exact = model.exact(tokens)
    expect_logits("of one pass", model.logits(api, tokens), exact)
    for kind in CACHES:
        for size in (3, 7):
            caches = _caches(api, kind, 2)
            for start in range(0, 8, size):
                rows = slice(start, min(start + size, 8))
                logits = model.logits(api, tokens[:, rows], caches)
                what = f"of tokens {rows.start} to {rows.stop - 1}, chunks of {size}, {kind} caches"
                expect_logits(what, logits, Tracked(exact.value[:, rows], exact.error[:, rows]))


def _alone(model: Decoder, rows: list[Array], contexts: list[Array] | None = None) -> Tracked:
    """The exact logits (batch, WORDS) of each row's last token, each row (1, S) by itself."""
    parts = [model.exact(row, context=contexts and contexts[entry]) for entry, row in enumerate(rows)]
    return Tracked(*(np.concatenate([part[:, -1] for part in each]) for each in zip(*parts, strict=True)))


def _longer(rows: list[Array], exact: Tracked) -> tuple[Array, list[Array]]:
    """The greedy tokens (batch, 1), and the rows with them."""
    new = np.argmax(exact.value, axis=-1)[:, None]
    return new, [np.concatenate((row, token[None]), axis=1) for row, token in zip(rows, new, strict=True)]


def _padded(rows: list[Array], left: bool) -> Array:
    """One batch of rows of unequal lengths."""
    free = [int(LENGTHS.max()) - row.shape[1] for row in rows]
    widths = [((0, 0), (count, 0) if left else (0, count)) for count in free]
    return np.concatenate([np.pad(row, width, constant_values=PAD) for row, width in zip(rows, widths, strict=True)])


@CASES.check("B7", "K1", "K7", "M11", "M16", "M19", dtypes=FULL)
def left_padding(api: Api) -> None:
    """A batch padded on the left, prefilled in chunks and decoded, gives for each row what the row gives alone."""
    model, prompts = _model(api), [_tokens(api, 1, length) for length in LENGTHS.tolist()]
    padded = _padded(prompts, left=True)
    expect_logits("without a cache", model.logits(api, padded, keep=padded != PAD)[:, -1], _alone(model, prompts))
    for kind in CACHES:
        rows, keep, caches, new = prompts, padded != PAD, _caches(api, kind, 2), padded[:, 4:]
        model.logits(api, padded[:, :4], caches, keep=keep[:, :4])
        for step in range(STEPS + 1):
            exact = _alone(model, rows)
            expect_logits(f"of step {step}, {kind} caches", model.logits(api, new, caches, keep=keep)[:, -1], exact)
            new, rows = _longer(rows, exact)
            keep = np.pad(keep, ((0, 0), (0, 1)), constant_values=True)


@CASES.check("K3", "K8", "K9", "K1", "L4", "M19", dtypes=FULL)
def right_padding(api: Api) -> None:
    """A batch padded on the right, each entry with its own count, gives for each row what the row gives alone."""
    model, prompts = _model(api), [_tokens(api, 1, length) for length in LENGTHS.tolist()]
    padded, entries, last = _padded(prompts, left=False), np.arange(2), LENGTHS - 1
    expect_logits("without a cache", model.logits(api, padded)[entries, last], _alone(model, prompts))
    for kind in CACHES:
        rows, caches, prefilled = prompts, _caches(api, kind, 2), []
        for start in (0, 4):  # of which the shorter row has all its tokens in the first chunk
            counts = np.clip(LENGTHS - start, 0, padded[:, start : start + 4].shape[1])
            prefilled.append(model.logits(api, padded[:, start : start + 4], caches, counts=counts))
        logits = np.concatenate(prefilled, axis=1)[entries, last]
        for step in range(STEPS + 1):
            exact = _alone(model, rows)
            expect_logits(f"of step {step}, {kind} caches", logits, exact)
            new, rows = _longer(rows, exact)
            logits = model.logits(api, new, caches)[:, -1]


@CASES.check("L3", "K1", "L4", "M19", dtypes=FULL)
def attention_to_a_context(api: Api) -> None:
    """A decoder that attends to a context too, padded on the right, gives with caches what each row gives alone."""
    model, rows = _model(api, cross=True), [_tokens(api, 1, 3) for _ in range(2)]
    contexts = [api.draw.normal(1, length, WIDTH) for length in (5, 2)]
    kept = np.arange(5) < np.asarray([[5], [2]])
    context = np.full((2, 5, WIDTH), np.nan)
    context[0], context[1, :2] = contexts[0][0], contexts[1][0]
    caches, new = _caches(api, "rolling", 2), np.concatenate(rows)
    for step in range(STEPS):
        exact = _alone(model, rows, contexts)
        logits = model.logits(api, new, caches, context=context, kept=kept)[:, -1]
        expect_logits(f"of step {step}", logits, exact)
        new, rows = _longer(rows, exact)
