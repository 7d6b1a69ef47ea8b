"""Calls the target for the probes: refusals and crashes become exceptions of their own, side effects are remembered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.conformance.capture import captured
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.judge import Result
from refattn.conformance.plain import rounded
from refattn.conformance.targets.base import WorkerError
from refattn.dtypes import COMPUTED

# Sizes of most calls: two heads, so that heads can be mixed up, and a width whose default scale, 1/4, is exact.
HEADS, WIDTH = 2, 16
# Of a message that is quoted.
LONGEST = 130
# How far a number may be from what a reading predicts, relative above 1: readings differ by much more.
NEAR = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-3, "float64": 2e-3}


class NotOffered(Exception):
    """The target has no such option or result."""


class Raised(Exception):
    """The call raised something: the class of it, and its message in one line."""

    def __init__(self, fault: BaseException) -> None:
        text = " ".join(str(fault).split())
        # A fault from another process says what was raised there; how such a process ended is no class of errors.
        self.kind = fault.kind if isinstance(fault, WorkerError) else type(fault).__name__
        text = text if text.startswith(self.kind) else f"{self.kind}: {text}".rstrip(": ")
        super().__init__(f"{text[:LONGEST]}..." if len(text) > LONGEST else text)


class Crashed(Raised):
    """The call ended its process, or took more memory than it may."""


class Unclear(Exception):
    """The answer cannot be read, or fits no conclusion."""


class Seen(NamedTuple):
    """What a probe saw: one of its values, and words if there is more to say than the value's own."""

    found: str
    words: str = ""


class Caller:
    """One target, as the probes see it."""

    def __init__(self, target: Any, dtype: str | None = None) -> None:
        self.target = target
        order = ("float32", "bfloat16", "float16", "float64")
        self.dtypes = tuple(name for name in COMPUTED if name in target.dtypes)
        self.dtype = dtype or next((name for name in order if name in self.dtypes), "float32")
        # Inputs that some call wrote to, and whether some second call gave other bits.
        self.changed: set[str] = set()
        self.irreproducible = 0
        self._plain: bool | None = None
        self._factors: dict[int, float] = {}

    @property
    def near(self) -> float:
        """How far a number may be from its prediction in the main dtype."""
        return NEAR[self.dtype]

    def lacks(self, *needs: str) -> str:
        """Why the target cannot express these features, or ""."""
        return str(self.target.unsupported(needs, self.dtype))

    def result(self, problem: Problem) -> Result:
        """The answer as it came. Raises NotOffered, Raised, and Unclear for what is no array."""
        if reason := self.target.unsupported(problem.needs, problem.dtype):
            raise NotOffered(reason)
        # What the dtype cannot hold would look like inputs that were written to.
        problem = replace(problem, **{name: rounded(getattr(problem, name), problem.dtype) for name in "qkv"})
        try:
            with captured([]):
                result: Result = self.target.call(problem)
        except Unsupported as refusal:
            raise NotOffered(str(refusal)) from refusal
        except WorkerError as fault:
            if fault.verdict == "timed out":  # slow is not wrong
                raise Unclear(str(fault)) from fault
            raise (Raised if fault.kind else Crashed)(fault) from fault
        except (Exception, SystemExit) as fault:  # whatever a target raises is a finding, exit included
            raise Raised(fault) from fault
        if not result.library:
            raise Unclear(result.foreign or "the output is no array")
        self.changed |= set(result.changed)
        self.irreproducible += result.repeated is False
        return result

    def output(self, problem: Problem) -> Array:
        """The output, float64, of the shape that it must have."""
        output = self.result(problem).output
        expected = (*problem.scores_shape[:-1], problem.v.shape[-1])
        if output.shape != expected:
            raise Unclear(f"the output has shape {output.shape}, expected {expected}")
        return output

    def weights(self, problem: Problem) -> Array:
        """The weights (..., H, Lq, Lk), read off the output: v must be the identity, and at least as wide as Lk."""
        return self.output(problem)[..., : problem.k.shape[-2]]

    def lse(self, problem: Problem) -> Array:
        """The log-sum-exp (..., H, Lq)."""
        result = self.result(problem)
        if result.lse is None:
            raise NotOffered("it returns no log-sum-exp")
        expected = problem.q.shape[:-1]
        if np.shape(result.lse) != expected:
            raise Unclear(f"the log-sum-exp has shape {np.shape(result.lse)}, expected {expected}")
        return result.lse

    def ratio(self, d_k: int = WIDTH, heads: int = HEADS, d_v: int | None = None, **options: Any) -> float:
        """The effective scale: log(w1 / w0) / 2 for two keys with the raw scores 0 and 2. NaN if that is no number."""
        q, k = np.zeros((1, heads, 1, d_k)), np.zeros((1, heads, 2, d_k))
        q[..., 0], k[..., 1, 0], k[..., -1] = 1.0, 2.0, 1.0
        v = identity(2, d_v or d_k) + np.zeros((1, heads, 1, 1))
        weights = self.weights(Problem(q=q, k=k, v=v, dtype=self.dtype, **options))
        first = weights.reshape(-1, 2)[0]
        if not (np.all(np.isfinite(first)) and np.all(first > 0)):
            return float("nan")
        return float(np.log(first[1] / first[0]) / 2)

    def factor(self, d_k: int = WIDTH) -> float:
        """What raw scores are multiplied by if no scale is given, as measured, so that other probes can rely on it."""
        if d_k not in self._factors:
            self._factors[d_k] = self.ratio(d_k)
        factor = self._factors[d_k]
        if not np.isfinite(factor) or factor == 0:
            raise Unclear("the scale of the scores could not be measured")
        return factor

    def likely_factor(self) -> float:
        """The factor if it could be measured, and else the usual one: for probes that do not need it exactly."""
        try:
            return self.factor()
        except Unclear:
            return float(WIDTH**-0.5)

    def require_softmax(self) -> None:
        """Raises Unclear unless plain rows have the weights that their measured scale gives."""
        if self._plain is None:
            raw = np.asarray([[0.0, 4.0, 8.0], [6.0, -2.0, 1.0]])
            weights = self.weights(Problem(**planted(raw, self.dtype)))
            self._plain = self.close(weights, softmax(raw * self.factor()))
        if not self._plain:
            raise Unclear("plain rows are no softmax over keys already")

    def match(self, actual: Array, readings: Mapping[str, Any]) -> str:
        """The first reading that predicts what came; "other" if none does."""
        return next((name for name, expected in readings.items() if self.close(actual, expected)), "other")

    def close(self, actual: Any, expected: Any) -> bool:
        """Near everywhere, NaN and infinities where they are expected."""
        actual, expected = np.broadcast_arrays(np.asarray(actual, dtype=float), np.asarray(expected, dtype=float))
        with np.errstate(invalid="ignore"):
            near = np.abs(actual - expected) <= self.near * np.maximum(1.0, np.abs(expected))
            near &= np.isfinite(expected)
        return bool(np.all(near | (actual == expected) | (np.isnan(actual) & np.isnan(expected))))


