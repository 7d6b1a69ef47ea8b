"""The array libraries that the tests run on: how to make an array of each, and how to read one back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

# JAX compiles every operation for each new shape, Dask schedules each call: what other libraries or the conformance
# cases show on them as well is left out there.
SLOW = ("jax", "dask")
EAGER = pytest.mark.library("numpy", "torch", "strict", "cupy")
NOT_JAX = pytest.mark.library("numpy", "torch", "strict", "cupy", "dask")


def dtypes(name: str) -> tuple[str, ...]:
    """The names of a library's float dtypes, as its plugin says; nothing of the library is imported."""
    return tuple(importlib.import_module(f"refattn_backends.{name}").BACKEND.dtypes)


@dataclass(frozen=True)
class Library:
    """One array library: `array` makes its arrays from host ones, `host` reads them back as NumPy arrays."""

    name: str
    xp: Any
    mutable: bool
    make: Callable[[np.ndarray, str | None], Any]
    read: Callable[[Any], Any]

    @property
    def slow(self) -> bool:
        """Whether each new shape is compiled, or each call scheduled."""
        return self.name in SLOW

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The names of its float dtypes."""
        return dtypes(self.name)

    def array(self, host: Any, dtype: str | None = None) -> Any:
        """A library array with the values of `host`, in the named dtype (by default the host's own)."""
        return self.make(np.asarray(host), dtype)

    def host(self, x: Any) -> np.ndarray:
        """The values of x as a NumPy array; bfloat16 and float16 widen to float32."""
        out = np.asarray(self.read(x))
        return out.astype(np.float32) if str(out.dtype) in ("bfloat16", "float16") else out

    def dtype(self, name: str) -> Any:
        """The library's own dtype object."""
        return self.array(np.zeros(1), name).dtype


def host_cast(host: np.ndarray, dtype: str | None) -> np.ndarray:
    if dtype == "bfloat16":
        return host.astype(importlib.import_module("ml_dtypes").bfloat16)
    return host.astype(dtype or host.dtype)


def numpy() -> Library:
    """NumPy, every array read-only: any write to an argument raises."""

    def make(host: np.ndarray, dtype: str | None) -> np.ndarray:
        out = host_cast(host, dtype).copy()
        out.flags.writeable = False
        return out

    return Library("numpy", importlib.import_module("array_api_compat.numpy"), False, make, np.asarray)


def strict() -> Library:
    """array-api-strict with every optional part of the standard switched off."""
    xp = importlib.import_module("array_api_strict")
    xp.set_array_api_strict_flags(boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=())

    def make(host: np.ndarray, dtype: str | None) -> Any:
        return xp.asarray(host_cast(host, dtype))

    return Library("strict", xp, True, make, np.from_dlpack)


def torch() -> Library:
    module = importlib.import_module("torch")

    def make(host: np.ndarray, dtype: str | None) -> Any:
        return module.from_numpy(host.copy(order="C")).to(getattr(module, dtype or str(host.dtype)))

    def read(x: Any) -> Any:
        x = x.detach().cpu()
        return (x.float() if x.dtype in (module.bfloat16, module.float16) else x).numpy()

    return Library("torch", importlib.import_module("array_api_compat.torch"), True, make, read)


def jax() -> Library:
    """JAX with 64-bit types enabled."""
    importlib.import_module("jax").config.update("jax_enable_x64", True)
    xp = importlib.import_module("jax.numpy")

    def make(host: np.ndarray, dtype: str | None) -> Any:
        return xp.asarray(host_cast(host, dtype))

    return Library("jax", xp, False, make, np.asarray)


def dask() -> Library:
    """Dask in pieces of at most two elements along every axis, the sequence's included."""
    module = importlib.import_module("dask")
    module.config.set(scheduler="synchronous")
    from_array = importlib.import_module("dask.array").from_array

    def make(host: np.ndarray, dtype: str | None) -> Any:
        pieces = tuple(min(2, size) or -1 for size in host.shape)
        return from_array(host_cast(host, dtype), chunks=pieces)

    def read(x: Any) -> Any:
        return x.compute() if hasattr(x, "compute") else x

    xp = importlib.import_module("array_api_compat.dask.array")
    return Library("dask", xp, False, make, read)


def cupy() -> Library:
    module = importlib.import_module("cupy")

    def make(host: np.ndarray, dtype: str | None) -> Any:
        return module.asarray(host_cast(host, dtype))

    return Library("cupy", importlib.import_module("array_api_compat.cupy"), True, make, module.asnumpy)


LIBRARIES: dict[str, Callable[[], Library]] = {
    "numpy": numpy,
    "torch": torch,
    "jax": jax,
    "dask": dask,
    "strict": strict,
    "cupy": cupy,
}


def eager(*values: Any) -> Any:
    """A set of a test's parameters that is not for slow libraries."""
    return pytest.param(*values, marks=EAGER)
