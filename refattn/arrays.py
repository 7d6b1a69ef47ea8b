"""What refattn must know of an array: its library, its device, and whether its values may be looked at.

No array library is imported here; the library of an array that came in is already loaded, and array-api-compat knows
its standard namespace.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import numbers
import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import array_api_compat

from .dtypes import dtype_name, is_integer
from .errors import BatchError, DeviceMismatchError, LibraryMismatchError, NotAnArrayError

Array: TypeAlias = Any
Shape: TypeAlias = tuple[int, ...]


class Library(NamedTuple):
    """An array library: its root module's name, its Array API namespace, and whether its arrays are host NumPy."""

    name: str
    xp: Any
    host: bool


LARGEST_SIZE = 2**29  # positions reach as far (M3)
_BEYOND = 2**63

_LIBRARIES: dict[type, Library] = {}
_COMPAT = {"numpy": "numpy", "torch": "torch", "cupy": "cupy", "dask": "dask.array"}
# These have no NumPy below, or compute later; and torch.compile cannot trace NumPy's settings.
_SILENT = {"torch", "cupy", "jax", "dask"}
_REFUSED = {"numpy.matrix", "numpy.ma.MaskedArray", "numpy.ma.core.MaskedArray"}
# What their authors call them.
SPELLINGS = {"numpy": "NumPy", "torch": "PyTorch", "cupy": "CuPy", "jax": "JAX", "dask": "Dask"}


def library_of(x: Any, argument: str) -> Library:
    """The library of an array. Raises NotAnArrayError (A7) for anything else, lists and masked arrays included."""
    # Looked up by class: array-api-compat's own cache cannot be traced by torch.compile.
    library = _LIBRARIES.get(type(x)) or _find_library(x, argument)
    if not library.host:
        _check_usable(library, x, argument)
    return library


def _check_usable(library: Library, x: Any, argument: str) -> None:
    """Sparse and nested tensors and arrays of unknown size are beyond the shape rules."""
    if library.name == "torch" and (x.is_nested or str(x.layout) != "torch.strided"):
        kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        raise NotAnArrayError(argument, "a dense tensor", kind)
    if library.name == "dask" and any(size != size for size in x.shape):  # NaN
        raise NotAnArrayError(argument, "an array of known shape, see its compute_chunk_sizes()", describe(x))


def _find_library(x: Any, argument: str) -> Library:
    cls = type(x)
    root = cls.__module__.partition(".")[0]
    if _ancestors(cls) & _REFUSED or not is_array(x):
        raise NotAnArrayError(argument, "an array of NumPy, PyTorch, JAX, CuPy, Dask or array-api-strict", describe(x))
    if root == "torch":
        import array_api_compat.torch as xp  # a statement, because torch.compile cannot trace import_module
    elif root in _COMPAT:
        xp = importlib.import_module(f"array_api_compat.{_COMPAT[root]}")
    else:
        try:
            xp = array_api_compat.array_namespace(x)
        except TypeError:
            raise NotAnArrayError(argument, "an array of a library that has an Array API", describe(x)) from None
    parts = xp.__name__.split(".")
    name = parts[1] if parts[0] == "array_api_compat" else parts[0]
    library = _LIBRARIES[cls] = Library(name, xp, name == "numpy")
    return library


def same_library(library: Library, x: Any, argument: str) -> None:
    """Raises NotAnArrayError or LibraryMismatchError (A7) unless x is an array of that library."""
    other = library_of(x, argument)
    if other.xp is not library.xp:
        expected = f"an array of {spelled(library)}, as q (or x) is"
        raise LibraryMismatchError(argument, expected, f"an array of {spelled(other)}")


def device_of(library: Library, x: Array) -> Any:
    """The device of an array; None where it has none to speak of (NumPy, Dask, traced JAX arrays)."""
    return None if library.host or library.name == "dask" else getattr(x, "device", None)


def same_device(library: Library, device: Any, x: Array, argument: str) -> None:
    """Raises DeviceMismatchError (A7) if x is known to be on another device."""
    other = device_of(library, x)
    if other != device and other is not None and device is not None:
        raise DeviceMismatchError(argument, f"an array on {device}, as q (or x) is", f"an array on {other}")


def spelled(library: Library) -> str:
    """The library's name as its authors write it."""
    return SPELLINGS.get(library.name, library.name)


def describe(x: Any) -> str:
    """What came, for an error message: shape, dtype and type of an array, the repr of anything else."""
    name = type(x).__name__
    try:
        if is_array(x):
            if is_host(x) and not x.shape:  # with the module, since NumPy has a bool of its own
                name = f"{type(x).__module__}.{name} {x}"
            return f"{name} of shape {tuple(x.shape)} and dtype {dtype_name(x.dtype)}"
        text = repr(x)
    except Exception:  # noqa: BLE001  # a foreign object may refuse even to be printed
        text = "that cannot be printed"
    return f"{name} {text if len(text) <= 60 else text[:57] + '...'}"


def is_array(x: Any) -> bool:
    """Whether x has the looks of an array, of whatever library; classes with such attributes have not."""
    return hasattr(x, "dtype") and has_shape(x) and isinstance(x.shape, tuple)


