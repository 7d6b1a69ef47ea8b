"""What a case is: a name, the clauses it tests, one sentence of what must hold, and a problem or a check.

A *problem* is data for one call of attention, judged by golden value and bound on any target. A *check* is a plain
function about what a foreign kernel lacks (masks, errors, layer, caches, ...), run on refattn with each library.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from refattn.arrays import Array
from refattn.conformance.plain import Draw, causal_pairs
from refattn.dtypes import COMPUTED

# Makes an array of the target's library from a host array.
Convert = Callable[[Array], Array]

LAYOUTS = ("contiguous", "permuted", "transposed", "sliced", "expanded", "reversed")


# What a problem may need of a target that has to do with derivatives.
GRADIENTS = ("gradients", "bias gradient", "sinks gradient")


class Unsupported(Exception):
    """Raised by a target or a check that cannot express something after all; the message says what.

    missing are those of `Problem.needs` that it lacks, where the message is about such.
    """

    def __init__(self, message: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of attention: host inputs, options, and its own plain definition of what is visible.

    Arrays are host float64 whose values the case's dtype holds exactly; q (..., H, Lq, d_k), k (..., Hkv, Lk, d_k),
    v (..., Hkv, Lk, d_v), or rank 2. `mask` builds refattn's mask from arrays of the target; `shown` is the same mask
    as a plain boolean array. `bias` is the plain array of all biases, `bias_of` builds refattn's own object for it.
    """

    dtype: str
    q: Array
    k: Array
    v: Array
    causal: bool = False
    mask: Callable[[Convert], Any] | None = None
    shown: Array | None = None
    bias: Array | None = None
    bias_of: Callable[[Convert], Any] | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Array | None = None
    q_start: Any = None
    k_start: Any = 0
    # The same once more for conventions that have parameters of their own: `shown` is wholly this window (left, right)
    # and these counts per batch entry, where they are given, and `bias` is ALiBi with these slopes (H,).
    window: tuple[int | None, int | None] | None = None
    counts: Array | None = None
    slopes: Array | None = None
    # How q, k and v lie in memory, see LAYOUTS.
    layout: str = "contiguous"
    # Many equal terms, whose rounding errors do not average out.
    coherent: bool = False
    # Whether calls with other data of the same shapes come before and after the one that is judged.
    among_others: bool = False
    # Whether options are handed over as they are, and none is expressed by others: what a probe asks about.
    literal: bool = False
    # Whether the log-sum-exp or the weights are the point of the case, so that it is void where they are not offered.
    asks: tuple[str, ...] = ()
    # Gradient of the output, of its shape, where the gradients of the arguments are the point.
    grad_output: Array | None = None
    # Published or hand-made results: name -> (values, largest error of the digits given).
    known: dict[str, tuple[Array, float]] = field(default_factory=dict)
    # Proven results, each the float64 nearest to the real number, for output, lse and weights, and for "gradient of q"
    # and the like: judged by, if given.
    certified: dict[str, Array] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        """H; 1 for rank 2."""
        return int(self.q.shape[-3]) if self.q.ndim > 2 else 1

    @property
    def batch(self) -> tuple[int, ...]:
        """The axes before the heads, broadcast."""
        return np.broadcast_shapes(*(x.shape[:-3] for x in (self.q, self.k, self.v)))

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """(..., H, Lq, Lk), or (Lq, Lk) for rank 2."""
        return (*self.batch, *self.q.shape[-3:-1], self.k.shape[-2])

    @property
    def visible(self) -> Array:
        """Boolean, broadcasts to (..., H, Lq, Lk): the plain mask and the causal rule. A bias of -inf is not in it."""
        seen = np.ones((1, 1), dtype=bool) if self.shown is None else self.shown
        if not self.causal:
            return seen
        q_len, k_len = self.q.shape[-2], self.k.shape[-2]
        return seen & causal_pairs(q_len, k_len, 0 if self.q_start is None else self.q_start, self.k_start)

    @property
    def differentiable(self) -> dict[str, Array]:
        """The arrays that have a gradient, by name; the array behind `bias_of` is not known."""
        names = ("q", "k", "v", *(("bias",) if self.bias_of is None else ()), "sinks")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    @property
    def needs(self) -> tuple[str, ...]:
        """The features that a target must have, in a fixed order."""
        grouped = self.q.ndim > 2 and self.q.shape[-3] != self.k.shape[-3]
        used = {
            "causal": self.causal,
            "mask": self.mask is not None or self.shown is not None,
            "bias": self.bias is not None,
            "scale": self.scale is not None,
            "softcap": self.softcap is not None,
            "sinks": self.sinks is not None,
            "q_start": self.q_start is not None,
            "k_start": not (isinstance(self.k_start, int) and self.k_start == 0),
            "gqa": grouped,
            "gradients": self.grad_output is not None,
        }
        return tuple(name for name, wanted in used.items() if wanted) + self.asks

    @property
    def plainness(self) -> tuple[int, int]:
        """How many options it uses, those per batch entry counting twice, and how many numbers q, k and v are."""
        starts = sum(np.ndim(start) > 0 for start in (self.q_start, self.k_start) if start is not None)
        return len(self.needs) + starts, self.q.size + self.k.size + self.v.size


