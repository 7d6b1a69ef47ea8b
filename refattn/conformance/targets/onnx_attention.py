"""The operator Attention of ONNX, in its own reference evaluator and in ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.targets.base import Answer
from refattn.conformance.targets.onnx_models import OPSET, HostArrays, run_node
from refattn.conformance.targets.rank4 import Rank4Target
from refattn.dtypes import COMPUTED

# The opset in which the operator got windows.
WINDOWS_SINCE = 25


class AttentionOperator(Rank4Target):
    """4-d inputs without a cache; attn_mask is boolean, or floating and added; is_causal is then top-left.

    nonpad_kv_seqlen counts the keys up to the last query's, and so places the queries: what probes ask for literally.
    """

    features = frozenset({"causal", "mask", "bias", "scale", "softcap", "gqa", "q_start", "k_start"})
    corner = "top-left"
    causal_with_mask = True
    windows = "both"
    has_q_start = True
    evaluator: str

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One run of a model that is this node alone; is_causal and attn_mask combine."""
        self.refuse(problem)
        placed = problem.literal and problem.q_start is not None
        own = placed or self.own_causal(problem)
        attributes: dict[str, Any] = {"is_causal": 1} if own else {}
        if problem.scale is not None:
            attributes["scale"] = problem.scale
        if problem.softcap is not None:
            attributes["softcap"] = problem.softcap
        mask, opset = None, OPSET
        if problem.literal and problem.window is not None:
            sides, opset = zip(("left", "right"), problem.window), WINDOWS_SINCE
            attributes |= {f"{side}_window_size": -1 if size is None else size for side, size in sides}
        elif problem.bias is not None:
            mask = self.additive(problem, causal=not own)
        elif problem.shown is not None or (problem.causal and not own):
            mask = self.boolean(problem, causal=not own)
        inputs = {"Q": q, "K": k, "V": v, "attn_mask": mask, "past_key": None, "past_value": None}
        if placed:
            ends = np.broadcast_to(np.asarray(problem.q_start) + q.shape[-2], q.shape[:1])
            inputs["nonpad_kv_seqlen"] = ends.astype(np.int64)
        return Answer(run_node(self.evaluator, "Attention", inputs, ("Y",), opset=opset, **attributes)[0])


class ReferenceTarget(AttentionOperator):
    """In onnx.reference.ReferenceEvaluator."""

    evaluator = "reference"

    def __init__(self, name: str = "onnx-reference") -> None:
        super().__init__(HostArrays("onnx", COMPUTED))
        self.name = name


class RuntimeTarget(AttentionOperator):
    """In ONNX Runtime, whose CPU kernel has two dtypes."""

    evaluator = "runtime"

    def __init__(self, name: str = "onnxruntime") -> None:
        super().__init__(HostArrays("onnxruntime", ("float16", "float32")))
        self.name = name
