"""Tables of what other libraries do, from the conventions, the scoreboard and the libraries' own documentation."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from refattn import masks
from refattn.conformance.conventions import find_convention
from refattn.conformance.conventions.convention import Window
from refattn.conformance.reproductions import read_all

REPRODUCTIONS = Path(__file__).parents[1] / "scoreboard" / "reproductions"
# Far from both ends, so that no window is cut off.
ROW, KEYS = 1000, 2000


class Spelling(NamedTuple):
    """How a library spells a window that ends at the query."""

    whose: str
    window: Window
    # What else must be said for the side after the query to be closed.
    beside: str = ""


def spelt(name: str, whose: str, beside: str = "") -> Spelling:
    """What the convention of that name says."""
    said = find_convention(name)
    assert said.window is not None
    return Spelling(whose, said.window, beside)


# Those without a convention of ours as their documentation has it.
WINDOWS = (
    spelt("flash-attn", "flash-attn"),
    spelt("flashinfer", "FlashInfer", "causal=True"),
    spelt("jax", "JAX, `jax.nn`"),
    spelt("cudnn", "JAX on cuDNN"),
    Spelling("ONNX, Attention, opset 25", Window(left="left_window_size", right="right_window_size")),
    Spelling("xformers, local", Window(left="window_left", right="window_right")),
    Spelling("xformers, causal and local (1)", Window(size="window_size")),
    Spelling("transformers, causal (2)", Window(size="sliding_window")),
    Spelling("cuDNN's frontend", Window(size="diagonal_band_left_bound"), "diagonal_band_right_bound=0"),
    Spelling("ONNX Runtime, GroupQueryAttention", Window(size="local_window_size")),
)


def shown(left: int) -> int:
    """How many keys a query sees through window(left, 0)."""
    mask = masks.window(left, 0)
    return int(np.sum(mask.visible([ROW], range(KEYS))))


def behind(window: Window, number: int) -> int:
    """How many keys before the query the number means."""
    return number - (window.size is not None and window.counts_self)


def written(one: Spelling, left: int) -> str:
    """What to write for refattn's window(left, 0)."""
    window = one.window
    if window.pair:
        said = f"{window.pair}=({left}, 0)"
    elif window.left:
        said = f"{window.left}={left}" + (f", {window.right}=0" if window.right else "")
    else:
        said = f"{window.size}={left + window.counts_self}"
    return f"`{said}`" + (f" with `{one.beside}`" if one.beside else "")


def windows(number: int) -> str:
    """What a number means as a window, library by library, and what to write for refattn's two readings of it."""
    fewer = number - 1
    lines = [
        f"| | keys that {number} shows | to show {shown(number)} keys | to show {shown(fewer)} keys |",
        "|---|---|---|---|",
        f"| **refattn** | **{shown(number)}** | `window({number}, 0)` | `window({fewer}, 0)` |",
    ]
    lines += [
        f"| {one.whose} | {shown(behind(one.window, number))} | {written(one, number)} | {written(one, fewer)} |"
        for one in WINDOWS
    ]
    return "\n".join(lines)


# What the conventions do not tell, from the libraries' documentation.
ALIGNED = (
    ("xformers, LowerTriangularMask", "top-left"),
    ("xformers, LowerTriangularFromBottomRightMask", "bottom-right"),
    ("flash-attn before 2.1", "top-left"),
    ("ONNX, Attention without past keys", "top-left"),
    ("ONNX Runtime, GroupQueryAttention", "bottom-right"),
)


def alignments() -> str:
    """Which way causal aligns, by library, and what q_start says the same."""
    said: dict[str, list[str]] = {"top-left": [], "bottom-right": []}
    for name, whose in (
        ("torch", "torch's scaled_dot_product_attention"),
        ("jax", "jax.nn.dot_product_attention"),
        ("flash-attn", "flash-attn from 2.1 on"),
        ("flash-attn-varlen", "its varlen form, entry by entry"),
        ("flashinfer", "FlashInfer"),
    ):
        said[find_convention(name).aligns].append(whose)
    for whose, way in ALIGNED:
        said[way].append(whose)
    lines = ["| aligned | say | so do |", "|---|---|---|"]
    starts = {"top-left": "`q_start=0`", "bottom-right": "`q_start=Lk - Lq`"}
    lines += [f"| {way} | {starts[way]} | {'; '.join(names)} |" for way, names in said.items()]
    return "\n".join(lines)


def departures(clauses: tuple[str, ...], *words: str) -> str:
    """What recorded implementations do otherwise about some clauses, where the sentence has one of the words."""
    said: dict[str, list[str]] = {}
    for one in read_all(REPRODUCTIONS):
        if set(clauses) & set(one.clauses) and any(word in one.says for word in words):
            said.setdefault(one.says, []).extend(one.names)
    lines = ["| who | what they do |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {says} |" for says, names in said.items()]
    return "\n".join(lines)
