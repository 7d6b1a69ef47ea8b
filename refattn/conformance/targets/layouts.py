"""Axes of tensors as a calling convention has them: to a layout and back."""

from __future__ import annotations

from typing import NamedTuple

from refattn.arrays import Array, library_of
from refattn.conformance.conventions.express import Parts


class Misshapen(Exception):
    """A result whose shape the convention does not have: the clause, and words."""


class OneCall(NamedTuple):
    """What one call is about: q, k and v are (B, H, tokens, width), scale is given if heads were widened for it."""

    parts: Parts
    scale: float | None
    q: Array
    k: Array
    v: Array

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(B, H, Lq, d_v)."""
        return (self.parts.entries, self.parts.problem.heads, self.parts.q_len, int(self.v.shape[-1]))


def lay(x: Array, layout: str) -> Array:
    """(B, H, S, D) in a layout that has no packed tokens."""
    x = x if "B" in layout else x[0, ...]
    axes = "BHSD" if "B" in layout else "HSD"
    return library_of(x, "x").xp.permute_dims(x, tuple(axes.index(letter) for letter in layout))


def pack(x: Array, lengths: list[int]) -> Array:
    """(B, H, S, D) as the first tokens of each entry, one entry after the other: (T, H, D)."""
    xp = library_of(x, "x").xp
    x = xp.permute_dims(x, (0, 2, 1, 3))
    if all(length == x.shape[1] for length in lengths):
        return xp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))
    return xp.concat([x[b, :length, ...] for b, length in enumerate(lengths)], axis=0)


def expected_shape(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a layout of what is (B, H, S, D) or (B, H, S)."""
    sizes = dict(zip("BHSD", shape, strict=False)) | {"T": shape[0] * shape[2]}
    return tuple(sizes[letter] for letter in layout)


def restored(x: Array, layout: str, shape: tuple[int, ...], what: str, label: str) -> Array:
    """The opposite of `lay` and `pack`, for outputs (B, H, S, D) and log-sum-exps (B, H, S)."""
    expected = expected_shape(layout, shape)
    if tuple(x.shape) != expected:
        letters = layout.lower()
        words = f"the {what} has shape {tuple(x.shape)}, expected {expected}, which is {letters.upper()}"
        raise Misshapen(label, words)
    xp = library_of(x, what).xp
    if "T" in layout:
        at = layout.index("T")
        x = xp.reshape(x, (*expected[:at], shape[0], shape[2], *expected[at + 1 :]))
        layout = layout.replace("T", "BS")
    elif "B" not in layout:
        x, layout = xp.reshape(x, (1, *expected)), f"B{layout}"
    return xp.permute_dims(x, tuple(layout.index(letter) for letter in "BHSD"[: len(shape)]))