class Api(Protocol):
    """What a check gets: refattn's functions are imported, this makes and reads the arrays of one library."""

    name: str
    dtype: str
    # The path that is judged, "dense" or "tiled".
    path: str
    capabilities: frozenset[str]
    draw: Draw

    def array(self, host: Array, dtype: str | None = None) -> Array:
        """A host array as one of the library; floats in the case's dtype unless another is named."""

    def host(self, x: Array) -> Array:
        """The values as NumPy: floats as float64, others as they are."""

    def dtype_of(self, x: Array) -> str:
        """The plain name of an array's dtype."""

    def same_library(self, x: Array) -> bool:
        """Whether x is an array of the library."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case. Exactly one of `build` and `check` is given."""

    name: str
    clauses: tuple[str, ...]
    says: str
    dtypes: tuple[str, ...]
    build: Callable[[Draw], Problem] | None = None
    check: Callable[[Api], None] | None = None

    def draw(self, dtype: str, seed: int) -> Draw:
        """The case's own source of data: the same numbers for every dtype, rounded to it."""
        return Draw(dtype, np.random.default_rng([seed, zlib.crc32(self.name.encode())]))

    def problem(self, dtype: str, seed: int) -> Problem:
        """The problem of this case in one dtype."""
        if self.build is None:
            raise TypeError(f"{self.name} is a check, not a problem")
        return self.build(self.draw(dtype, seed))


class Chapter:
    """The cases of one module, in order; `problem` and `check` are its decorators."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def problem(
        self, *clauses: str, dtypes: tuple[str, ...] = COMPUTED
    ) -> Callable[[Callable[[Draw], Problem]], Callable[[Draw], Problem]]:
        """Adds a function from data to a problem; its docstring says what must hold."""

        def add(build: Callable[[Draw], Problem]) -> Callable[[Draw], Problem]:
            self._add(build, clauses, dtypes, build=build)
            return build

        return add

    def check(
        self, *clauses: str, dtypes: tuple[str, ...] = ("float32",)
    ) -> Callable[[Callable[[Api], None]], Callable[[Api], None]]:
        """Adds a function that raises AssertionError with an explanation; its docstring says what must hold."""

        def add(check: Callable[[Api], None]) -> Callable[[Api], None]:
            self._add(check, clauses, dtypes, check=check)
            return check

        return add

    def _add(self, function: Any, clauses: tuple[str, ...], dtypes: tuple[str, ...], **kind: Any) -> None:
        says = " ".join((function.__doc__ or "").split())
        name = f"{self.name}.{function.__name__}"
        self.cases.append(Case(name=name, clauses=clauses, says=says, dtypes=dtypes, **kind))
