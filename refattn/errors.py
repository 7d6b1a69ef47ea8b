"""One error class per broken rule; each names the clause it enforces (chapter E).

Every class derives from `RefattnError` and from ValueError, TypeError or both, so ordinary handlers work (E1).
The message names the argument, what was expected, what came, and the clause (E2).
"""

from __future__ import annotations

from typing import Any


class RefattnError(Exception):
    """Base of all refattn errors.

    `argument` is the offending argument, `expected` and `got` are sentences, `clause` is the label of the rule: the
    class's own, unless the class serves several rules and one is named.
    """

    clause: str = "E1"

    def __init__(self, argument: str, expected: str, got: Any, clause: str | None = None) -> None:
        self.argument, self.expected, self.got = argument, expected, str(got)
        self.clause = clause or type(self).clause
        super().__init__(f"{argument}: expected {expected}; got {self.got} [refattn {self.clause}]")

    def __reduce__(self) -> tuple[type[RefattnError], tuple[str, str, str, str]]:
        return type(self), (self.argument, self.expected, self.got, self.clause)


# A: arrays


class NotAnArrayError(RefattnError, TypeError):
    """An argument that must be an array of a supported library is something else."""

    clause = "A7"


class LibraryMismatchError(RefattnError, TypeError):
    """Arrays of two libraries meet in one call."""

    clause = "A7"


class DeviceMismatchError(RefattnError, ValueError):
    """Arrays on two devices meet in one call."""

    clause = "A7"


class RankError(RefattnError, ValueError):
    """q, k and v do not have one rank of at least 2."""

    clause = "A2"


class ShapeError(RefattnError, ValueError):
    """An axis of q, k or v does not fit the others."""

    clause = "A1"


class BatchError(RefattnError, ValueError):
    """Batch axes, or a per-entry option, do not broadcast to the batch shape."""

    clause = "A3"


class DTypeError(RefattnError, TypeError):
    """q, k and v do not share one supported dtype."""

    clause = "A4"


# S: scores and scale


class ScaleError(RefattnError, ValueError, TypeError):
    """scale is neither a finite real number nor a 0-d floating array of q's library."""

    clause = "S2"


class SoftcapError(RefattnError, ValueError, TypeError):
    """softcap is neither None nor a positive finite real number."""

    clause = "S4"


# M: visibility


class MaskKindError(RefattnError, TypeError):
    """A mask that is not boolean: a floating array is a bias, an integer array is an error."""

    clause = "M1"


class MaskShapeError(RefattnError, ValueError):
    """A mask or bias array that does not broadcast to (..., H, Lq, Lk)."""

    clause = "M15"


class MaskArgumentError(RefattnError, ValueError, TypeError):
    """An argument of a mask is out of its domain; the clause is that of the constructor, M14 for evaluation."""

    clause = "M14"


class CausalError(RefattnError, TypeError):
    """causal is not a Python bool."""

    clause = "M4"


class PositionError(RefattnError, ValueError):
    """A positional mask or bias needs q_start, because Lq and Lk differ or k_start is given."""

    clause = "M5"


class StartError(RefattnError, ValueError, TypeError):
    """q_start or k_start is neither an int nor one int per batch entry."""

    clause = "M3"


# P: softmax


class SinkError(RefattnError, ValueError, TypeError):
    """sinks is not one real logit per query head."""

    clause = "P3"


# G: heads


class HeadCountError(RefattnError, ValueError):
    """The number of query heads is not a multiple of the number of key/value heads."""

    clause = "G1"


class HeadSplitError(RefattnError, ValueError, TypeError):
    """A width cannot be divided into the given number of heads, or heads cannot be pooled into groups."""

    clause = "G3"


# B: positions in the scores


class BiasError(RefattnError, ValueError, TypeError):
    """bias is neither a floating array nor a Bias, or a Bias has unusable arguments."""

    clause = "B4"


class RotaryError(RefattnError, ValueError, TypeError):
    """RoPE was given an unknown style, an unusable base or width, or positions that do not fit."""

    clause = "B5"


# L: the layer


class LayerError(RefattnError, ValueError, TypeError):
    """The inputs, weights or options of the attention layer do not fit together."""

    clause = "L1"


# K: caches


class CacheError(RefattnError, ValueError, TypeError):
    """Keys, values, counts or queries do not fit the cache."""

    clause = "K3"


class CapacityError(CacheError):
    """An append would exceed the capacity; the cache is left as it was."""

    clause = "K6"


class ConsumedCacheError(CacheError):
    """A cache that an append has consumed was used again."""

    clause = "K5"


# T: tiling


class PartialError(RefattnError, ValueError, TypeError):
    """Partials that do not fit together, or none at all, were to be merged."""

    clause = "T3"


# D: derivatives


class GradientError(RefattnError, ValueError, TypeError):
    """The gradient of the output does not have the output's shape, or is not floating."""

    clause = "D1"


# C: cost


class CostError(RefattnError, ValueError, TypeError):
    """A size handed to the cost model is not a non-negative int, or a dtype is unknown."""

    clause = "C1"


# N: numbers


class ModelError(RefattnError, ValueError, TypeError):
    """A bound was asked for a dtype or a rounding model that there is none for."""

    clause = "N6"


# E: errors, paths and plugins


class PathError(RefattnError, ValueError):
    """path names no way of computing attention that is installed."""

    clause = "E4"


class BackendError(RefattnError, ValueError):
    """A backend was asked for that is not installed, or a plugin is broken."""

    clause = "E4"


class VectorError(RefattnError, ValueError):
    """A file of certified vectors is missing, truncated, altered or not of the form that is read; argument names it."""

    clause = "E5"


class InputsError(RefattnError, ValueError):
    """Inputs of a dtype or with a feature were asked for that nobody draws, or rows that are not there."""

    clause = "E4"
