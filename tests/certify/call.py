"""One call of attention as data, and the book of recipes that make calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from certify.draw import KINDS, Draw


@dataclass(frozen=True, kw_only=True)
class Call:
    """Host float64 inputs, exact; options as in the specification, masks, biases and rotary options as plain data.

    mask is {"kind": "window", "left": 1, "right": 0} and the like, nested in "of" for and, or, not; bias a tuple of
    terms {"kind": "array", "array": ...}, {"kind": "alibi"}, {"kind": "relative", "table": ...}; rotary has style,
    base, width, q_positions and k_positions. `parts` are ranges of keys to evaluate on their own, without sinks;
    `cache` says how a cache is filled with k and v; `wide` names the arrays that keep float32 whatever the kind is;
    `grad_output`, the gradient of the output, asks for the gradients of the arguments.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool = False
    mask: dict[str, Any] | None = None
    bias: tuple[dict[str, Any], ...] = ()
    scale: float | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None
    q_start: int | list[int] | None = None
    k_start: int | list[int] = 0
    rotary: dict[str, Any] | None = None
    parts: tuple[tuple[int, int], ...] = ()
    cache: dict[str, Any] | None = None
    wide: tuple[str, ...] = ()
    grad_output: np.ndarray | None = None

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch shape."""
        return np.broadcast_shapes(*(x.shape[:-3] for x in (self.q, self.k, self.v)))

    @property
    def heads(self) -> int:
        """H; 1 for rank 2."""
        return int(self.q.shape[-3]) if self.q.ndim > 2 else 1

    @property
    def pairs(self) -> tuple[int, ...]:
        """(batch..., H, Lq, Lk), for rank 2 too."""
        return (*self.batch, self.heads, self.q.shape[-2], self.k.shape[-2])


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A function from drawn numbers to a call, with the clauses, the sentence and the flags of its vectors."""

    name: str
    clauses: tuple[str, ...]
    says: str
    flags: tuple[str, ...]
    kinds: tuple[tuple[str, int], ...]
    make: Callable[[Draw], Call]

    def calls(self) -> Iterator[tuple[str, str, Call]]:
        """Name, kind and call of each vector of the recipe."""
        for kind, again in self.kinds:
            name = f"{self.name}.{kind}-{again}" if kind == "base" else f"{self.name}.{kind}"
            yield name, kind, self.make(Draw(self.name, kind, again))


# Two sets of inputs that every dtype holds, and one each of full significance.
ALL = (("base", 1), ("base", 2), ("float32", 1), ("float64", 1))
# Inputs of special values, which full significance would not make more telling.
BASE = (("base", 1), ("base", 2))
ONCE = (("base", 1),)


@dataclass
class Book:
    """The recipes of one chapter, in order."""

    chapter: str
    recipes: list[Recipe] = field(default_factory=list)

    def recipe(
        self, *clauses: str, flags: tuple[str, ...] = (), kinds: tuple[tuple[str, int], ...] = ALL
    ) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
        """Adds a function; its docstring says what must hold, the first clause is the one that it is about."""
        assert all(kind in KINDS for kind, _ in kinds)

        def add(make: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
            says = " ".join((make.__doc__ or "").split())
            name = f"{clauses[0]}.{make.__name__}"
            self.recipes.append(Recipe(name=name, clauses=clauses, says=says, flags=flags, kinds=kinds, make=make))
            return make

        return add


def plain(*arrays: np.ndarray) -> tuple[dict[str, Any], ...]:
    """Bias arrays as terms."""
    return tuple({"kind": "array", "array": array} for array in arrays)


def dense(array: np.ndarray) -> dict[str, Any]:
    """A boolean array as a mask."""
    return {"kind": "dense", "array": np.asarray(array, dtype=bool)}