def identity(k_len: int, width: int) -> Array:
    """v whose outputs are weights, (Lk, width)."""
    return np.eye(k_len, max(width, k_len))


def planted(scores: Any, dtype: str, *, heads: int = HEADS, v: Any = None, batch: int = 1) -> dict[str, Any]:
    """q, k and v with these raw scores, (Lq, Lk) or (H, Lq, Lk), as keyword arguments of Problem.

    q is the identity and k the transpose of the scores, so that nothing but the scores' own rounding is lost. The last
    component of k is 1, where q is 0, so that no key is zero.
    """
    scores = np.broadcast_to(scores, (batch, heads, *np.shape(scores)[-2:]))
    q_len, k_len = scores.shape[-2:]
    q = np.broadcast_to(np.eye(q_len, WIDTH), (batch, heads, q_len, WIDTH)).copy()
    k = np.zeros((batch, heads, k_len, WIDTH))
    k[..., :q_len], k[..., -1] = np.swapaxes(scores, -1, -2), 1.0
    values = identity(k_len, WIDTH) if v is None else np.asarray(v, dtype=float)
    return {"q": q, "k": k, "v": np.broadcast_to(values, (batch, heads, *values.shape[-2:])).copy(), "dtype": dtype}


def blank(q_len: int, k_len: int, dtype: str, **sizes: Any) -> dict[str, Any]:
    """All scores 0 and v = identity: uniform weights over what is visible."""
    return planted(np.zeros((q_len, k_len)), dtype, **sizes)


def softmax(logits: Any) -> Array:
    """Along the last axis; a row of -inf gives NaN."""
    logits = np.asarray(logits, dtype=float)
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
        return weights / np.sum(weights, axis=-1, keepdims=True)


def uniform(visible: Array) -> Array:
    """The weights of zero scores over the visible pairs, each row having some."""
    return visible / np.sum(visible, axis=-1, keepdims=True)


Look = Callable[[Caller], "Seen | str"]
