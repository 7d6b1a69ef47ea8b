"""Random calls of attention for Hypothesis: shapes and options that kernels get wrong, every one of them legal.

Shrinking leads to short lengths, few heads and no options. `refattn.testing.inputs` is the public way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from refattn.arrays import Array
from refattn.conformance.plain import LARGEST, causal_pairs, rounded
from refattn.conformance.targets.base import library_backend

SCALES, CAPS, SPREADS = (0.25, 1.0, -0.5, 0.0), (0.5, 2.0, 30.0), (1.0, 4.0, 0.0)
FEW, SOME = 0.2, 0.6  # shares of pairs: those that a bias hides, those that a mask shows


class Inputs(NamedTuple):
    """One call, `attention(q, k, v, **options)`: NumPy arrays of one dtype, its name, and keyword arguments."""

    dtype: str
    q: Array
    k: Array
    v: Array
    options: dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call; batch, heads and kv_heads are (), 1 and 1 for rank 2."""

    rank: int
    batch: tuple[int, ...]
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    d_k: int
    d_v: int

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes before the tokens, of q and of the result."""
        return (*self.batch, self.heads) if self.rank > 2 else ()

    @property
    def kv_lead(self) -> tuple[int, ...]:
        """The axes before the tokens, of k and v."""
        return (*self.batch, self.kv_heads) if self.rank > 2 else ()

    @property
    def pairs(self) -> tuple[int, ...]:
        """What masks and biases broadcast to."""
        return (*self.lead, self.q_len, self.k_len)


@st.composite
def sizes(
    draw: st.DrawFn,
    *,
    lengths: Sequence[int],
    widths: Sequence[int],
    counts: Sequence[int] = (1, 2, 3),
    ranks: Sequence[int] = (2, 3, 4, 5),
    groups: Sequence[int] = (1, 2, 3),
    same_width: bool = False,
) -> Sizes:
    """Sizes out of the given ones; Lq = Lk half the time. counts are those of batch axes and key/value heads."""
    rank = draw(st.sampled_from(ranks))
    batch = tuple(draw(st.sampled_from(counts)) for _ in range(rank - 3))
    kv_heads = 1 if rank == 2 else draw(st.sampled_from(counts))
    heads = 1 if rank == 2 else kv_heads * draw(st.sampled_from(groups))
    q_len = draw(st.sampled_from(lengths))
    k_len = q_len if draw(st.booleans()) else draw(st.sampled_from(lengths))
    d_k = draw(st.sampled_from(widths))
    return Sizes(rank, batch, heads, kv_heads, q_len, k_len, d_k, d_k if same_width else draw(st.sampled_from(widths)))


def shrunk(draw: st.DrawFn, shape: tuple[int, ...], drop: bool = True) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`: some axes 1, and some leading ones left out where `drop` allows."""
    first = draw(st.integers(0, len(shape))) if drop else 0
    return tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in shape[first:])


def start_is_needed(positional: bool, size: Sizes, k_start: Any) -> bool:
    """Whether the specification asks for q_start: something reads positions, and they could be read two ways (M5)."""
    return positional and (size.q_len != size.k_len or not isinstance(k_start, int) or k_start != 0)


def edges(longest: int) -> list[int]:
    """Lengths at which tiles begin and end: powers of two and their neighbours, in rising order."""
    near = {2**power + step for power in range(longest.bit_length()) for step in (-1, 0, 1)}
    return sorted(length for length in near | {longest} if 1 <= length <= longest)


