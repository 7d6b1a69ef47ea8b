"""`refattn check` on CUDA devices alone: `python -m refattn_backends.gpu_check TARGET [options]`, as `gpu` runs it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from typing import Any

from refattn_backends.torch import TorchBackend


class CudaOnly(TorchBackend):
    """PyTorch without its CPU, so that the first device is the CUDA one."""

    def _devices(self, torch: Any) -> Mapping[str, Any]:
        return {name: device for name, device in super()._devices(torch).items() if name.startswith("cuda")}


if __name__ == "__main__":
    import refattn_backends.torch

    refattn_backends.torch.BACKEND = CudaOnly()
    sys.argv[:] = ["refattn", "check", *sys.argv[1:]]
    runpy.run_module("refattn", run_name="__main__")
