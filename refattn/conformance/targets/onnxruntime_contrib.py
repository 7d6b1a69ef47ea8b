"""ONNX Runtime's own operators of com.microsoft: MultiHeadAttention and GroupQueryAttention, (batch, tokens, width)."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.targets.base import Answer
from refattn.conformance.targets.onnx_models import MICROSOFT, HostArrays, run_node
from refattn.conformance.targets.rank4 import Rank4Target


class MultiHeadTarget(Rank4Target):
    """Masks enter as attention_bias, whose -inf hides; key_padding_mask holds none that differs by head."""

    features = frozenset({"causal", "mask", "bias", "scale", "q_start", "k_start"})
    has_mask = False
    causal_with_mask = True

    def __init__(self, name: str = "onnxruntime-mha") -> None:
        super().__init__(HostArrays("onnxruntime", ("float32",)))
        self.name = name

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One run; `unidirectional` where the problem is causal and square."""
        self.refuse(problem)
        own = self.own_causal(problem)
        attributes: dict[str, Any] = {"num_heads": problem.heads, "unidirectional": int(own)}
        if problem.scale is not None:
            attributes["scale"] = problem.scale
        inputs = {
            **{name: _merged(x) for name, x in (("query", q), ("key", k), ("value", v))},
            "bias": None,
            "key_padding_mask": None,
            "attention_bias": self.additive(problem, causal=not own),
        }
        (output,) = run_node("runtime", "MultiHeadAttention", inputs, ("output",), domain=MICROSOFT, **attributes)
        return Answer(_split(output, problem.heads))


class GroupQueryTarget(Rank4Target):
    """Keys before the last Lq are its past; it has sinks and a soft cap. Its flag `causal` is aligned bottom-right."""

    features = frozenset({"causal", "mask", "bias", "scale", "softcap", "sinks", "gqa", "q_start", "k_start"})
    corner = "bottom-right"
    width_step = 8
    own_value_width = has_mask = False
    causal_with_mask = True
    windows = "left"

    def __init__(self, name: str = "onnxruntime-gqa") -> None:
        super().__init__(HostArrays("onnxruntime", ("float16", "float32")))
        self.name = name

    def refuse(self, problem: Problem) -> None:
        """What the operator's documentation excludes: fewer keys than queries."""
        super().refuse(problem)
        q_len, k_len = problem.q.shape[-2], problem.k.shape[-2]
        if k_len < q_len or not q_len:
            raise Unsupported(f"{self.name} cannot express fewer keys than queries, or none")

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """On past and new keys, masks as attention_bias; a run for each entry if several queries follow a past."""
        self.refuse(problem)
        windowed = problem.literal and problem.window is not None
        mask = None if windowed else self.additive(problem, causal=not self.own_causal(problem))
        batch, _, q_len, _ = problem.q.shape
        if batch > 1 and 1 < q_len < problem.k.shape[-2]:
            ones = [slice(entry, entry + 1) for entry in range(batch)]
            masks = [None if mask is None else mask[one] for one in ones]
            outputs = [self._run(problem, q[one], k[one], v[one], seen) for one, seen in zip(ones, masks)]
            return Answer(np.concatenate(outputs))
        return Answer(self._run(problem, q, k, v, mask))

    def _run(self, problem: Problem, q: Array, k: Array, v: Array, mask: Array | None) -> Array:
        own = self.own_causal(problem)
        (batch, heads, q_len, _), (_, kv_heads, k_len, _) = q.shape, k.shape
        attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "causal": int(own)}
        if problem.scale is not None:
            attributes["scale"] = problem.scale
        if problem.softcap is not None:
            attributes["softcap"] = problem.softcap
        if problem.literal and problem.window is not None and problem.window[0] is not None:
            attributes |= {"local_window_size": problem.window[0], "causal": 1}
        past = k_len - q_len
        inputs = {
            **{name: _merged(x) for name, x in (("query", q), ("key", k[:, :, past:]), ("value", v[:, :, past:]))},
            "past_key": np.ascontiguousarray(k[:, :, :past]),
            "past_value": np.ascontiguousarray(v[:, :, :past]),
            "seqlens_k": np.full(batch, k_len - 1, dtype=np.int32),
            "total_sequence_length": np.asarray(k_len, dtype=np.int32),
            **dict.fromkeys(("cos_cache", "sin_cache", "position_ids")),
            "attention_bias": mask,
            "head_sink": None if problem.sinks is None else self.array(problem.sinks, problem.dtype),
        }
        outputs = ("output", "present_key", "present_value")
        found = run_node("runtime", "GroupQueryAttention", inputs, outputs, domain=MICROSOFT, **attributes)
        return _split(found[0], heads)


def _merged(x: Array) -> Array:
    """(batch, heads, tokens, width) as (batch, tokens, heads * width)."""
    batch, heads, tokens, width = x.shape
    return np.ascontiguousarray(np.swapaxes(x, 1, 2)).reshape(batch, tokens, heads * width)


def _split(x: Array, heads: int) -> Array:
    batch, tokens, width = x.shape
    return np.swapaxes(x.reshape(batch, tokens, heads, width // (heads or 1)), 1, 2)
