"""The tiled CPU kernel of torch's scaled_dot_product_attention, and the log-sum-exp that it keeps for derivatives."""

from __future__ import annotations

from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.targets.base import Answer
from refattn.conformance.targets.torch import TorchTarget


class TorchFlashTarget(TorchTarget):
    """The output comes from the public function; the log-sum-exp from the operator below it, which alone has it."""

    features = TorchTarget.features | {"lse"}
    # What `refattn.conformance.alarms` fits random problems to.
    own_value_width = False
    width_step = 1

    def __init__(self, name: str = "torch-flash") -> None:
        super().__init__(name, "flash")

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call on that kernel, which refuses what it cannot do; and one of the operator."""
        import torch

        try:
            output = super().compute(problem, q, k, v, again).output
        except RuntimeError as refusal:
            if "No available kernel" not in str(refusal):
                raise
            raise Unsupported(f"{self.name} does not take this call: torch finds no such kernel for it") from refusal
        # The public function keeps calls of nothing away from the operator, which would divide by zero.
        if again or 0 in (*q.shape, *k.shape, *v.shape):
            return Answer(output)
        options = self.options(problem)
        if options.pop("enable_gqa", False):
            group = q.shape[-3] // k.shape[-3]
            k, v = (x.repeat_interleave(group, dim=-3) for x in (k, v))
        mask = options.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:  # the public function adds it, too
            options["attn_mask"] = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        _, lse = operator(q, k, v, 0.0, options.pop("is_causal", False), **options)
        return Answer(output, lse)
