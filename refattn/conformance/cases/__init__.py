"""The cases, one module per chapter of the specification."""

from __future__ import annotations

from refattn.conformance.case import Case
from refattn.conformance.cases import (
    arrays,
    biases,
    caches,
    cost,
    empty_rows,
    errors,
    generation,
    gradients,
    heads,
    layer,
    lazy_masks,
    levels,
    long_rows,
    masks,
    masks_by_index,
    non_influence,
    numbers,
    paged,
    rolling,
    scores,
    softmax,
    tiling,
    vectors,
    weights,
)

# The plainest first, so that the first failure of an implementation is the one to look at first.
CHAPTERS = (
    *(scores, masks, masks_by_index, softmax, heads, arrays, numbers, biases),
    *(non_influence, lazy_masks, tiling, layer, empty_rows, levels, long_rows, gradients),
    *(caches, paged, rolling, generation, cost, weights, errors, vectors),
)


def all_cases() -> tuple[Case, ...]:
    """Every case, in reading order."""
    return tuple(case for chapter in CHAPTERS for case in chapter.CASES.cases)


def problem_cases(dtype: str) -> list[Case]:
    """The calls of attention in a dtype, which any implementation can be asked."""
    return [case for case in all_cases() if case.build is not None and dtype in case.dtypes]
