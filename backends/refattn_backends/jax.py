"""JAX on every device of its default platform. float64 needs its switch `jax_enable_x64`."""

from collections.abc import Mapping
from typing import Any

from refattn.arguments import Call
from refattn.arrays import Array
from refattn.backend import Plugin
from refattn.errors import BackendError
from refattn.partials import Partial
from refattn_backends.numpy import host_dtype


class JaxBackend(Plugin):
    """JAX arrays."""

    name = "jax"
    library = "jax"
    distributions = ("jax",)
    features = frozenset({"traces", "autodiff", "tiled"})

    def _devices(self, jax: Any) -> Mapping[str, Any]:
        return {f"{device.platform}:{device.id}": device for device in jax.devices()}

    def _array(self, jax: Any, host: Array, dtype: str | None, device: Any) -> Array:
        host = host.astype(host_dtype(dtype) or host.dtype)
        # Without the switch JAX hands back float32 without a word; integers may narrow, they are small here.
        if host.dtype == "float64" and not jax.config.jax_enable_x64:
            switch = "set JAX_ENABLE_X64=1, or call jax.config.update('jax_enable_x64', True) at the start"
            raise BackendError("dtype of backend 'jax'", f"float64 with JAX's 64-bit switch on ({switch})", "it off")
        return jax.device_put(host, device, may_alias=False)

    def _host(self, jax: Any, x: Array) -> Array:
        return jax.device_get(x)

    def tiled(self, call: Call) -> Partial:
        """Loops over tiles that trace, see `jax_tiles`."""
        from refattn_backends.jax_tiles import tiled

        return tiled(call)

    def tiled_vjp(self, call: Call, gradient: Array) -> dict[str, Any]:
        """Loops over tiles that trace, see `jax_backward`."""
        from refattn_backends.jax_backward import tiled_vjp

        return tiled_vjp(call, gradient)


BACKEND = JaxBackend()
