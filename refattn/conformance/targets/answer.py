"""What a call gives, the arrays that it is made of, and the error for a target that cannot be called."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from refattn.arrays import Array


class TargetError(Exception):
    """A target that cannot be called; the message says why, in one sentence, and what to do."""


class Seen(NamedTuple):
    """One array of an answer on the host: its values as float64, and the dtype name that it had."""

    values: Array
    dtype: str


class Answer(NamedTuple):
    """What one call gave, in the target's own arrays."""

    output: Array
    lse: Array | None = None
    weights: Array | None = None
    # By the names of the arguments; on the host already where they had another form than the argument.
    gradients: Mapping[str, Array | Seen] = MappingProxyType({})


class Arrays(Protocol):
    """What a target needs to know of an array library: a part of `refattn.backend.Backend`."""

    @property
    def name(self) -> str:
        """What the library is called in a report."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The names out of `COMPUTED` that arrays can have."""

    @property
    def capabilities(self) -> frozenset[str]:
        """Names out of `refattn.backend.CAPABILITIES`."""

    def version(self) -> str | None:
        """The library's version."""

    def array(self, host: Array, dtype: str | None = None, device: str | None = None) -> Array:
        """A copy of a host array as one of the library; None keeps a dtype that is not floating."""

    def host(self, x: Array) -> Array:
        """The values as a NumPy array."""


def in_words(x: Any) -> str:
    """The type of a value, with its article."""
    name = "None" if x is None else type(x).__name__
    return name if x is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
