"""The one float64 that a real number rounds to, to nearest and ties to even: proven, or not given.

A ball proves it by lying strictly between the midpoints on either side of a float64. It can never prove a number that
is itself a midpoint, nor tell zero from the smallest of numbers: such numbers must come as exact rationals.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import flint
from flint import arb, fmpq

Exact: TypeAlias = fmpq | arb
LARGEST = math.ldexp(1 - 2.0**-53, 1024)


def exact(x: float) -> fmpq:
    """A finite float as a rational."""
    return fmpq(*x.as_integer_ratio())


def rounded(x: Exact) -> float | None:
    """The float64 nearest to x, zero as +0; None if x, a ball at its precision, does not settle it."""
    if isinstance(x, fmpq):
        nearest = int(x.p) / int(x.q)  # Python divides whole numbers with one correct rounding
        below, above = midpoints(nearest)
        assert below <= x <= above, f"{nearest!r} is not the float64 nearest to {x}"
        return nearest + 0.0
    if not x.is_finite():
        return None
    near = float(x.mid())
    for candidate in (near, math.nextafter(near, -math.inf), math.nextafter(near, math.inf)):
        if abs(candidate) <= LARGEST and lies_between(x, *midpoints(candidate)):
            return candidate + 0.0
    return None


def lies_between(x: arb, below: fmpq, above: fmpq) -> bool:
    """Whether a whole ball lies strictly between two dyadic numbers of less than 64 bits."""
    with flint.ctx.workprec(64):
        low, high = arb(below), arb(above)
    assert low.is_exact() and high.is_exact()
    return bool(low < x) and bool(x < high)


def midpoints(x: float) -> tuple[fmpq, fmpq]:
    """Halfway to the float64 below and to the one above; the largest has a neighbour beyond it as far as within."""
    here, below, above = exact(x), math.nextafter(x, -math.inf), math.nextafter(x, math.inf)
    low = exact(below) if math.isfinite(below) else 2 * here - exact(above)
    high = exact(above) if math.isfinite(above) else 2 * here - low
    return (low + here) / 2, (here + high) / 2
