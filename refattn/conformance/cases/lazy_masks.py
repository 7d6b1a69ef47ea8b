"""Chapter M, fourth part: masks without an array, what they answer for a tile, and how they are drawn."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from refattn import masks
from refattn.conformance.case import Api, Chapter
from refattn.conformance.cases.non_influence import KEEP, MASK_KINDS, mask_of_kind
from refattn.conformance.expect import expect, expect_equal
from refattn.conformance.plain import positions

CASES = Chapter("lazy_masks")


def _all_masks() -> dict[str, Any]:
    kinds = {kind: mask_of_kind(kind)[1](np.asarray) for kind in MASK_KINDS}
    return {
        **kinds,
        "and": masks.causal() & masks.window(2, 3),
        "or": masks.causal() | masks.prefix(3),
        "not": ~masks.chunks(3),
        "mixture": (masks.window(2, 0) | masks.prefix(1)) & ~masks.padding(KEEP) & masks.causal(),
    }


@CASES.check("M14")
def tiles_and_arrays_agree(api: Api) -> None:
    """All, none or mixed, a tile's answer is that of its pairs; visible() at scattered indices is the array's."""
    fixed = {
        "documents": (4, 6),
        "lengths": (4, 6),
        "padding": (4, 6),
        "dense": (4, 6),
        "blocks": (4, 6),
        "mixture": (6, 6),
    }
    for name, mask in _all_masks().items():
        q_len, k_len = fixed.get(name, (5, 7))
        starts = (2, 1) if mask.positional else (0, 0)
        whole = np.asarray(mask.to_array(q_len, k_len, *starts))
        for rows in (range(q_len), range(1, 3), range(q_len - 1, q_len)):
            for keys in (range(k_len), range(2), range(3, 5)):
                part = whole[..., rows.start : rows.stop, keys.start : keys.stop]
                answer = mask.tile(rows, keys, *starts)
                truth = "all" if part.all() else "mixed" if part.any() else "none"
                at = f"{name} on rows {rows} and keys {keys}"
                expect(answer in ("mixed", truth), f"{at} answers {answer!r}, it is {truth!r}")
                seen = np.asarray(mask.visible(np.asarray(rows), np.asarray(keys), *starts))
                expect_equal(at, np.broadcast_to(seen, part.shape), part)
    like = api.array(np.zeros(1))
    for name in ("causal", "window", "mixture"):
        array = _all_masks()[name].to_array(6, 6, like=like)
        expect(api.same_library(array) and api.dtype_of(array) == "bool", f"{name} is no boolean array of {api.name}")
        expect_equal(name, api.host(array), np.asarray(_all_masks()[name].to_array(6, 6)))


@CASES.check("M14")
def tiles_need_no_array(_api: Api) -> None:
    """A tile of a million by a million pairs is answered at once, without an array of that size."""
    million, started = 10**6, time.monotonic()
    mask = masks.causal() & masks.window(10, None)
    answers = [
        mask.tile(range(million), range(million)),
        mask.tile(range(million), range(million), -2 * million, 0),
        masks.causal().tile(range(million), range(million), 2 * million, 0),
    ]
    expect(answers == ["mixed", "none", "all"], f"tiles answer {answers}, expected mixed, none, all")
    seconds = time.monotonic() - started
    expect(seconds < 1, f"three tiles took {seconds:.1f} s")


@CASES.check("M22")
def drawing(_api: Api) -> None:
    """to_text has a line per query and a mark per key, two kinds of marks in all."""
    query, key = positions(3, 5, 2)
    lines = masks.causal().to_text(3, 5, q_start=2).splitlines()
    marks = [line.replace(" ", "") for line in lines]
    expect([len(line) for line in marks] == [5, 5, 5], f"expected three lines of five marks, got {lines}")
    seen = key <= query
    shown, hidden = ({marks[i][j] for i, j in np.argwhere(pairs)} for pairs in (seen, ~seen))
    expect(len(shown) == len(hidden) == 1 and shown != hidden, f"visible pairs are {shown}, hidden ones {hidden}")
