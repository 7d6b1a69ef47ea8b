"""Files of tensors, read without trusting them and without ever loading a pickle: .npz, .safetensors, raw bytes."""

from __future__ import annotations

import io
import math
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.exchange.bits import DTYPES, PATTERNS, Tensor
from refattn.dtypes import dtype_name
from refattn.whole_files import write_arrays, write_whole

# What a file may come to in memory, unless the user says otherwise, and how many tensors it may hold.
LARGEST, MOST = 4 << 30, 100_000
# How NumPy compresses; of the other methods a few bytes may come to gigabytes before any size is looked at.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# The longest text, such as the name of a dtype.
TEXT = 64
# The most of a library's own words that a message repeats, which may hold a whole name or header.
LONGEST = 200
SAFETENSORS = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    **{f"{kind}{size}": f"{word}{size}" for kind, word in (("I", "int"), ("U", "uint")) for size in (8, 16, 32, 64)},
}


class TensorFileError(Exception):
    """A file of tensors that cannot be used; the message says why, in one sentence."""


def read_tensors(path: Path, largest: int = LARGEST) -> dict[str, Tensor]:
    """The tensors of an .npz or .safetensors file, in its order, by name. Raises TensorFileError."""
    if not path.is_file():
        raise TensorFileError(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return _named(path, _read_safetensors(path, largest))
        if not zipfile.is_zipfile(path):
            kinds = "expected one with q, k and v, as numpy.savez writes it, or a .safetensors file"
            raise TensorFileError(f"{path} is not an .npz file; {kinds}")
        return _named(path, _read_npz(path, largest))
    # What zipfile raises for files that are damaged, encrypted or compressed in unknown ways, and NumPy for headers.
    except (OSError, EOFError, ValueError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error) as fault:
        raise TensorFileError(f"{path} cannot be read: {' '.join(str(fault).split())[:LONGEST]}") from fault


def read_raw(path: Path, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Elements in C order, little-endian. Raises TensorFileError unless the file holds exactly that many."""
    kind = np.dtype(PATTERNS.get(dtype, dtype)).newbyteorder("<")
    expected, got = math.prod(shape) * kind.itemsize, path.stat().st_size
    if got != expected:
        raise TensorFileError(f"{path.name} holds {got:,} bytes, expected {expected:,} for {shape} in {dtype}")
    return Tensor(np.frombuffer(path.read_bytes(), dtype=kind).reshape(shape), dtype)


def write_npz(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """An .npz file; bfloat16 as its bit patterns in uint16. Raises OSError."""
    write_arrays(path, {name: tensor.stored for name, tensor in tensors.items()})


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A .safetensors file. Raises TensorFileError where the library is missing."""
    library = _library(path)
    kept = {name: np.frombuffer(tensor.data() or b"\0", dtype=np.uint8) for name, tensor in tensors.items()}
    specs = {
        name: library.TensorSpec(
            dtype=tensor.dtype,
            shape=tensor.shape,
            data_ptr=kept[name].ctypes.data,
            data_len=tensor.stored.nbytes,
        )
        for name, tensor in tensors.items()
    }
    write_whole(path, bytes(library.serialize(specs)))


def _named(path: Path, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, whose names may be shown: on terminals, in tables and messages."""
    for name in found:
        if not name.isprintable() or len(name) > LONGEST:
            raise TensorFileError(
                f"{path}: {name[:LONGEST]!r} is no name, which has {LONGEST} printable characters at most"
            )
    return found


def _read_npz(path: Path, largest: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        _check_size(path, sum(member.file_size for member in members), len(members), largest)
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in found:
                raise TensorFileError(f"{path} holds {name!r} twice")
            if member.compress_type not in METHODS:
                raise TensorFileError(f"{path} cannot be read: {name!r} is compressed as NumPy does not")
            # No more is decompressed than the archive's directory says, whose sum was just checked.
            with archive.open(member) as packed:
                found[name] = _read_npy(path, name, packed.read(member.file_size))
    return found


def _read_npy(path: Path, name: str, content: bytes) -> Tensor:
    """One array, whose header is believed only where the bytes behind it bear it out."""
    reading: Any = np.lib.format
    stream = io.BytesIO(content)
    version = reading.read_magic(stream)
    header = {(1, 0): reading.read_array_header_1_0, (2, 0): reading.read_array_header_2_0}.get(version)
    if header is None:
        raise TensorFileError(f"{path} cannot be read: {name!r} is in version {version} of the format")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it was written by Python 2: so what
            shape, turned, dtype = header(stream)
    except (
        Exception
    ) as fault:  # the header is Python's syntax: its tokenizer, parser and dtypes have errors of their own
        raise ValueError(f"{name!r} has a header that is none: {fault}") from fault
    if dtype.hasobject:
        raise TensorFileError(f"{path} cannot be read: {name!r} holds pickled objects, which are never loaded")
    data = memoryview(content)[stream.tell() :]
    expected = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or len(data) != expected:
        raise TensorFileError(
            f"{path} cannot be read: {name!r} {shape} {dtype} has {len(data):,} of {expected:,} bytes"
        )
    array = np.frombuffer(data, dtype=dtype) if expected else np.zeros(math.prod(shape), dtype)
    return _tensor(path, name, array.reshape(shape, order="F" if turned else "C"))


def _tensor(path: Path, name: str, array: Array) -> Tensor:
    """With the name of its dtype; raw bytes and short texts are left to the reader."""
    dtype = dtype_name(array.dtype)
    if array.dtype.kind == "b":
        array = array.view(np.uint8) != 0  # whatever byte stands for True
    elif array.dtype.kind == "U" and array.ndim == 0 and array.dtype.itemsize <= 4 * TEXT:
        dtype = "text"
    elif dtype not in DTYPES and array.dtype.str not in ("|V1", "|V2"):
        raise TensorFileError(f"{path}: {name!r} has dtype {array.dtype}, expected one of {', '.join(DTYPES)}")
    return Tensor(array, dtype)


def _read_safetensors(path: Path, largest: int) -> dict[str, Tensor]:
    library = _library(path)
    _check_size(path, path.stat().st_size, 0, largest)
    try:
        entries = library.deserialize(path.read_bytes())
    except library.SafetensorError as fault:
        raise TensorFileError(f"{path} cannot be read: {fault}") from fault
    found: dict[str, Tensor] = {}
    for name, entry in entries:
        if (dtype := SAFETENSORS.get(entry["dtype"])) is None:
            raise TensorFileError(
                f"{path}: {name!r} has dtype {entry['dtype']}, expected one of {', '.join(SAFETENSORS)}"
            )
        kind = np.dtype("u1" if dtype == "bool" else PATTERNS.get(dtype, dtype)).newbyteorder("<")
        array = np.frombuffer(entry["data"], dtype=kind).reshape(entry["shape"])
        found[name] = Tensor(array != 0 if dtype == "bool" else array, dtype)
    return found


def _check_size(path: Path, size: int, count: int, largest: int) -> None:
    if size > largest:
        raise TensorFileError(f"{path} comes to {size:,} bytes in memory, expected {largest:,} at most")
    if count > MOST:
        raise TensorFileError(f"{path} holds {count:,} tensors, expected {MOST:,} at most")


def _library(path: Path) -> Any:
    try:
        import safetensors
    except ImportError as missing:
        raise TensorFileError(f"{path} needs the library safetensors: pip install 'refattn[compare]'") from missing
    return safetensors
