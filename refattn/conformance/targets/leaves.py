"""Gradients of what a target makes of bias and sinks before it hands them over, summed back into the problem's arrays.

An implementation may want a bias in full, joined to a mask, or without an axis. Its gradient then has that form, and
each of its elements belongs to one number of the problem's bias, or to none where the form holds something else.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem


def _known(numbers: Array) -> Array:
    """Where there is a number, and not what stands for hidden pairs: -inf, or the lowest number of a dtype."""
    return np.isfinite(numbers) & (numbers >= 0)


def at_numbers(values: Array, numbers: Array) -> Array:
    """The values that stand at these numbers; where there is none, what stands in its place."""
    known = _known(numbers)
    if not np.size(values):
        return np.where(known, 0.0, numbers)
    return np.where(known, np.ravel(values)[np.where(known, numbers, 0).astype(int)], numbers)


class Leaves:
    """The arrays that one call, or one for each entry of a batch, makes of bias and sinks, in order.

    traced are the same arrays as a library follows them, by the keys of `arrays`; they are handed over in their place.
    """

    def __init__(self, traced: Mapping[str, Array] | None = None) -> None:
        self.arrays: dict[str, Array] = {}
        self._numbers: dict[str, tuple[str, Array]] = {}
        self._traced = traced

    def add(self, name: str, array: Array, numbers: Array) -> Array:
        """Keeps an array made of that argument, with the number behind each element; returns what to hand over."""
        key = f"{name} {len(self.arrays)}"
        self.arrays[key], self._numbers[key] = array, (name, np.asarray(numbers))
        return array if self._traced is None else self._traced[key]

    def keys(self, name: str) -> list[str]:
        """The keys of the arrays made of an argument."""
        return [key for key, (of, _) in self._numbers.items() if of == name]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of an array."""
        return tuple(np.shape(self._numbers[key][1]))

    def summed(self, name: str, gradients: Mapping[str, Array], problem: Problem) -> Array:
        """The gradient of the problem's own array, float64, of those of the arrays made of it, on the host by key."""
        values = np.asarray(getattr(problem, name))
        total = np.zeros(values.size)
        for key in self.keys(name):
            numbers = self._numbers[key][1]
            known = _known(numbers)
            total += np.bincount(numbers[known].astype(int), gradients[key][known], minlength=values.size)
        return total.reshape(values.shape)
