"""What checks say when something does not hold: AssertionError with what, where, actual and expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Api
from refattn.conformance.judge import worst_place
from refattn.errors import RefattnError


def expect(holds: bool, message: str) -> None:
    """Raises AssertionError with the message unless it holds; unlike `assert` also under python -O."""
    if not holds:
        raise AssertionError(message)


def expect_equal(what: str, actual: Any, expected: Any) -> None:
    """Equal shape and values; NaN equals NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    expect(actual.shape == expected.shape, f"{what} has shape {actual.shape}, expected {expected.shape}")
    floating = actual.dtype.kind == "f" and expected.dtype.kind == "f"
    if not np.array_equal(actual, expected, equal_nan=floating):
        differing = actual != expected
        if floating:
            differing &= ~(np.isnan(actual) & np.isnan(expected))
        at = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(differing)))
        got, wanted = np.atleast_1d(actual)[at], np.atleast_1d(expected)[at]
        raise AssertionError(f"{what}{list(at)} is {got}, expected exactly {wanted}")


def expect_within(what: str, actual: Array, expected: Array, bound: Array) -> None:
    """Every element within its bound; NaN only where NaN is expected."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    expect(actual.shape == expected.shape, f"{what} has shape {actual.shape}, expected {expected.shape}")
    place = worst_place(what, actual, expected, np.broadcast_to(np.asarray(bound, dtype=np.float64), expected.shape))
    # A place that cannot be judged has the ratio NaN, which is not <= 1.
    expect(place is None or place.ratio <= 1, str(place))


def expect_error(
    error: type[RefattnError], about: str, call: Callable[..., Any], /, *args: Any, **options: Any
) -> None:
    """call(*args, **options) raises exactly that class, about that argument, saying what was expected and came (E2)."""
    what = f"{error.__name__} about {about!r}"
    try:
        call(*args, **options)
    except RefattnError as raised:
        expect(type(raised) is error, f"expected {what}, got {type(raised).__name__}: {raised}")
        expect(about in raised.argument, f"expected {what}, the error is about {raised.argument!r}: {raised}")
        for part in (raised.argument, raised.expected, raised.got, f"refattn {raised.clause}"):
            expect(bool(part) and part in str(raised), f"the message of {what} lacks {part!r}: {raised}")
        expect(isinstance(raised, (ValueError, TypeError)), f"{error.__name__} is neither ValueError nor TypeError")
    except Exception as raised:  # the point of the case is which class it is
        raise AssertionError(f"expected {what}, got {type(raised).__name__}: {raised}") from raised
    else:
        raise AssertionError(f"expected {what}, nothing was raised")


def expect_bits(api: Api, actual: Array, expected: Array) -> None:
    """Two outputs, arrays of the library, hold the same bits, NaN for NaN."""
    expect(api.dtype_of(actual) == api.dtype_of(expected), f"output has dtype {api.dtype_of(actual)}")
    expect_equal("output", api.host(actual), api.host(expected))
