"""Dask arrays: blocks of NumPy arrays whose values are computed on demand."""

from typing import Any

from refattn.arguments import Call
from refattn.arrays import Array
from refattn.backend import Plugin, has_module
from refattn.partials import Partial
from refattn_backends.numpy import host_dtype


class DaskBackend(Plugin):
    """Dask arrays over NumPy."""

    name = "dask"
    library = "dask.array"
    distributions = ("dask",)
    features = frozenset({"lazy", "tiled"})
    bfloat16_needs = "ml_dtypes"

    def installed(self) -> bool:
        """Whether Dask and the NumPy of its arrays can be found; a bare Dask comes without."""
        return has_module("dask") and has_module("numpy")

    def _array(self, da: Any, host: Array, dtype: str | None, _device: Any) -> Array:
        return da.from_array(host.astype(host_dtype(dtype) or host.dtype))

    def _host(self, _da: Any, x: Array) -> Array:
        return x.compute()

    def tiled(self, call: Call) -> Partial:
        """A task per pair of chunks, see `dask_tiles`."""
        from refattn_backends.dask_tiles import tiled

        return tiled(call)

    def tiled_vjp(self, call: Call, gradient: Array) -> dict[str, Any]:
        """A task per pair of chunks, see `dask_backward`."""
        from refattn_backends.dask_backward import tiled_vjp

        return tiled_vjp(call, gradient)


BACKEND = DaskBackend()
