"""Random attention calls: one description, readable both by refattn on any library and by the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

import oracle
from libraries import Library, host_cast
from refattn.conformance.inputs import Sizes, shrunk, sizes, start_is_needed

POSITIONAL = ("causal", "window", "chunks")
FORMS = ("list", "numpy", "library")


@dataclass(frozen=True)
class Ints:
    """Whole numbers (or booleans) that reach refattn as a list, a NumPy array or a library array."""

    values: np.ndarray
    form: str

    def on(self, library: Library) -> Any:
        if self.form == "library":
            return library.array(self.values)
        # A list without numbers has neither dtype nor shape.
        return self.values.tolist() if self.form == "list" and self.values.size else self.values


@dataclass(frozen=True)
class Floats:
    """Real numbers that reach refattn as a library array of the named dtype (None: that of q)."""

    values: np.ndarray
    dtype: str | None

    def named(self, dtype: str) -> str:
        return self.dtype or dtype

    def rounded(self, dtype: str) -> np.ndarray:
        return host_cast(self.values, self.named(dtype)).astype(np.float64)


@dataclass(frozen=True)
class Call:
    """One call: host arrays and options. Masks and biases are nested tuples: a name, then its arguments."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arrays: list[np.ndarray], options: dict[str, Any]) -> Call:
        """The call of the three arrays."""
        q, k, v = arrays
        return cls(q, k, v, options)

    def arguments(self, library: Library, dtype: str) -> tuple[list[Any], dict[str, Any]]:
        """The call's arrays and options for refattn."""
        from refattn import biases, masks

        def give(x: Any) -> Any:
            if isinstance(x, Ints):
                return x.on(library)
            if isinstance(x, Floats):
                return library.array(x.values, x.named(dtype))
            return x

        options = {name: give(value) for name, value in self.options.items() if name not in ("mask", "bias")}
        if (mask := self.options.get("mask")) is not None:
            options["mask"] = library.array(mask[1].values) if mask[0] == "raw" else combined(mask, masks, give)
        if (bias := self.options.get("bias")) is not None:
            # array-api-strict's arrays refuse to add what they do not know: there they stand on the right.
            terms = sorted(bias, key=lambda t: t[0] == "array") if library.name == "strict" else bias
            options["bias"] = summed([give(t[1]) if t[0] == "array" else combined(t, biases, give) for t in terms])
        return [library.array(x, dtype) for x in (self.q, self.k, self.v)], options

    def expected(self, dtype: str) -> oracle.Result:
        """The oracle's answer for the call's values rounded to `dtype`."""

        def give(x: Any) -> Any:
            if isinstance(x, Ints):
                return x.values
            return x.rounded(dtype) if isinstance(x, Floats) else x

        options = {name: give(value) for name, value in self.options.items() if name not in ("mask", "bias")}
        options["causal_too"] = options.pop("causal", False)
        if options.get("q_start") is None:
            options["q_start"] = 0
        if (mask := self.options.get("mask")) is not None:
            options["mask"] = oracle.dense(mask[1].values) if mask[0] == "raw" else combined(mask, oracle, give)
        if (bias := self.options.get("bias")) is not None:
            terms = [oracle.array_bias(give(t[1])) if t[0] == "array" else combined(t, oracle, give) for t in bias]
            options["bias"] = oracle.sum_of(*terms)
        q, k, v = (host_cast(x, dtype).astype(np.float64) for x in (self.q, self.k, self.v))
        return oracle.attention(q, k, v, **options)


def combined(tree: tuple[Any, ...], kinds: Any, give: Any) -> Any:
    """The mask or bias that `tree` describes, made of the constructors in `kinds`."""
    name, *arguments = tree
    if name == "and":
        return combined(arguments[0], kinds, give) & combined(arguments[1], kinds, give)
    if name == "or":
        return combined(arguments[0], kinds, give) | combined(arguments[1], kinds, give)
    if name == "not":
        return ~combined(arguments[0], kinds, give)
    return getattr(kinds, name)(*map(give, arguments))


def summed(terms: list[Any]) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def is_positional(tree: tuple[Any, ...] | None) -> bool:
    if tree is None:
        return False
    return tree[0] in POSITIONAL or any(is_positional(part) for part in tree[1:] if isinstance(part, tuple))


# ---- strategies -------------------------------------------------------------------------------------------


# Compiling libraries draw from these alone.
FEW_SIZES = (
    Sizes(2, (), 1, 1, 3, 5, 2, 3),
    Sizes(4, (2,), 4, 2, 4, 4, 3, 2),
    Sizes(5, (2, 1), 2, 1, 2, 3, 2, 2),
    Sizes(3, (), 3, 3, 0, 0, 2, 2),
)


# Small sizes, each of them zero now and then.
SMALL = (1, 2, 3, 4, 5, 2, 3, 4, 0)
COUNTS = (1, 2, 3, 2, 3, 2, 3, 2, 0)


def per_entry(draw: st.DrawFn, rng: np.random.Generator, size: Sizes, low: int, high: int) -> Any:
    """One int, or one per batch entry."""
    if not size.batch or draw(st.booleans()):
        return draw(st.integers(low, high))
    shape = shrunk(draw, size.batch, drop=False)
    return Ints(rng.integers(low, high + 1, shape), draw(st.sampled_from(FORMS)))