@st.composite
def drawn_inputs(
    draw: st.DrawFn, dtypes: tuple[str, ...], features: frozenset[str], longest: int, widths: tuple[int, ...]
) -> Inputs:
    """See `refattn.testing.inputs`."""
    dtype = draw(st.sampled_from(dtypes))
    zero = [0] if "empty" in features else []
    size = draw(
        sizes(
            lengths=edges(longest) + zero,
            widths=widths,
            ranks=(4, 2, 3, 5) if "rank" in features else (4,),
            groups=(1, 2, 3, 4) if "gqa" in features else (1,),
            same_width="d_v" not in features,
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from(SPREADS))
    q, k = (
        spread * rng.standard_normal((*lead, length, size.d_k))
        for lead, length in ((size.lead, size.q_len), (size.kv_lead, size.k_len))
    )
    v = rng.standard_normal((*size.kv_lead, size.k_len, size.d_v))
    options = _options(draw, rng, size, dtype, features)
    if "poison" in features and draw(st.integers(0, 9)):  # most of the time: it is the point of the calls
        value = draw(st.sampled_from([np.nan, np.inf, -np.inf, LARGEST[dtype]]))
        _hide_a_key(draw, size, options, features)
        hidden = ~_seen(size, options)
        k[hidden], v[hidden] = value, value
    make = library_backend("numpy").array
    given = {name: make(x, dtype) if name in ("bias", "sinks") else x for name, x in options.items()}
    q, k, v = (make(rounded(x, dtype), dtype) for x in (q, k, v))
    return Inputs(dtype, q, k, v, given)


def _options(
    draw: st.DrawFn, rng: np.random.Generator, size: Sizes, dtype: str, features: frozenset[str]
) -> dict[str, Any]:
    """Options out of the features, arrays as host ones. Unless rows may be empty, each of them sees the first key."""

    def wanted(name: str) -> bool:
        return name in features and draw(st.booleans())

    options: dict[str, Any] = {"causal": True} if wanted("causal") else {}
    full = "empty" in features
    if wanted("k_start"):
        options["k_start"] = draw(st.integers(-2, 4))
    first = options.get("k_start", 0)
    if wanted("q_start"):
        options["q_start"] = draw(st.integers(-2 if full else first, first + size.k_len + 1))
    elif start_is_needed(bool(options.get("causal")), size, first):
        if "q_start" in features:
            options["q_start"] = first + max(0, size.k_len - size.q_len)
        else:
            options = {}  # a kernel without q_start has no causal rule for such lengths
    if wanted("mask"):
        mask = np.atleast_1d(rng.random(shrunk(draw, size.pairs)) < SOME)
        mask[..., :1] |= not full
        options["mask"] = mask
    if wanted("bias"):
        bias = np.atleast_1d(2 * rng.standard_normal(shrunk(draw, size.pairs)))
        if draw(st.booleans()):
            hidden = rng.random(bias.shape) < FEW
            hidden[..., :1] &= full
            bias[hidden] = -np.inf
        options["bias"] = rounded(bias, dtype)
    for name, values in (("scale", SCALES), ("softcap", CAPS)):
        if wanted(name):
            options[name] = draw(st.sampled_from(values))
    if wanted("sinks"):
        options["sinks"] = rounded(2 * rng.standard_normal(size.heads), dtype)
    return options


def _hide_a_key(draw: st.DrawFn, size: Sizes, options: dict[str, Any], features: frozenset[str]) -> None:
    """One key more that no row sees, by the mask or else by the bias; the first stays, unless rows may be empty."""
    if size.k_len < 2 or not features & {"mask", "bias"}:
        return
    others = np.arange(size.k_len) != draw(st.integers(1, size.k_len - 1))
    if "mask" in features:
        options["mask"] = np.logical_and(options.get("mask", True), others)
    else:
        options["bias"] = np.where(others, options.get("bias", 0.0), -np.inf)


def _seen(size: Sizes, options: dict[str, Any]) -> Array:
    """Which keys some row sees, (..., Hkv, Lk), or (Lk,) for rank 2."""
    visible = np.ones(size.pairs, dtype=bool)
    if options.get("causal"):
        visible &= causal_pairs(size.q_len, size.k_len, options.get("q_start", 0), options.get("k_start", 0))
    if "mask" in options:
        visible &= options["mask"]
    if "bias" in options:
        visible &= ~np.isneginf(options["bias"])
    if size.rank == 2:
        return np.any(visible, axis=0)
    group = size.heads // size.kv_heads
    return np.any(visible.reshape(*size.batch, size.kv_heads, group, size.q_len, size.k_len), axis=(-3, -2))
