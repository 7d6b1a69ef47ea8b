"""Functions of refattn's convention for the suite and the command line to judge: right ones and foul play.

`correct` keeps scores and weights in the wide dtype, `correct_unfused` stores them in the dtype of q. Wrong mathematics
is in the catalogue of `refattn.conformance.faults`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.faults import named

ALL = ("bfloat16", "float16", "float32", "float64")
FULL = ("float32", "float64")

_PLAIN = named("plain").attention()
_UNFUSED = named("scores stored in the dtype of q").attention()


def faulty(name: str) -> Any:
    """The wrong implementation of that name out of the catalogue."""
    return named(name).attention()


def __getattr__(name: str) -> Any:
    """The same by its identifier, so that `planted_faults:no_scale` names a target."""
    try:
        return faulty(name)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no {name!r}") from None


def correct(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Everything in at least float32, one rounding at the end."""
    return _PLAIN(q, k, v, **options)


def correct_unfused(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Scores and weights stored in the dtype of q, as an eager implementation has them."""
    return _UNFUSED(q, k, v, **options)


def correct_in_its_features(q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None) -> Array:
    """A function of few parameters, which returns the output alone."""
    return _PLAIN(q, k, v, causal=causal, scale=scale)[0]


def takes_nothing_but_tensors(q: Array, k: Array, v: Array) -> Array:
    """A function without options that refuses everything, politely."""
    raise NotImplementedError("not written yet")


def returns_a_list(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """The right numbers in the wrong type."""
    return correct(q, k, v, **options)[0].tolist()


def chatty(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Right, but prints."""
    print("tile", q.shape)
    return correct(q, k, v, **options)


def raises(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Fails on every call."""
    raise RuntimeError("no kernel image is available")


def exits(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Ends the process on every call, with the exit code of success."""
    sys.exit(0)


def interrupted_at_six_queries(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Right, until a user loses patience."""
    if q.shape[-2] == 6:
        raise KeyboardInterrupt
    return correct(q, k, v, **options)


def asserts(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Fails on every call by an assertion of its own."""
    assert q.shape[-1] == 128, "width must be 128"
    return q


def nothing_but_nan(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """A result full of NaN, which a careless comparison takes for a wildcard."""
    return np.full_like(correct(q, k, v, **options)[0], np.nan)
