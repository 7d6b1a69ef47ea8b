"""The plugin protocol: what refattn must know about an array library in order to run on it.

A plugin is one object that satisfies `Backend`, published under the entry-point group `refattn.backends`.
`Plugin` writes the parts that are the same for every library; a plugin may use it or not.

Nothing here imports an array library. A plugin module imports its own when it is asked for arrays or devices.
"""

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

from refattn.arrays import Array
from refattn.dtypes import COMPUTED
from refattn.errors import BackendError

# The one capability table: test marks, skip reasons, `refattn backends` and the docs all read it.
CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "traces": "functions of its arrays can be traced and compiled",
        "autodiff": "the library differentiates functions of its arrays",
        "mutable": "arrays can be written in place, so a cache shares its buffers",
        "tiled": "a tiled path of its own, with memory linear in the length",
        "lazy": "values are computed on demand, so nothing may look at them early",
        "bfloat16": "arrays of 16-bit brain floats",
        "float16": "arrays of IEEE half precision",
        "float32": "arrays of IEEE single precision",
        "float64": "arrays of IEEE double precision",
    }
)


@runtime_checkable
class Backend(Protocol):
    """What a plugin offers. Looking at any attribute must not import the array library."""

    @property
    def name(self) -> str:
        """The name users type, equal to the name of the entry point."""

    @property
    def library(self) -> str:
        """The name under which the array library is imported."""

    @property
    def distributions(self) -> tuple[str, ...]:
        """Names under which the library may be installed, the usual one first."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The names out of `COMPUTED` that arrays can have on this machine."""

    @property
    def capabilities(self) -> frozenset[str]:
        """Names out of `CAPABILITIES`, and only what is true today."""

    def installed(self) -> bool:
        """Whether the library can be found, without importing it."""

    def version(self) -> str | None:
        """The library's version, without importing it; None where it is not installed."""

    def devices(self) -> tuple[str, ...]:
        """The devices that can run the library here, the default one first; empty where there is none."""

    def array(self, host: Array, dtype: str | None = None, device: str | None = None) -> Array:
        """A copy of a NumPy array of any shape as an array of the library.

        dtype is one of `dtypes`, None keeps the host's; device is one of `devices()`, None is the first.
        Raises BackendError for a dtype or device that the library does not have here.
        """

    def host(self, x: Array) -> Array:
        """The same values as a NumPy array; bfloat16 and float8 come back as float32, without loss."""


class Plugin(ABC):
    """The parts of `Backend` that are alike for every library: finding it, loading it, refusing arguments.

    A plugin derived from it names the library and writes `_array` and `_host`, and `_devices` if there is
    more than the CPU.
    """

    name: ClassVar[str]
    library: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    features: ClassVar[frozenset[str]]
    float_dtypes: ClassVar[tuple[str, ...]] = COMPUTED
    bfloat16_needs: ClassVar[str | None] = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The names out of `COMPUTED` that arrays can have on this machine."""
        if self.bfloat16_needs is None or has_module(self.bfloat16_needs):
            return self.float_dtypes
        return tuple(name for name in self.float_dtypes if name != "bfloat16")

    @property
    def capabilities(self) -> frozenset[str]:
        """The features that the class declares, and the dtypes."""
        return self.features | frozenset(self.dtypes)

    def installed(self) -> bool:
        """Whether the library can be found, without importing it."""
        return has_module(self.library)

    def version(self) -> str | None:
        """The library's version, without importing it; None where it is not installed."""
        import importlib.metadata  # see `refattn.registry`

        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def load(self) -> Any:
        """The library itself, imported now. Raises BackendError where it is not installed."""
        if not self.installed():
            wanted = f"{self.library!r} to be installed, by way of {' or '.join(self.distributions)}"
            raise BackendError(f"library of backend {self.name!r}", wanted, "nothing of that name")
        return importlib.import_module(self.library)

    def devices(self) -> tuple[str, ...]:
        """The devices that can run the library here, the default one first; empty where there is none."""
        return tuple(self._devices(self.load())) if self.installed() else ()

    def array(self, host: Array, dtype: str | None = None, device: str | None = None) -> Array:
        """A copy of a NumPy array, of any shape, as an array of the library; see `Backend.array`."""
        library = self.load()
        wanted = host.dtype.name if dtype is None else dtype
        if wanted not in self.dtypes and (wanted in COMPUTED or dtype is not None):
            lacking = wanted in self.float_dtypes and self.bfloat16_needs
            got = f"{wanted!r}, which needs {self.bfloat16_needs}" if lacking else repr(wanted)
            raise BackendError(f"dtype of backend {self.name!r}", f"one of {', '.join(self.dtypes)}", got)
        devices = self._devices(library)
        chosen = next(iter(devices), "") if device is None else device
        if chosen not in devices:
            known = ", ".join(devices) or "none, because nothing here can run it"
            raise BackendError(f"device of backend {self.name!r}", f"a known device ({known})", repr(device))
        return self._array(library, host, dtype, devices[chosen])

    def host(self, x: Array) -> Array:
        """The same values as a NumPy array; see `Backend.host`."""
        return widened(self._host(self.load(), x))

    def _devices(self, library: Any) -> Mapping[str, Any]:  # for libraries that run on the CPU alone
        return {"cpu": None}

    @abstractmethod
    def _array(self, library: Any, host: Array, dtype: str | None, device: Any) -> Array:
        """A copy of host as an array of the library, in a dtype that it has; device is a value of `_devices`."""

    @abstractmethod
    def _host(self, library: Any, x: Array) -> Array:
        """x as a NumPy array, which may still hold ml_dtypes' small floats."""


def has_module(name: str) -> bool:
    """Whether a module can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def widened(host: Array) -> Array:
    """A NumPy array with ml_dtypes' small floats turned into float32, which holds them exactly."""
    return host.astype("float32") if host.dtype.name.startswith(("bfloat16", "float8")) else host
