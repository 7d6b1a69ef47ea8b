"""PyTorch on the CPU and on every CUDA device it finds."""

from collections.abc import Mapping
from typing import Any

from refattn.arguments import Call
from refattn.arrays import Array
from refattn.backend import Plugin, widened
from refattn.partials import Partial


class TorchBackend(Plugin):
    """PyTorch tensors."""

    name = "torch"
    library = "torch"
    distributions = ("torch",)
    features = frozenset({"traces", "autodiff", "mutable", "tiled"})

    def _devices(self, torch: Any) -> Mapping[str, Any]:
        names = ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count())))
        return {name: torch.device(name) for name in names}

    def _array(self, torch: Any, host: Array, dtype: str | None, device: Any) -> Array:
        # PyTorch reads neither ml_dtypes nor negative strides, hence a plain copy, widened without loss.
        plain = torch.from_numpy(widened(host).copy(order="C"))
        name = host.dtype.name if dtype is None else dtype
        return plain.to(device=device, dtype=getattr(torch, name))

    def _host(self, torch: Any, x: Array) -> Array:
        x = x.detach().cpu().resolve_conj().resolve_neg()  # lazy bits that NumPy has not
        small = x.dtype == torch.bfloat16 or (x.dtype.is_floating_point and x.dtype.itemsize == 1)
        return (x.to(torch.float32) if small else x).numpy()

    def tiled(self, call: Call) -> Partial:
        """Fused kernels and generic tiles, see `torch_tiles`."""
        from refattn_backends.torch_tiles import tiled

        return tiled(call)

    def tiled_vjp(self, call: Call, gradient: Array) -> dict[str, Any]:
        """The derivative of the fused kernel for the CPU, and generic tiles, see `torch_backward`."""
        from refattn_backends.torch_backward import tiled_vjp

        return tiled_vjp(call, gradient)


BACKEND = TorchBackend()