def has_shape(x: Any) -> bool:
    """Whether x has a shape; PyTorch's nested tensors raise when asked for theirs."""
    return not getattr(x, "is_nested", False) and hasattr(x, "shape")


def is_host(x: Any) -> bool:
    """Whether x is a NumPy array, whose values may be looked at without synchronising or computing (N3)."""
    known = _LIBRARIES.get(type(x))
    if known:
        return known.host
    if isinstance(x, int) or not has_shape(x):
        return False
    if type(x).__module__ == "numpy":
        return type(x).__name__ != "matrix"
    ancestors = _ancestors(type(x))
    return bool(ancestors & {"numpy.ndarray", "numpy.generic"}) and not ancestors & _REFUSED


def _ancestors(cls: type) -> set[str]:
    return {f"{base.__module__}.{base.__name__}" for base in cls.__mro__}


def as_int(x: Any) -> int | None:
    """x as a Python int if it is one of 64 bits (NumPy integers included, bools not), else None."""
    if type(x) is int:
        return x if -_BEYOND <= x < _BEYOND else None
    if isinstance(x, bool) or (has_shape(x) and (x.shape != () or not is_host(x) or not is_integer(x.dtype))):
        return None
    try:
        return as_int(int(operator.index(x)))
    except TypeError:
        return None


def as_size(x: Any, least: int = 0) -> int | None:
    """x as a Python int if it can be a size or a number of heads, from `least` to LARGEST_SIZE, else None."""
    number = as_int(x)
    return number if number is not None and least <= number <= LARGEST_SIZE else None


def as_real(x: Any) -> float | None:
    """x as a Python float if it is a real number, else None; inf for what is larger than any."""
    if type(x) is float:
        return x
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        return None
    try:
        return float(x)
    except OverflowError:
        return math.inf


def is_one_of(x: Any, names: Collection[str]) -> bool:
    """Whether x is one of the names; arrays, which compare element by element, are not."""
    return isinstance(x, str) and x in names


def from_list(x: Any) -> Any:
    """Lists, tuples and ranges as a NumPy array, ragged ones as None; anything else as it is."""
    if not isinstance(x, (list, tuple, range)):
        return x
    import numpy

    try:
        return numpy.asarray(x)
    except (ValueError, TypeError, OverflowError):
        return None


def same_place(library: Library, device: Any, x: Any, argument: str) -> None:
    """Raises an error of A7 unless x is a number, a host array, or an array of that library and device."""
    if not (isinstance(x, int) or is_host(x)):
        same_library(library, x, argument)
        same_device(library, device, x, argument)


def into_library(x: Array, library: Library, device: Any, argument: str) -> Array:
    """A host array as one of the library, on the device; an array that is of the library already, as it is."""
    if library.host and is_host(x):
        return x
    if is_host(x):
        # A copy, because some libraries share memory with NumPy and warn when it is read-only.
        return library.xp.asarray(x.copy(), device=device)
    same_place(library, device, x, argument)
    return x


def broadcast_shapes(shapes: Sequence[Shape], argument: str) -> Shape:
    """The shape that all of them broadcast to. Raises BatchError (A3)."""
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    width = max(map(len, shapes))
    result = [1] * width
    for shape in shapes:
        for axis, size in enumerate(shape, start=width - len(shape)):
            if size != 1 and result[axis] not in (1, size):
                raise BatchError(argument, "axes that broadcast together", " and ".join(map(str, shapes)))
            result[axis] = size if size != 1 else result[axis]
    return tuple(result)


def broadcasts_to(shape: Shape, target: Shape) -> bool:
    """Whether an array of this shape broadcasts, right-aligned, to the target without enlarging it."""
    if len(shape) > len(target):
        return False
    offset = len(target) - len(shape)
    return all(size == 1 or size == target[offset + axis] for axis, size in enumerate(shape))


def in_rows(library: Library, x: Array, met: Array | None = None) -> Array:
    """A host array whose rows are adjacent numbers, copied if need be: products of others add in another order (N4).

    met is what it is multiplied with, at another address: NumPy multiplies an array with itself in a way of its own.
    """
    if not library.host or not x.size:
        return x
    (row, step), width = x.strides[-2:], x.shape[-1] * x.itemsize
    near = row == width if x.shape[-1] == 1 else row >= width and row % step == 0  # one column is a vector
    adjacent = x.flags.aligned and step == x.itemsize and near
    apart = met is None or x.ctypes.data != met.ctypes.data
    return x if adjacent and apart else x.copy(order="C")


def quiet(library: Library, device: Any = None) -> contextlib.AbstractContextManager[Any]:
    """No floating-point warnings: an overflow in an invisible pair is no one's concern (N5).

    NumPy's are switched off for every library that may compute with it now. On a device of PyTorch there is no autocast
    either, which would take products of float32 in 16 bits (N1).
    """
    if library.name == "torch" and device is not None:
        xp, kind = library.xp, device.type
        if xp.amp.is_autocast_available(kind) and xp.is_autocast_enabled(kind):
            off: contextlib.AbstractContextManager[Any] = xp.autocast(kind, enabled=False)
            return off
    if library.name in _SILENT:
        return contextlib.nullcontext()
    import numpy

    return numpy.errstate(all="ignore")
