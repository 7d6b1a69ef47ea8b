"""A small decoder language model with seeded weights, on any library, and its exact counterpart with error bounds.

Embedding, two blocks of attention (grouped heads, rotary positions, cache), perhaps of attention to a context, and a
two-layer network, each added to its input, and a head. No normalisation: it would add nothing to what the cases ask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Api
from refattn.conformance.expect import expect_equal, expect_within
from refattn.conformance.plain import Draw
from refattn.conformance.tracked import Arithmetic, Tracked, merge, split

WORDS, WIDTH, HEADS, KV_HEADS, BLOCKS = 24, 16, 4, 2, 2
HEAD_WIDTH = WIDTH // HEADS
STYLE = "half"
# The word of padding, whose embedding is NaN: whatever it reaches shows.
PAD = WORDS
# Of the projections of queries, keys, values and heads, and of the two layers of the network.
GAINS = (1.0, 1.0, 0.5, 0.5, 0.5, 0.5)


class Block(NamedTuple):
    """Host weights of one block, used as x @ w; those of attention to a context where the model has one."""

    w_q: Array
    w_k: Array
    w_v: Array
    w_o: Array
    w_in: Array
    w_out: Array
    cross: tuple[Array, ...] = ()


def _matrices(draw: Draw, shapes: tuple[tuple[int, int], ...]) -> tuple[Array, ...]:
    """Matrices whose small gains keep the worst-case bound far below the effect of a wrong position."""
    return tuple(
        draw.normal(*shape, spread=gain * shape[0] ** -0.5) for shape, gain in zip(shapes, GAINS, strict=False)
    )


def expect_logits(what: str, logits: Array, exact: Tracked) -> None:
    """Logits (..., WORDS) within their bound, and the same greedy tokens, save where two are as good within it."""
    expect_within(f"logits {what}", logits, exact.value, exact.error)
    ordered = np.sort(exact.value, axis=-1)
    clear = ordered[..., -1] - ordered[..., -2] > 2 * np.max(exact.error, axis=-1)
    expected = np.argmax(exact.value, axis=-1)
    expect_equal(f"greedy tokens {what}", np.argmax(logits, axis=-1)[clear], expected[clear])


class Decoder:
    """The model; tokens are host integers (batch, S).

    windows says for each block how many tokens a token sees, itself included; None is all. With cross each block
    attends to a context (batch, T, WIDTH) too. path is that of its attention.
    """

    def __init__(
        self,
        draw: Draw,
        windows: tuple[int | None, ...] = (None,) * BLOCKS,
        *,
        cross: bool = False,
        path: str = "dense",
    ) -> None:
        shared, wide = KV_HEADS * HEAD_WIDTH, 2 * WIDTH
        attends = ((WIDTH, WIDTH), (WIDTH, shared), (WIDTH, shared), (WIDTH, WIDTH))
        shapes = (*attends, (WIDTH, wide), (wide, WIDTH))
        self.dtype, self.windows, self.path = draw.dtype, windows, path
        self.embedding = draw.normal(WORDS, WIDTH)
        self.blocks = [Block(*_matrices(draw, shapes)) for _ in windows]
        self.head = draw.normal(WIDTH, WORDS, spread=WIDTH**-0.5)
        if cross:
            self.blocks = [block._replace(cross=_matrices(draw, attends)) for block in self.blocks]

    def caches(self, api: Api, batch: int, *room: int, kind: str = "KVCache") -> list[Any]:
        """One empty cache per block; room is its capacity, its pages and page size, or its window."""
        import refattn

        like = api.array(np.zeros(1))
        return [getattr(refattn, kind).allocate(like, batch, KV_HEADS, *room, HEAD_WIDTH) for _ in self.blocks]

    def logits(
        self,
        api: Api,
        tokens: Array,
        caches: list[Any] | None = None,
        drift: int = 0,
        *,
        keep: Array | None = None,
        counts: Array | None = None,
        context: Array | None = None,
        kept: Array | None = None,
    ) -> Array:
        """Logits (batch, S, WORDS) on the host. With caches the tokens continue them, and the list is updated.

        keep (batch, tokens so far) is False for padding on the left; counts (batch,) are the tokens before padding on
        the right; kept (batch, T) is False for padding of the context. drift moves the positions that tokens are
        rotated to: a fault that some cases plant on purpose.
        """
        from refattn import AttentionWeights, Rotary, masks, multi_head_attention

        # Padding has no embedding.
        x = api.array(np.concatenate((self.embedding, np.full((1, WIDTH), np.nan)))[tokens])
        same: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "path": self.path}
        for number, block in enumerate(self.blocks):
            cache = None if caches is None else caches[number]
            options: dict[str, Any] = {"causal": True, "cache": cache, "rope": Rotary(STYLE), "counts": counts}
            if drift and cache is not None:
                options["positions"] = api.array(np.arange(tokens.shape[1]) + cache.length + drift)
            if keep is not None:  # B7
                options["positions"] = api.array(np.maximum(np.cumsum(keep, axis=1) - 1, 0)[:, -tokens.shape[1] :])
            options["mask"] = self._mask(api, number, tokens.shape[1], cache, keep)
            attended = multi_head_attention(x, AttentionWeights(*(api.array(w) for w in block[:4])), **same, **options)
            if caches is not None:
                caches[number] = attended.cache
            x = x + attended.output
            if context is not None:
                shown = None if kept is None else masks.padding(api.array(kept))
                weights = AttentionWeights(*(api.array(w) for w in block.cross))
                x = x + multi_head_attention(x, weights, **same, context=api.array(context), mask=shown).output
            hidden = x @ api.array(block.w_in)
            x = x + ((hidden + abs(hidden)) * 0.5) @ api.array(block.w_out)
        return api.host(x @ api.array(self.head))

    def _mask(self, api: Api, number: int, new: int, cache: Any, keep: Array | None) -> Any:
        """What hides padding and, where no rolling cache does, what lies before the block's window."""
        from refattn import RollingKVCache, masks

        window, found = self.windows[number], []
        if window is not None and not isinstance(cache, RollingKVCache):
            found.append(masks.window(window - 1, 0))
        if keep is not None:
            seen = new if cache is None else cache.after(new)
            found.append(masks.padding(api.array(keep[:, keep.shape[1] - seen :])))
        return None if not found else found[0] if len(found) == 1 else found[0] & found[1]

    def exact(self, tokens: Array, window: int | None = None, context: Array | None = None) -> Tracked:
        """The same logits in one full pass without cache or padding, exactly, with their error bounds.

        Of a model whose blocks all see no more than `window` tokens, if that is given.
        """
        at = Arithmetic(self.dtype)
        x, where = at.exact(self.embedding[tokens]), np.arange(tokens.shape[1])
        for block, of_block in zip(self.blocks, self.windows, strict=True):
            visible, reach = where[None, :] <= where[:, None], of_block if window is None else window
            if reach is not None:
                visible &= where[None, :] > where[:, None] - reach
            q = at.rope(split(at.linear(x, block.w_q), HEADS), where, STYLE)
            k = at.rope(split(at.linear(x, block.w_k), KV_HEADS), where, STYLE)
            v = split(at.linear(x, block.w_v), KV_HEADS)
            attended, _ = at.attention(q, k, v, visible)
            x = at.add(x, at.linear(merge(attended), block.w_o))
            if context is not None:
                x = at.add(x, self._crossed(at, x, at.exact(context), block.cross))
            x = at.add(x, at.linear(at.relu(at.linear(x, block.w_in)), block.w_out))
        return at.linear(x, self.head)

    def _crossed(self, at: Arithmetic, x: Tracked, context: Tracked, cross: tuple[Array, ...]) -> Tracked:
        """Attention of x to all of the context."""
        w_q, w_k, w_v, w_o = cross
        q = split(at.linear(x, w_q), HEADS)
        k, v = (split(at.linear(context, w), KV_HEADS) for w in (w_k, w_v))
        return at.linear(merge(at.attention(q, k, v, np.ones((1, 1), dtype=bool))[0]), w_o)
