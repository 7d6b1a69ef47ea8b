"""Faults of a function that works tile by tile, or on halves of the keys (chapter T)."""

from __future__ import annotations

import math
from typing import Any

from refattn.arrays import Array
from refattn.conformance.faults.fault import Fault
from refattn.conformance.faults.pipeline import Split, Tiled

Part = tuple[Array, Array]


def _averaged(run: Any, first: Part, second: Part) -> Part:
    """The mean of the two outputs."""
    lse = Split.merged(run, first, second)[1]
    return (first[0] + second[0]) / 2, lse


def _summed(run: Any, first: Part, second: Part) -> Part:
    """The sum of the two outputs, which are normalised already."""
    return first[0] + second[0], Split.merged(run, first, second)[1]


FAULTS = (
    Fault(
        name="tail tile is dropped",
        clause="T1",
        kind="test oracle",
        base=Tiled,
        steps={"tiles": lambda run: range(0, run.k_len - run.k_len % run.tile, run.tile)},
    ),
    Fault(name="tail tile is not masked", clause="T1", kind="gradient", base=Tiled, steps={"beyond": lambda run: 0.0}),
    Fault(
        name="sum is not rescaled",
        clause="T1",
        kind="overflow",
        base=Tiled,
        steps={"sum_shrink": lambda run, shrink: run.xp.ones_like(shrink)},
    ),
    Fault(
        name="output is not rescaled",
        clause="T1",
        kind="overflow",
        base=Tiled,
        steps={"output_shrink": lambda run, shrink: run.xp.ones_like(shrink)},
    ),
    Fault(
        name="running maximum starts at 0",
        clause="T1",
        kind="overflow",
        base=Tiled,
        steps={"first_peak": lambda run: 0.0},
    ),
    Fault(
        name="hidden first tile gives NaN",
        clause="T1",
        kind="overflow",
        base=Tiled,
        steps={"level": lambda run, peak: peak},
    ),
    Fault(
        name="only the first tiles are read",
        clause="T1",
        kind="cache drift",
        base=Tiled,
        steps={"tiles": lambda run: range(0, min(run.k_len, 2 * run.tile), run.tile)},
    ),
    Fault(name="halves are averaged", clause="T1", kind="LSE merge", base=Split, steps={"merged": _averaged}),
    Fault(name="halves are added", clause="T1", kind="LSE merge", base=Split, steps={"merged": _summed}),
    Fault(
        name="halves merge in base 2",
        clause="T1",
        kind="LSE merge",
        base=Split,
        steps={"part_lse": lambda run, lse: lse / math.log(2)},
    ),
    Fault(
        name="halves weigh by their logarithm",
        clause="T1",
        kind="LSE merge",
        base=Split,
        steps={"share": lambda run, lse, level: run.xp.where(lse == -math.inf, 0.0, run.xp.exp((lse - level) / 2))},
    ),
)
