"""The operator Attention of ONNX, in its own reference evaluator and in ONNX Runtime."""

from __future__ import annotations

from typing import Any

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.targets.base import Answer
from refattn.conformance.targets.onnx_models import HostArrays, run_node
from refattn.conformance.targets.rank4 import Rank4Target
from refattn.dtypes import COMPUTED


class AttentionOperator(Rank4Target):
    """4-d inputs without a cache; attn_mask is boolean, or floating and added; is_causal is then top-left."""

    features = frozenset({"causal", "mask", "bias", "scale", "softcap", "gqa", "q_start", "k_start"})
    corner = "top-left"
    causal_with_mask = True
    evaluator: str

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One run of a model that is this node alone; is_causal and attn_mask combine."""
        self.refuse(problem)
        own = self.own_causal(problem)
        attributes: dict[str, Any] = {"is_causal": 1} if own else {}
        if problem.scale is not None:
            attributes["scale"] = problem.scale
        if problem.softcap is not None:
            attributes["softcap"] = problem.softcap
        mask = None
        if problem.bias is not None:
            mask = self.additive(problem, causal=not own)
        elif problem.shown is not None or (problem.causal and not own):
            mask = self.boolean(problem, causal=not own)
        inputs = {"Q": q, "K": k, "V": v, "attn_mask": mask}
        return Answer(run_node(self.evaluator, "Attention", inputs, ("Y",), **attributes)[0])


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
