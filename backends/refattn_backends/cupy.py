"""CuPy on the CUDA devices it finds."""

from collections.abc import Mapping
from typing import Any

from refattn.arguments import Call
from refattn.arrays import Array
from refattn.backend import Plugin, widened
from refattn.partials import Partial


class CupyBackend(Plugin):
    """CuPy arrays."""

    name = "cupy"
    library = "cupy"
    distributions = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
    features = frozenset({"mutable", "tiled"})
    float_dtypes = ("float16", "float32", "float64")

    def _devices(self, cupy: Any) -> Mapping[str, Any]:
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError:  # no driver or no device: nothing runs here
            count = 0
        return {f"cuda:{index}": cupy.cuda.Device(index) for index in range(count)}

    def _array(self, cupy: Any, host: Array, dtype: str | None, device: Any) -> Array:
        with device:
            return cupy.array(widened(host), dtype=dtype)

    def _host(self, cupy: Any, x: Array) -> Array:
        return cupy.asnumpy(x)

    def tiled(self, call: Call) -> Partial:
        """Batched products and fused elementwise kernels, or PyTorch's fused kernel, see `cupy_tiles`."""
        from refattn_backends.cupy_tiles import tiled, torch_on_device

        return tiled(call, torch=torch_on_device())

    def tiled_vjp(self, call: Call, gradient: Array) -> dict[str, Any]:
        """The generic tiles, as large as the device likes them, see `tiles_backward`."""
        from refattn_backends.cupy_tiles import KEYS, ROWS
        from refattn_backends.tiles_backward import tiled_vjp

        return tiled_vjp(call, gradient, ROWS, KEYS)


BACKEND = CupyBackend()
