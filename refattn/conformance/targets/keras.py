"""keras.ops.dot_product_attention, (batch, tokens, heads, width), on one of Keras' backends."""

from __future__ import annotations

import os
from typing import Any

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.targets.base import Answer, TargetError, library_backend
from refattn.conformance.targets.rank4 import Rank4Target


class KerasTarget(Rank4Target):
    """Its soft cap is documented for one backend on TPUs alone; it has no sinks and no log-sum-exp."""

    features = frozenset({"causal", "mask", "bias", "scale", "gqa", "q_start", "k_start"})
    own_value_width = False
    causal_with_mask = True

    def __init__(self, name: str, library: str) -> None:
        os.environ.setdefault("KERAS_BACKEND", library)  # Keras reads it once, when it is imported
        import keras

        if keras.backend.backend() != library:
            raise TargetError(
                f"{name} needs Keras on {library}, but in this process it runs on {keras.backend.backend()}: "
                f"set KERAS_BACKEND={library}"
            )
        super().__init__(library_backend(library))
        self.name, self._version = name, keras.__version__
        self.mask_with_bias = library != "torch"

    def versions(self) -> dict[str, str]:
        """Keras and its backend."""
        return {"keras": self._version, **super().versions()}

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call; is_causal where it says what the problem says, else a mask. On torch a bias excludes a mask."""
        import keras

        self.refuse(problem)
        own = self.own_causal(problem)
        options: dict[str, Any] = {"scale": problem.scale, "is_causal": own}
        masked = problem.shown is not None or (problem.causal and not own)
        if masked and problem.bias is not None and self.backend.name == "torch":
            options["bias"] = self.additive(problem, causal=not own)
        elif masked:
            options["mask"] = self.boolean(problem, causal=not own)
        if problem.bias is not None and "bias" not in options:
            options["bias"] = self.argument("bias", problem, lambda bias: self.pairs(bias, problem))
        tokens = [x.swapaxes(1, 2) for x in (q, k, v)]
        return Answer(keras.ops.dot_product_attention(*tokens, **options).swapaxes(1, 2))
