"""array-api-strict: the Array API standard and nothing beyond it, with several pretended devices."""

from collections.abc import Mapping
from typing import Any

from refattn.arrays import Array
from refattn.backend import Plugin


class StrictBackend(Plugin):
    """array-api-strict arrays."""

    name = "strict"
    library = "array_api_strict"
    distributions = ("array-api-strict",)
    features = frozenset({"mutable"})
    float_dtypes = ("float32", "float64")

    def _devices(self, strict: Any) -> Mapping[str, Any]:
        found = {str(device).split("'")[1]: device for device in strict.__array_namespace_info__().devices()}
        # Devices without some dtype exist to test creation functions; every other one runs everything.
        return {name: device for name, device in found.items() if not name.startswith("no_")}

    def _array(self, strict: Any, host: Array, dtype: str | None, device: Any) -> Array:
        return strict.asarray(host.copy(), dtype=getattr(strict, dtype or host.dtype.name), device=device)

    def _host(self, strict: Any, x: Array) -> Array:
        import numpy as np

        return np.asarray(x.to_device(strict.Device("CPU_DEVICE")))


BACKEND = StrictBackend()
