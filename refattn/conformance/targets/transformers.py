"""The attention functions of transformers' models, called as the attention layers call them."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.plain import LARGEST
from refattn.conformance.targets.base import Answer, library_backend
from refattn.conformance.targets.rank4 import Rank4Target

# What the attention function of a model has beside a mask.
OWN = {"llama": frozenset[str](), "gemma2": frozenset({"softcap"}), "gpt_oss": frozenset({"sinks"})}


class TransformersTarget(Rank4Target):
    """Eager functions add a mask that holds the dtype's lowest number, as the models' own masks do."""

    def __init__(self, name: str, model: str = "llama", implementation: str = "eager") -> None:
        super().__init__(library_backend("torch"))
        import transformers

        self.name, self._version = name, transformers.__version__
        self._needs_sinks = model == "gpt_oss"
        self._eager = implementation == "eager"
        self.has_causal = self.has_mask = self.causal_with_mask = not self._eager
        if self._eager:
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
            self._function = module.eager_attention_forward
        else:
            from transformers import AttentionInterface

            self._function = AttentionInterface()[implementation]
        always = {"causal", "mask", "bias", "scale", "gqa", "q_start", "k_start"}
        self.features = frozenset(always) | OWN[model]

    def versions(self) -> dict[str, str]:
        """transformers and torch."""
        return {"transformers": self._version, **super().versions()}

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call with the layer's attributes that such a function reads; the output comes tokens first."""
        self.refuse(problem)
        if self._needs_sinks and problem.sinks is None:
            raise Unsupported(f"{self.name} always has sinks")
        layer = SimpleNamespace(
            num_key_value_groups=q.shape[1] // (k.shape[1] or 1),
            training=False,
            is_causal=False,
            sinks=None if problem.sinks is None else self.argument("sinks", problem),
            head_dim=q.shape[-1],
        )
        options: dict[str, Any] = {"scaling": self._scale(problem), "dropout": 0.0}
        if problem.softcap is not None:
            options["softcap"] = problem.softcap
        output, _ = self._function(layer, q, k, v, self._mask(problem, layer), **options)
        return Answer(output.transpose(1, 2))

    def _scale(self, problem: Problem) -> float:
        """The layers always pass it."""
        return float((problem.q.shape[-1] or 1) ** -0.5 if problem.scale is None else problem.scale)

    def _mask(self, problem: Problem, layer: SimpleNamespace) -> Any:
        """None without one; for "sdpa" boolean, or is_causal; else floating, with the lowest number for hidden."""
        if self._eager:
            causal = problem.causal or problem.shown is not None
            return self.additive(problem, causal, hidden=-LARGEST[problem.dtype] if causal else -np.inf)
        if problem.literal:  # the attribute and the mask are two
            layer.is_causal = problem.causal
            return self.boolean(problem, causal=False) if problem.bias is None else self.additive(problem, causal=False)
        if problem.bias is not None:
            return self.additive(problem, causal=True)
        if self.own_causal(problem) and problem.shown is None:
            layer.is_causal = True
            return None
        return self.boolean(problem, causal=True) if problem.causal or problem.shown is not None else None
