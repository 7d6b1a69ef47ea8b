"""What an ordinary test would have made of a fault: normal data, sizes of a common example, and a fixed tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from refattn import biases, masks
from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.faults.catch import target_of
from refattn.conformance.faults.fault import Fault, Patch
from refattn.conformance.judge import Result, golden_of, judge
from refattn.conformance.plain import Draw, causal_pairs, indices, rounded

Q_LEN, K_LEN, HEADS, WIDTH = 32, 48, 4, 32

# (rtol, atol) by dtype: the defaults of torch.testing.assert_close, and one that is often met for half precision.
DEFAULT = {"bfloat16": (1.6e-2, 1e-5), "float16": (1e-3, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}
LOOSE = dict.fromkeys(DEFAULT, (1e-2, 1e-2))


class Seen(NamedTuple):
    """Which tests see a fault in one dtype; None where no ordinary problem changes a bit of the output."""

    default: bool | None
    loose: bool | None
    bound: bool | None


def close(actual: Array, expected: Array, tolerance: tuple[float, float]) -> bool:
    """|actual - expected| <= atol + rtol |expected| everywhere, NaN equal to NaN and an infinity to itself."""
    relative, absolute = tolerance
    with np.errstate(invalid="ignore"):
        near = np.abs(actual - expected) <= absolute + relative * np.abs(expected)
    return bool(np.all(near | (actual == expected) | (np.isnan(actual) & np.isnan(expected))))


def problems(dtype: str) -> Iterator[Problem]:
    """One problem for each option, as an example in a test would have it."""
    for number, build in enumerate(_OPTIONS):
        draw = Draw(dtype, np.random.default_rng([number, 7]))
        yield build(draw)


def seen_by_ordinary_tests(fault: Fault, library: str, dtype: str) -> Seen:
    """Whether any ordinary problem shows the fault to a fixed tolerance, and to the derived bound."""
    target, right = target_of(fault, library), target_of(_RIGHT if not fault.patches else _PLANTED, library)
    default, loose, bound, reached = False, False, False, False
    for problem in problems(dtype):
        with fault.planted():
            result = _called(target, problem)
        if result is None or (isinstance(result, Result) and _same(result, _called(right, problem))):
            continue
        reached = True
        expected = rounded(golden_of(problem).output, dtype)
        raised = isinstance(result, str)
        formed = not raised and result.dtype == dtype and result.output.shape == expected.shape
        default = default or not (formed and close(result.output, expected, DEFAULT[dtype]))
        loose = loose or not (formed and close(result.output, expected, LOOSE[dtype]))
        bound = bound or raised or judge(problem, result).verdict == "fail"
    return Seen(default, loose, bound) if reached else Seen(None, None, None)


_RIGHT = Fault(name="plain", clause="N6", kind="")
_PLANTED = Fault(name="refattn", clause="N6", kind="", patches=(Patch(masks, "causal", masks.causal),))


def _same(result: Result, right: Result | str | None) -> bool:
    """Whether two results agree in every bit and in form."""
    if not isinstance(right, Result) or result.dtype != right.dtype or result.changed or result.repeated is False:
        return False
    return np.array_equal(result.output, right.output, equal_nan=True)


def _called(target: Any, problem: Problem) -> Any:
    """The result; None where the target cannot express the problem, the class of the error where it raises."""
    if target.unsupported(problem.needs, problem.dtype):
        return None
    try:
        with np.errstate(all="ignore"):
            return target.call(problem)
    except Unsupported:
        return None
    except Exception as fault:  # noqa: BLE001  # a test that raises has seen the fault
        return type(fault).__name__


def _data(draw: Draw, k_len: int = Q_LEN, **sizes: Any) -> dict[str, Any]:
    return draw.qkv(Q_LEN, k_len, **{"heads": HEADS, "d_k": WIDTH, **sizes})


def _padded(draw: Draw) -> Problem:
    keep = np.arange(Q_LEN) < np.asarray([[Q_LEN], [Q_LEN - 7]])
    return Problem(**_data(draw), mask=lambda array: masks.padding(array(keep)), shown=keep[:, None, None, :])


def _lengths(draw: Draw) -> Problem:
    counts = np.asarray([K_LEN, 29])
    shown = np.arange(K_LEN) < counts[:, None, None, None]
    return Problem(**_data(draw, k_len=K_LEN), mask=lambda array: masks.lengths(array(counts)), shown=shown)


def _window(draw: Draw) -> Problem:
    rows, keys = indices(Q_LEN, Q_LEN)
    shown = (keys <= rows) & (keys >= rows - 8)
    return Problem(**_data(draw), mask=lambda _: masks.window(8, 0), shown=shown)


def _prefix(draw: Draw) -> Problem:
    rows, keys = indices(Q_LEN, Q_LEN)
    return Problem(**_data(draw), mask=lambda _: masks.causal() | masks.prefix(6), shown=(keys <= rows) | (keys < 6))


def _documents(draw: Draw) -> Problem:
    ids = np.sort(draw.rng.integers(0, 4, Q_LEN))
    shown = ids[:, None] == ids[None, :]
    return Problem(**_data(draw), mask=lambda array: masks.documents(array(ids)), shown=shown)


def _alibi(draw: Draw) -> Problem:
    rows, keys = indices(Q_LEN, Q_LEN)
    slopes = 2.0 ** (-8.0 * np.arange(1, HEADS + 1) / HEADS)
    bias = slopes[:, None, None] * -np.abs(rows - keys)
    return Problem(**_data(draw), causal=True, bias=bias, bias_of=lambda _: biases.alibi(HEADS))


_OPTIONS: tuple[Callable[[Draw], Problem], ...] = (
    lambda draw: Problem(**_data(draw)),
    lambda draw: Problem(**_data(draw), causal=True),
    lambda draw: Problem(**_data(draw, k_len=K_LEN), causal=True, q_start=K_LEN - Q_LEN),
    lambda draw: Problem(**_data(draw), shown=draw.rng.random((Q_LEN, Q_LEN)) < 0.7),
    lambda draw: Problem(**_data(draw), shown=causal_pairs(Q_LEN, Q_LEN)),
    lambda draw: Problem(**_data(draw), bias=draw.normal(HEADS, Q_LEN, Q_LEN)),
    lambda draw: Problem(**_data(draw), scale=0.125),
    lambda draw: Problem(**_data(draw), softcap=30.0),
    lambda draw: Problem(**_data(draw), sinks=draw.normal(HEADS)),
    lambda draw: Problem(**_data(draw, kv_heads=2), causal=True),
    _padded,
    _lengths,
    _window,
    _prefix,
    _documents,
    _alibi,
)
