"""What a calling convention says. Every field is a key of the TOML files, every class but the first a table of them.

Axes are written as letters: B batch, H heads, S tokens, T tokens of all entries packed one after the other, D width,
Q queries, K keys. Wherever a file says "none", None is meant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from refattn.dtypes import COMPUTED

NONE = "none"
# As what is passed for a scale that a case leaves out: 1/sqrt(d_k).
DEFAULT = "default"
Layout = Literal["BHSD", "BSHD", "SBHD", "HSD", "SHD", "THD"]
PairAxes = Literal["BHQK", "BQK", "HQK", "QK", "BK"]
LseAxes = Literal["BHS", "BSH", "SBH", "HS", "SH", "HT", "TH"]
Alignment = Literal["top-left", "bottom-right", "q_start"]
# What `positional`, `off` and `ask` may speak of: q, k, v and the options by refattn's names, and what is asked for.
OPTIONS = ("causal", "mask", "bias", "window", "lengths", "alibi", "scale", "softcap", "sinks", "q_start", "k_start")
ARGUMENTS = ("q", "k", "v", *OPTIONS, "output")
ASKED = ("grouped", "lse", "causal", "window")


@dataclass(frozen=True, kw_only=True)
class Names:
    """The parameters that take a single value or tensor; an option without a name cannot be expressed."""

    q: str = "q"
    k: str = "k"
    v: str = "v"
    scale: str | None = None
    softcap: str | None = None
    # One logit per query head.
    sinks: str | None = None
    # Positions of the first query and the first key. Without k_start, q_start is the difference of the two.
    q_start: str | None = None
    k_start: str | None = None
    # A buffer that the output is written to; what the function returns is then not looked at for it.
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class Causal:
    """The causal rule, as a parameter of its own; `aligns` of the convention says how where Lq != Lk."""

    name: str
    value: bool | int | str = True
    # Whether it may be given beside a mask, both then being obeyed. Otherwise it is written into the mask.
    with_mask: bool = False


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Visible pairs as a tensor: True where they are visible, or hidden; or 0 and -inf, to be added."""

    name: str
    means: Literal["visible", "hidden", "added"]
    axes: PairAxes = "BHQK"
    # Whether the axes of batch and heads may have the size 1.
    broadcasts: bool = True


@dataclass(frozen=True, kw_only=True)
class Bias:
    """Summands of the scores. Under the name of the mask, what the mask hides is -inf in it."""

    name: str
    axes: PairAxes = "BHQK"
    broadcasts: bool = True


@dataclass(frozen=True, kw_only=True)
class Window:
    """A window of keys around the query: one pair, one parameter for each side, or one size for what is behind."""

    # Keys before and after the query, itself not counted: a pair, or two parameters of which one may be missing.
    pair: str | None = None
    left: str | None = None
    right: str | None = None
    # How many keys up to the query; whether its own is one of them.
    size: str | None = None
    counts_self: bool = True
    # What an open side is given as; without it, sides must be closed.
    unbounded: int | Literal["none"] | None = None
    # Whether a window alone shows keys after the query; if not, only windows that are causal can be expressed.
    ahead: bool = True
    # Whether it needs the causal rule beside it.
    needs_causal: bool = False
    # Whether it may be given beside a mask, both then being obeyed.
    with_mask: bool = False


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Counts of keys per batch entry, int32."""

    name: str
    with_mask: bool = False


@dataclass(frozen=True, kw_only=True)
class Packed:
    """For THD: where the entries begin and end, int32 (batch + 1,), and the largest lengths."""

    cu_q: str
    cu_k: str
    max_q: str | None = None
    max_k: str | None = None


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """Slopes, float32 (H,); the bias is minus the slope times the distance, positions as `aligns` says."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Lse:
    """The log-sum-exp: where it is in what is returned, its axes, and the base of its logarithm."""

    axes: LseAxes
    position: int = 1
    base: Literal["e", "2"] = "e"


