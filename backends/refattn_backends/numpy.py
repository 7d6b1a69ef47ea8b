"""NumPy on the host; bfloat16 where ml_dtypes is installed."""

import importlib
from typing import Any

from refattn.arguments import Call
from refattn.arrays import Array
from refattn.backend import Plugin
from refattn.partials import Partial


class NumpyBackend(Plugin):
    """NumPy arrays."""

    name = "numpy"
    library = "numpy"
    distributions = ("numpy",)
    features = frozenset({"mutable", "tiled"})
    bfloat16_needs = "ml_dtypes"

    def _array(self, np: Any, host: Array, dtype: str | None, _device: Any) -> Array:
        return np.array(host, dtype=host_dtype(dtype))

    def _host(self, np: Any, x: Array) -> Array:
        return np.asarray(x)

    def tiled(self, call: Call) -> Partial:
        """Threads over head groups and tiles, see `numpy_tiles`."""
        from refattn_backends.numpy_tiles import tiled

        return tiled(call)

    def tiled_vjp(self, call: Call, gradient: Array) -> dict[str, Any]:
        """Threads over heads and tiles, see `numpy_backward`; the generic tiles for what those leave."""
        from refattn_backends.numpy_backward import backward
        from refattn_backends.tiles_backward import tiled_vjp

        found = backward(call, gradient)
        return tiled_vjp(call, gradient) if found is None else found


def host_dtype(name: str | None) -> Any:
    """What NumPy takes as the dtype of that name, None for none; bfloat16 is ml_dtypes'."""
    return importlib.import_module("ml_dtypes").bfloat16 if name == "bfloat16" else name


BACKEND = NumpyBackend()