def leaf(draw: st.DrawFn, rng: np.random.Generator, size: Sizes, kind: str) -> tuple[Any, ...]:
    """One mask of the named kind with random arguments."""
    form = draw(st.sampled_from(FORMS))
    bound = st.none() | st.integers(0, 3)
    match kind:
        case "causal":
            return ("causal",)
        case "window":
            return ("window", draw(bound), draw(bound))
        case "lengths":
            return ("lengths", per_entry(draw, rng, size, 0, size.k_len))
        case "padding":
            return (
                "padding",
                Ints(rng.random((*shrunk(draw, size.batch, drop=False), size.k_len)) < 0.6, form),
            )
        case "documents":
            q_ids = Ints(rng.integers(0, 3, (*size.batch, size.q_len)), form)
            k_ids = Ints(rng.integers(0, 3, (*size.batch, size.k_len)), form)
            return ("documents", q_ids) if size.q_len == size.k_len and draw(st.booleans()) else (kind, q_ids, k_ids)
        case "prefix" | "chunks":
            return (kind, draw(st.integers(1, 4)))
        case "dense":
            return ("dense", Ints(rng.random(shrunk(draw, size.pairs)) < 0.6, "library"))
        case _:
            edge = draw(st.integers(1, 3))
            counts = (-(-size.q_len // edge), -(-size.k_len // edge))
            lead = shrunk(draw, size.pairs[:-2])
            return ("blocks", Ints(rng.random((*lead, *counts)) < 0.6, "library"), edge)


KINDS = ("causal", "window", "lengths", "padding", "documents", "prefix", "chunks", "dense", "blocks")


def mask_tree(draw: st.DrawFn, rng: np.random.Generator, size: Sizes, depth: int = 2) -> tuple[Any, ...]:
    node = draw(st.sampled_from(["leaf", "leaf", "and", "or", "not"])) if depth else "leaf"
    if node == "leaf":
        return leaf(draw, rng, size, draw(st.sampled_from(KINDS)))
    parts = 1 if node == "not" else 2
    return (node, *(mask_tree(draw, rng, size, depth - 1) for _ in range(parts)))


def bias_terms(draw: st.DrawFn, rng: np.random.Generator, size: Sizes) -> list[tuple[Any, ...]] | None:
    names = draw(st.sampled_from([(), (), ("array",), ("alibi",), ("relative",), ("alibi", "array"),
                                  ("relative", "alibi"), ("array", "relative")]))  # fmt: skip
    dtype = draw(st.sampled_from([None, "float32", "float64"]))
    terms: list[tuple[Any, ...]] = []
    for name in names:
        if name == "alibi" and not size.heads:
            continue
        if name == "alibi":
            terms.append(("alibi", size.heads))
        elif name == "relative":
            reach = draw(st.integers(0, 3))
            terms.append(("relative", Floats(rng.standard_normal((size.heads, 2 * reach + 1)), dtype)))
        else:
            values = 2 * rng.standard_normal(shrunk(draw, size.pairs))
            if draw(st.booleans()):
                values = np.where(rng.random(values.shape) < 0.3, -np.inf, values)
            terms.append(("array", Floats(values, dtype)))
    return terms or None


@st.composite
def calls(draw: st.DrawFn, few_shapes: bool = False, kind: str | None = None) -> Call:
    """A legal call with any combination of options; `kind` asks for a mask of that kind, or of "any"."""
    size = draw(st.sampled_from(FEW_SIZES)) if few_shapes else draw(sizes(lengths=SMALL, widths=SMALL, counts=COUNTS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    heads = () if size.rank == 2 else (size.heads,)
    kv_heads = () if size.rank == 2 else (size.kv_heads,)
    lead = [size.batch if few_shapes else shrunk(draw, size.batch, drop=False) for _ in range(3)]
    q = 2 * rng.standard_normal((*lead[0], *heads, size.q_len, size.d_k))
    k = 2 * rng.standard_normal((*lead[1], *kv_heads, size.k_len, size.d_k))
    v = 2 * rng.standard_normal((*lead[2], *kv_heads, size.k_len, size.d_v))
    # The batch is what q, k, v broadcast to; options are drawn for that one.
    size = Sizes(size.rank, np.broadcast_shapes(*lead), *list(vars(size).values())[2:])

    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["causal"] = True
    if kind == "any":
        options["mask"] = mask_tree(draw, rng, size)
    elif kind is not None:
        options["mask"] = leaf(draw, rng, size, kind)
    elif (choice := draw(st.integers(0, 3))) == 1:
        options["mask"] = ("raw", leaf(draw, rng, size, "dense")[1])
    elif choice > 1:
        options["mask"] = mask_tree(draw, rng, size)
    if (bias := bias_terms(draw, rng, size)) is not None:
        options["bias"] = bias
    scales = st.floats(-2, 2).map(lambda x: round(x, 3)) | st.sampled_from([0, 0.0, 1, -1])
    scale = draw(st.none() | scales)
    if scale is not None:
        options["scale"] = Floats(np.asarray(float(scale)), None) if draw(st.integers(0, 4)) == 0 else scale
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 2, 7.25, 50.0]))
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(), (1,)])) if size.rank == 2 else (size.heads,)
        values = 2 * rng.standard_normal(shape)
        values = np.where(rng.random(shape) < 0.2, -np.inf, values)
        options["sinks"] = Floats(values, draw(st.sampled_from([None, "float32", "float64"])))
    if draw(st.booleans()):
        options["k_start"] = per_entry(draw, rng, size, -2, 4)
    derived = any(t[0] != "array" for t in bias or ()) or is_positional(options.get("mask"))
    positional = bool(options.get("causal") or derived)
    if start_is_needed(positional, size, options.get("k_start", 0)) or draw(st.booleans()):
        options["q_start"] = per_entry(draw, rng, size, -2, 6)
    return Call(q, k, v, options)
