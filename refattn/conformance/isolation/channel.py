"""Messages between judge and worker: a JSON header of limited size, then the raw bytes of its arrays.

    4 bytes     length of the header, big-endian
    header      JSON object; "arrays" is a list of [name, dtype, shape], dtype one of float64, int64 and bool
    payload     the arrays' values one after the other, little-endian, in C order

Nothing in a message is executed, and whatever does not fit this form raises MalformedError.
"""

from __future__ import annotations

import json
import math
import socket
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array

HEADER_LIMIT = 1 << 20
DTYPES = {"float64": "<f8", "int64": "<i8", "bool": "|b1"}
CHUNK = 1 << 20
_PREFIX = 4


class MalformedError(Exception):
    """Bytes that are no message; the text says why."""


class Message(NamedTuple):
    """The header without its list of arrays, and the arrays by name."""

    header: dict[str, Any]
    arrays: dict[str, Array]


def encoded(header: dict[str, Any], arrays: dict[str, Array]) -> bytes:
    """The bytes of a message. Arrays are float64, boolean or integer."""
    listed, payload = [], []
    for name, array in arrays.items():
        kind = {"f": "float64", "b": "bool", "i": "int64", "u": "int64"}[array.dtype.kind]
        listed.append([name, kind, list(array.shape)])
        payload.append(np.ascontiguousarray(array, dtype=DTYPES[kind]).tobytes())
    text = json.dumps(header | {"arrays": listed}).encode()
    return b"".join([len(text).to_bytes(_PREFIX, "big"), text, *payload])


class Reader:
    """Gathers bytes into one message at a time; limit is the most that its arrays may have."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bytes = bytearray()
        self._header: dict[str, Any] | None = None
        self._arrays: list[tuple[str, str, tuple[int, ...]]] = []

    def feed(self, data: bytes) -> Message | None:
        """The message, once its last byte is there. Raises MalformedError, also for bytes after the last."""
        self._bytes += data
        if self._header is None and not self._read_header():
            return None
        sizes = [math.prod(shape) * np.dtype(DTYPES[kind]).itemsize for _, kind, shape in self._arrays]
        if len(self._bytes) < sum(sizes):
            return None
        if len(self._bytes) > sum(sizes):
            raise MalformedError("more bytes than the answer has")
        arrays, start = {}, 0
        for (name, kind, shape), size in zip(self._arrays, sizes):
            values = np.frombuffer(bytes(self._bytes[start : start + size]), dtype=DTYPES[kind])
            arrays[name] = values.reshape(shape)
            start += size
        return Message(self._header or {}, arrays)

    def _read_header(self) -> bool:
        if len(self._bytes) < _PREFIX:
            return False
        length = int.from_bytes(self._bytes[:_PREFIX], "big")
        if length > HEADER_LIMIT:
            raise MalformedError("a header of more than 1 MiB, or none")
        if len(self._bytes) < _PREFIX + length:
            return False
        try:
            header = json.loads(self._bytes[_PREFIX : _PREFIX + length])
            self._arrays = [_listed(one) for one in header.pop("arrays")]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:
            raise MalformedError("a header that is none") from fault
        if sum(math.prod(shape) * np.dtype(DTYPES[kind]).itemsize for _, kind, shape in self._arrays) > self.limit:
            raise MalformedError(f"arrays of more than {self.limit} bytes")
        self._header = header
        del self._bytes[: _PREFIX + length]
        return True


def _listed(entry: Any) -> tuple[str, str, tuple[int, ...]]:
    name, kind, shape = entry
    sizes = tuple(shape)
    if not isinstance(name, str) or kind not in DTYPES or len(sizes) > 32:
        raise ValueError
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        raise ValueError
    return name, kind, sizes


def receive(channel: socket.socket) -> Message | None:
    """The next message, waited for; None if the other side has closed. For the worker, which trusts its parent."""
    reader, message = Reader(limit=1 << 40), None
    while message is None:
        data = channel.recv(CHUNK)
        if not data:
            return None
        message = reader.feed(data)
    return message


def text_of(value: Any, limit: int = 20_000) -> str:
    """A text out of a message, of limited length and without control characters. Raises MalformedError for others."""
    if not isinstance(value, str):
        raise MalformedError("an entry that must be text and is not")
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in value[:limit]
    )
