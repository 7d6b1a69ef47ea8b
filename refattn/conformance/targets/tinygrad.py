"""Tensor.scaled_dot_product_attention of tinygrad, on the device that it picks."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.targets.base import Answer, TargetError
from refattn.conformance.targets.rank4 import Rank4Target
from refattn.dtypes import COMPUTED

# tinygrad's names of the dtypes that it calls otherwise.
OWN = {"half": "float16", "float": "float32", "double": "float64", "__bf16": "bfloat16"}


class TinygradArrays:
    """tinygrad's tensors, for a target."""

    name = "tinygrad"
    dtypes = COMPUTED
    capabilities = frozenset(COMPUTED)

    def version(self) -> str:
        """The library's version."""
        return importlib.metadata.version("tinygrad")

    def array(self, host: Array, dtype: str | None = None, device: str | None = None) -> Array:
        """A copy of a host array, computed at once."""
        from tinygrad import Tensor, dtypes

        if dtype is None:
            return Tensor(np.ascontiguousarray(host)).realize()
        return Tensor(np.ascontiguousarray(host, dtype=np.float64)).cast(getattr(dtypes, dtype)).contiguous().realize()

    def host(self, x: Array) -> Array:
        """The values as float64."""
        from tinygrad import dtypes

        return x.cast(dtypes.float64).numpy()


class TinygradTarget(Rank4Target):
    """It has neither a scale nor a soft cap nor sinks; is_causal is top-left and excludes a mask."""

    features = frozenset({"causal", "mask", "bias", "gqa", "q_start", "k_start"})

    def __init__(self, name: str = "tinygrad") -> None:
        if "DEV" not in os.environ and shutil.which("clang") is None:
            os.environ["DEV"] = "PYTHON"  # read once, when tinygrad is imported
        from tinygrad import Device

        try:
            Device[Device.DEFAULT]
        except Exception as refusal:  # whatever tinygrad raises where it finds no compiler
            raise TargetError(
                f"{name} is installed, but finds no device here: install clang, or set DEV and see tinygrad's "
                f"documentation ({type(refusal).__name__}: {refusal})"
            ) from refusal
        super().__init__(TinygradArrays())
        self.name = name
        self.notes = (f"on tinygrad's device {Device.DEFAULT}",)

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call, computed at once."""
        if problem.q.ndim != 2 or problem.needs:  # one head without a head axis is taken, masks for it are not tried
            self.refuse(problem)
        options: dict[str, Any] = {"enable_gqa": "gqa" in problem.needs}
        if problem.bias is not None:
            options["attn_mask"] = self.additive(problem, causal=True)
        elif problem.shown is None and self.own_causal(problem):
            options["is_causal"] = True
        elif problem.causal or problem.shown is not None:
            options["attn_mask"] = self.boolean(problem, causal=True)
        return Answer(q.scaled_dot_product_attention(k, v, **options).realize())

    def dtype_of(self, x: Array) -> str:
        """In the usual spelling."""
        return OWN.get(str(x.dtype.name), str(x.dtype.name))

    def expanded(self, x: Array, shape: tuple[int, ...]) -> Array:
        """A lazy broadcast."""
        return x.expand(shape)

    def flipped(self, x: Array) -> Array:
        """A lazy flip."""
        return x.flip(-2)
