"""What most public implementations share: four axes, one batch size, and masks that are arrays."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.targets.base import ArrayTarget

Corner = Literal["top-left", "bottom-right", "square"]


class Rank4Target(ArrayTarget):
    """q (B, H, Lq, d_k), k (B, Hkv, Lk, d_k) and v (B, Hkv, Lk, d_v); subclasses change the order of the axes."""

    # Where the implementation's own causal flag puts query 0 if Lq != Lk, as documented; "square" where nothing is.
    corner: Corner = "square"
    # Whether v may be wider or narrower than k.
    own_value_width = True
    # What every width must be a multiple of.
    width_step = 1
    # What the signature has: a causal flag, a boolean mask, the two together, masks beside a bias, and a window that
    # reaches to both sides, or to the left alone.
    has_causal = has_mask = True
    windows: Literal["none", "left", "both"] = "none"
    # Whether it takes the position of the first query, of the whole batch or of each entry.
    has_q_start = False
    causal_with_mask = mask_with_bias = False

    def refuse(self, problem: Problem) -> None:
        """Raises Unsupported for shapes that the implementation's documentation does not allow."""
        shapes = [x.shape for x in (problem.q, problem.k, problem.v)]
        if any(len(shape) != 4 for shape in shapes):
            raise Unsupported(f"{self.name} cannot express ranks other than 4")
        if len({shape[0] for shape in shapes}) > 1:
            raise Unsupported(f"{self.name} cannot express batch sizes that differ")
        if not self.own_value_width and problem.k.shape[-1] != problem.v.shape[-1]:
            raise Unsupported(f"{self.name} cannot express d_v other than d_k")
        if problem.q.shape[-1] % self.width_step:
            raise Unsupported(f"{self.name} cannot express a width that is no multiple of {self.width_step}")
        if problem.literal:
            self._refuse_literal(problem)

    def _refuse_literal(self, problem: Problem) -> None:
        """Raises Unsupported for options that only others of the implementation could express."""
        window = problem.window
        # A window says all that its mask does.
        mask, bias = problem.shown is not None and window is None, problem.bias is not None
        lacking = {
            "positions": (problem.q_start is not None and not self.has_q_start) or "k_start" in problem.needs,
            "causal flag": problem.causal and not self.has_causal,
            "boolean mask": mask and not self.has_mask,
            "causal flag beside a mask": problem.causal and (mask or bias) and not self.causal_with_mask,
            "boolean mask beside a bias": mask and bias and not self.mask_with_bias,
            "windows": window is not None and self.windows == "none",
            "windows that reach to the right": window is not None and window[1] != 0 and self.windows == "left",
        }
        for what, wanted in lacking.items():
            if wanted:
                raise Unsupported(f"{self.name} has no {what} of its own")

    def own_causal(self, problem: Problem) -> bool:
        """Whether the implementation's causal flag says what the problem says; without q_start it is asked as such."""
        if not problem.causal or "k_start" in problem.needs:
            return False
        if problem.q_start is None:
            return True
        surplus = problem.k.shape[-2] - problem.q.shape[-2]
        start = {"top-left": 0, "bottom-right": surplus, "square": None if surplus else 0}[self.corner]
        return bool(isinstance(problem.q_start, int) and problem.q_start == start)

    def pairs(self, values: Array, problem: Problem) -> Array:
        """A host array that broadcasts to the pairs, in full: (B, H, Lq, Lk); as it is where options are literal."""
        if problem.literal:
            return np.asarray(values)
        (batch, heads, q_len, _), k_len = problem.q.shape, problem.k.shape[-2]
        return np.broadcast_to(values, (batch, heads, q_len, k_len)).copy()

    def boolean(self, problem: Problem, causal: bool) -> Any:
        """The mask as an array of the library, True = visible, None for none; `causal`: it holds the causal rule."""
        seen = problem.visible if causal else problem.shown
        return None if seen is None else self.array(self.pairs(seen, problem))

    def additive(self, problem: Problem, causal: bool, hidden: float = -np.inf) -> Any:
        """Bias and mask in one floating array of q's dtype, `hidden` where a pair is hidden; None for neither."""
        seen = problem.visible if causal else problem.shown
        if seen is None and problem.bias is None:
            return None

        def added(bias: Any) -> Array:
            return self.pairs(bias if seen is None else np.where(seen, bias, hidden), problem)

        if problem.bias is None:
            return self.array(added(0.0), problem.dtype)
        return self.argument("bias", problem, added)