@dataclass(frozen=True, kw_only=True)
class Convention:
    """How a function is called. Read from TOML by `refattn.conformance.conventions.read_convention`."""

    name: str
    # One sentence: whose convention it is.
    says: str
    layout: Layout
    # That of the output, if it is another.
    output_layout: Layout | None = None
    # The arrays it takes, as in `--library`.
    library: str = "numpy"
    dtypes: tuple[str, ...] = COMPUTED
    # Where the positions of queries and keys coincide: of causal, windows and ALiBi.
    aligns: Alignment | None = None
    # What is passed by position, in order: arguments of ours, or parameters of `fixed`. The rest is passed by keyword.
    positional: tuple[str, ...] = ("q", "k", "v")
    # Parameters that are the same in every call.
    fixed: dict[str, Any] = field(default_factory=dict)
    # What is passed for an option that a case does not use; others are then left out.
    off: dict[str, Any] = field(default_factory=dict)
    # Parameters that are given beside grouped heads, causal or a window, or in order to get the log-sum-exp.
    ask: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Whether k and v may have fewer heads than q; false leaves out all cases of grouped heads.
    grouped: bool = True
    # Whether d_v must be d_k, and the widths there are, if not all: narrower heads are filled up with zeros.
    equal_widths: bool = False
    widths: tuple[int, ...] = ()
    # Whether the elements of a head's vector must lie side by side in memory.
    dense_width: bool = False
    names: Names = field(default_factory=Names)
    causal: Causal | None = None
    mask: Mask | None = None
    bias: Bias | None = None
    window: Window | None = None
    lengths: Lengths | None = None
    packed: Packed | None = None
    alibi: Alibi | None = None
    lse: Lse | None = None

    def parameters(self, argument: str) -> tuple[str, ...]:
        """The function's parameters for an argument of ours; none if the convention lacks it."""
        if argument == "window":
            sides = self.window and (self.window.pair, self.window.left, self.window.right, self.window.size)
            return tuple(side for side in sides or () if side)
        table = getattr(self, argument, None) if argument not in vars(self.names) else None
        name = getattr(self.names, argument, None) if table is None else table.name
        return (name,) if name else ()

    @property
    def batched(self) -> bool:
        """Whether one call takes a batch."""
        return "B" in self.layout or "T" in self.layout

    def problems(self) -> list[tuple[str, str]]:
        """What contradicts itself: the key, and what was expected of it."""
        found: list[tuple[str, str]] = []
        positions = [key for key in ("causal", "window", "alibi") if getattr(self, key) is not None]
        if positions and self.aligns is None:
            found.append(("aligns", f"top-left, bottom-right or q_start, because there is a table {positions[0]}"))
        if self.aligns == "q_start" and not self.names.q_start:
            found.append(("names.q_start", "the name of a parameter, because aligns is q_start"))
        if (self.layout == "THD") != (self.packed is not None):
            found.append(("packed", "a table if the layout is THD, and none otherwise"))
        if self.layout == "THD" and (self.mask or self.bias):
            found.append(("mask" if self.mask else "bias", "no table where the layout is THD"))
        if self.window and [bool(self.window.pair), bool(self.window.left), bool(self.window.size)].count(True) != 1:
            found.append(("window", "exactly one of pair, left (with right, if there is one) and size"))
        if self.lse and ("T" in self.lse.axes) != (self.layout == "THD"):
            found.append(("lse.axes", f"axes that go with the layout {self.layout}"))
        if self.lse and not self.batched and "B" in self.lse.axes:
            found.append(("lse.axes", f"axes that go with the layout {self.layout}"))
        for key in self.positional:
            if key not in self.fixed and not self.parameters(key):
                found.append(("positional", f"names of ours that the convention has, or keys of fixed, not {key!r}"))
            elif key in (*OPTIONS, "output") and key not in self.off:
                found.append((f"off.{key}", "what to pass where a case does not use it, because it is positional"))
        found += [("off", f"options that the convention has, not {key!r}") for key in self.off if not self._option(key)]
        found += [("ask", f"{', '.join(ASKED)}, not {key!r}") for key in self.ask if key not in ASKED]
        return found

    def _option(self, key: str) -> bool:
        return key in OPTIONS and bool(self.parameters(key))
