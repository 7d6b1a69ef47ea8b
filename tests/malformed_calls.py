"""Malformed calls of attention: which class refuses them, naming which argument, and what the message says."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from refattn import biases, errors, masks
from refusals import Maker

BATCH, HEADS, KV_HEADS, Q_LEN, K_LEN, D_K, D_V = 2, 4, 2, 3, 5, 8, 6
SHAPES: dict[str, tuple[int, ...]] = {
    "q": (BATCH, HEADS, Q_LEN, D_K),
    "k": (BATCH, KV_HEADS, K_LEN, D_K),
    "v": (BATCH, KV_HEADS, K_LEN, D_V),
}
NOT_ARRAYS: dict[str, Any] = {
    "None": None,
    "number": 1.0,
    "text": "q",
    "list": [[1.0, 2.0]],
    "class": np.float32,
    "masked array": np.ma.masked_array(np.ones((2, 4, 3, 8), dtype=np.float32)),
    "matrix": np.ones((3, 8), dtype=np.float32).view(np.matrix),
}


class Bad(NamedTuple):
    """One call that must be refused: with which class, naming what, and the words that say what came."""

    error: type[errors.RefattnError]
    argument: str
    got: tuple[str, ...]
    options: Callable[[Maker], dict[str, Any]]


def shaped(argument: str, *shape: int, dtype: str = "float32") -> Callable[[Maker], dict[str, Any]]:
    return lambda make: {argument: make(*shape, dtype=dtype)}


def given(argument: str, value: Any) -> Callable[[Maker], dict[str, Any]]:
    return lambda make: {argument: value}


def printed(value: Any) -> str:
    """The table's name of a value."""
    return repr(value)[:40]


TABLE: dict[str, Bad] = {}

# What the loops below run over.
value: Any
shape: tuple[int, ...]
got: tuple[str, ...]
readings: tuple[str, ...]


def bad(name: str, error: type[errors.RefattnError], argument: str, got: tuple[str, ...], options: Any) -> None:
    assert name not in TABLE, name
    TABLE[name] = Bad(error, argument, got, options)


# ---- q, k and v -------------------------------------------------------------------------------------------

for argument in SHAPES:
    for name, value in NOT_ARRAYS.items():
        words = {"None": "None", "number": "float 1.0", "text": "'q'", "list": "[[1.0, 2.0]]", "class": "float32"}
        bad(
            f"{argument} {name}",
            errors.NotAnArrayError,
            argument,
            (words.get(name, "of shape"),),
            given(argument, value),
        )
    for dtype in ("int32", "bool", "complex64"):
        shape = SHAPES[argument]
        bad(
            f"{argument} {dtype}",
            errors.DTypeError,
            argument,
            (str(shape), dtype),
            shaped(argument, *shape, dtype=dtype),
        )
for argument in ("k", "v"):
    shape = SHAPES[argument]
    bad(
        f"{argument} float64",
        errors.DTypeError,
        argument,
        ("float32", "float64"),
        shaped(argument, *shape, dtype="float64"),
    )
    bad(f"{argument} rank", errors.RankError, argument, ("4", str(shape[1:])), shaped(argument, *shape[1:]))
    bad(f"{argument} batch", errors.BatchError, "q", (str(shape[:1]), "(3,)"), shaped(argument, 3, *shape[1:]))
bad("q rank 1", errors.RankError, "q", ("(8,)", "float32"), shaped("q", D_K))
bad("q rank 0", errors.RankError, "q", ("()", "float32"), shaped("q"))
bad("k width", errors.ShapeError, "k", ("d_k = 8", "(2, 2, 5, 7)"), shaped("k", BATCH, KV_HEADS, K_LEN, 7))
bad("v length", errors.ShapeError, "v", ("Lk = 5", "(2, 2, 4, 6)"), shaped("v", BATCH, KV_HEADS, 4, D_V))
bad("v heads", errors.ShapeError, "v", ("Hkv = 2", "(2, 1, 5, 6)"), shaped("v", BATCH, 1, K_LEN, D_V))
bad("v heads of q", errors.ShapeError, "v", ("Hkv = 2", "(2, 4, 5, 6)"), shaped("v", BATCH, HEADS, K_LEN, D_V))
for heads in (0, 1, 3, 5):
    got = ("Hkv = 2", f"H = {heads}")
    bad(f"q heads {heads}", errors.HeadCountError, "q", got, shaped("q", BATCH, heads, Q_LEN, D_K))
bad("no kv heads", errors.HeadCountError, "q", ("Hkv = 0", "H = 4"), lambda make: {
    "k": make(BATCH, 0, K_LEN, D_K), "v": make(BATCH, 0, K_LEN, D_V)})  # fmt: skip

# ---- options ----------------------------------------------------------------------------------------------

for value in (0, 1, None, "True", np.True_):
    bad(f"causal {printed(value)}", errors.CausalError, "causal", (str(value),), given("causal", value))
for value in (math.nan, math.inf, -math.inf, "1", True, 1j, [1.0], np.float32("nan"), 10**400):
    bad(f"scale {printed(value)}", errors.ScaleError, "scale", ("finite real number",), given("scale", value))
bad("scale rank 1", errors.ScaleError, "scale", ("(1,)", "float32"), shaped("scale", 1))
bad("scale integer array", errors.ScaleError, "scale", ("()", "int32"), shaped("scale", dtype="int32"))
for value in (0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, "2", True, 1j, [2.0], Fraction(-1, 2), 10**400):
    bad(f"softcap {printed(value)}", errors.SoftcapError, "softcap", ("> 0",), given("softcap", value))
bad("softcap array", errors.SoftcapError, "softcap", ("()", "float32"), shaped("softcap"))
for shape in ((), (1,), (3,), (KV_HEADS,), (1, HEADS), (HEADS, 1)):
    bad(f"sinks {shape}", errors.SinkError, "sinks", ("(4,)", str(shape), "float32"), shaped("sinks", *shape))
for dtype in ("int32", "bool", "complex64"):
    bad(f"sinks {dtype}", errors.SinkError, "sinks", ("floating", "(4,)", dtype), shaped("sinks", HEADS, dtype=dtype))
for value in ([0.0] * HEADS, 1.0, "sink"):
    bad(f"sinks {printed(value)}", errors.NotAnArrayError, "sinks", ("array",), given("sinks", value))
for value in (None, 1, "", "Dense", "magic", b"dense", ["dense"], np.zeros(2)):
    bad(f"path {printed(value)}", errors.PathError, "path", ("'dense'",), given("path", value))

for dtype in ("int32", "float32", "complex64"):
    got = ("boolean", "(3, 5)", dtype, "bias=")
    bad(f"mask {dtype}", errors.MaskKindError, "mask", got, shaped("mask", Q_LEN, K_LEN, dtype=dtype))
for value in (True, 1, "causal", [[True] * K_LEN] * Q_LEN):
    bad(f"mask {printed(value)}", errors.MaskKindError, "mask", (type(value).__name__,), given("mask", value))
for shape in ((K_LEN + 1,), (Q_LEN, 4), (4, K_LEN), (BATCH, K_LEN), (K_LEN, Q_LEN), (Q_LEN, 0)):
    got = ("(..., H, Lq, Lk) = (2, 4, 3, 5)", str(shape), "bool")
    readings = ("rank 2 is read as (Lq, Lk)", "masks.padding(keep)") if len(shape) == 2 else ()
    bad(f"mask {shape}", errors.MaskShapeError, "mask", got + readings, shaped("mask", *shape, dtype="bool"))
    readings = ("rank 2 is read as (Lq, Lk)",) if len(shape) == 2 else ()
    bad(f"bias {shape}", errors.BiasError, "bias", (str(shape), *readings), shaped("bias", *shape))
for shape in ((BATCH, Q_LEN, K_LEN), (KV_HEADS, 1, K_LEN), (0, Q_LEN, K_LEN)):
    got = (str(shape), "rank 3 is read as (H, Lq, Lk)", "(B, 1, Lq, Lk)")
    bad(f"mask {shape}", errors.MaskShapeError, "mask", got, shaped("mask", *shape, dtype="bool"))
    bad(f"bias {shape}", errors.BiasError, "bias", got, shaped("bias", *shape))
for shape in ((3, 1, Q_LEN, K_LEN), (BATCH, 2, Q_LEN, K_LEN), (1, BATCH, HEADS, Q_LEN, K_LEN)):
    bad(f"mask {shape}", errors.MaskShapeError, "mask", (str(shape), "bool"), shaped("mask", *shape, dtype="bool"))
    bad(f"bias {shape}", errors.BiasError, "bias", (str(shape), "float32"), shaped("bias", *shape))
for dtype in ("int32", "bool", "complex64"):
    bad(f"bias {dtype}", errors.BiasError, "bias", ("(3, 5)", dtype), shaped("bias", Q_LEN, K_LEN, dtype=dtype))
for value in (1.0, "alibi", [[0.0] * K_LEN] * Q_LEN, masks.causal()):
    bad(f"bias {printed(value)}", errors.BiasError, "bias", (type(value).__name__,), given("bias", value))
bad("alibi of other heads", errors.BiasError, "alibi(heads)", ("H = 4", "3 heads"), lambda make: {
    "bias": biases.alibi(3), "q_start": 0})  # fmt: skip
bad("table of other heads", errors.BiasError, "relative(table)", ("H = 4", "2 heads"), lambda make: {
    "bias": make(Q_LEN, K_LEN) + biases.relative(make(2, 3)) if make.library.name != "strict"
    else biases.relative(make(2, 3)) + make(Q_LEN, K_LEN), "q_start": 0})  # fmt: skip
bad("sum with a wrong shape", errors.BiasError, "bias", ("(3, 4)",), lambda make: {
    "bias": biases.alibi(HEADS) + make(Q_LEN, 4), "q_start": 0})  # fmt: skip

# ---- starts -----------------------------------------------------------------------------------------------

for argument in ("q_start", "k_start"):
    for value in (
        0.0,
        1.5,
        True,
        "0",
        1j,
        [0.5, 1.5],
        [True, False],
        [],
        [[0], [1, 2]],
        np.float64(1),
        np.True_,
        {0: 1},
    ):
        bad(f"{argument} {printed(value)}", errors.StartError, argument, ("int",), given(argument, value))
    for dtype in ("float32", "bool"):
        bad(f"{argument} {dtype}", errors.StartError, argument, ("(2,)", dtype), shaped(argument, BATCH, dtype=dtype))
    for value in (2**29 + 1, -(2**29) - 1, 2**70, [0, 2**29 + 1]):
        bad(f"{argument} {printed(value)}", errors.StartError, argument, ("536870912",), given(argument, value))
    for shape in ((3,), (BATCH, 1), (1, BATCH), (0,)):
        got = ("(2,)", str(shape), "int32")
        bad(f"{argument} {shape}", errors.BatchError, argument, got, shaped(argument, *shape, dtype="int32"))
    bad(f"{argument} list of 3", errors.BatchError, argument, ("(2,)", "(3,)"), given(argument, [0, 1, 2]))
bad("k_start None", errors.StartError, "k_start", ("int", "None"), given("k_start", None))

# ---- masks that do not fit the call -----------------------------------------------------------------------

PARTS: dict[str, tuple[type[errors.RefattnError], str, tuple[str, ...], Callable[[Maker], Any]]] = {
    "lengths above Lk": (errors.MaskArgumentError, "lengths(n)", ("Lk = 5", "6"), lambda m: masks.lengths(6)),
    "lengths above Lk in one entry": (
        errors.MaskArgumentError,
        "lengths(n)",
        ("5", "[1 6]"),
        lambda m: masks.lengths([1, 6]),
    ),
    "lengths of 3 entries": (errors.BatchError, "lengths(n)", ("(2,)", "(3,)"), lambda m: masks.lengths([1, 2, 3])),
    "padding of another length": (
        errors.BatchError,
        "padding(keep)",
        ("Lk = 5", "(2, 4)"),
        lambda m: masks.padding(m(2, 4, dtype="bool")),
    ),
    "padding of 3 entries": (
        errors.BatchError,
        "padding(keep)",
        ("(2,)", "(3, 5)"),
        lambda m: masks.padding(m(3, 5, dtype="bool")),
    ),
    "documents with Lq != Lk": (
        errors.BatchError,
        "documents(k_ids)",
        ("Lq = 3", "Lk = 5"),
        lambda m: masks.documents([0, 0, 1]),
    ),
    "documents of another Lq": (
        errors.BatchError,
        "documents(q_ids)",
        ("Lq = 3", "(4,)"),
        lambda m: masks.documents([0] * 4, [0] * 5),
    ),
    "documents of another Lk": (
        errors.BatchError,
        "documents(k_ids)",
        ("Lk = 5", "(4,)"),
        lambda m: masks.documents([0] * 3, [0] * 4),
    ),
    "documents of 3 entries": (
        errors.BatchError,
        "documents(q_ids)",
        ("(2,)", "(3, 3)"),
        lambda m: masks.documents([[0] * 3] * 3, [0] * 5),
    ),
    "dense of another shape": (
        errors.MaskShapeError,
        "dense(array)",
        ("(3, 4)", "bool"),
        lambda m: masks.dense(m(3, 4, dtype="bool")),
    ),
    "dense by entry": (
        errors.MaskShapeError,
        "dense(array)",
        ("rank 3 is read as (H, Lq, Lk)",),
        lambda m: masks.dense(m(2, 3, 5, dtype="bool")),
    ),
    "blocks of another count": (
        errors.MaskShapeError,
        "blocks(array)",
        ("(2, 4, 2, 3)", "(2, 2)"),
        lambda m: masks.blocks(m(2, 2, dtype="bool"), 2),
    ),
    "blocks of other heads": (
        errors.MaskShapeError,
        "blocks(array)",
        ("(3, 2, 3)", "rank 3"),
        lambda m: masks.blocks(m(3, 2, 3, dtype="bool"), 2),
    ),
    "array of another shape": (
        errors.MaskShapeError,
        "mask",
        ("(3, 4)",),
        lambda m: masks.causal() & m(3, 4, dtype="bool"),
    ),
}
for name, (error, argument, got, build) in PARTS.items():
    bad(name, error, argument, got, lambda make, build=build: {"mask": build(make), "q_start": 0})
    bad(f"{name}, combined", error, argument, got, lambda make, build=build: {
        "mask": ~masks.prefix(1) | (masks.causal() & ~build(make)), "causal": True, "q_start": 0})  # fmt: skip

# ---- positions without q_start ----------------------------------------------------------------------------

POSITIONAL: dict[str, tuple[str, Callable[[Maker], dict[str, Any]]]] = {
    "causal": ("causal()", lambda m: {"causal": True}),
    "causal mask": ("causal()", lambda m: {"mask": masks.causal()}),
    "window": ("window(1, 0)", lambda m: {"mask": masks.window(1, 0)}),
    "chunks": ("chunks(2)", lambda m: {"mask": masks.chunks(2)}),
    "not causal": ("~causal()", lambda m: {"mask": ~masks.causal()}),
    "and": ("causal()", lambda m: {"mask": masks.prefix(1) & masks.causal()}),
    "or": ("window(0, 0)", lambda m: {"mask": masks.lengths(1) | masks.window(0, 0)}),
    "array and causal": ("causal()", lambda m: {"mask": m(Q_LEN, K_LEN, dtype="bool"), "causal": True}),
    "alibi": ("alibi(4)", lambda m: {"bias": biases.alibi(HEADS)}),
    "relative": ("relative(", lambda m: {"bias": biases.relative(m(HEADS, 3))}),
    "sum": ("alibi(4)", lambda m: {"bias": biases.alibi(HEADS) + m(Q_LEN, K_LEN)}),
}
for name, (reader, build) in POSITIONAL.items():
    got = ("top-left", "bottom-right", "Lk - Lq = 2", "lengths - Lq", "Lq = 3, Lk = 5", reader)
    bad(f"no q_start: {name}", errors.PositionError, "q_start", got, build)

# ---- other libraries --------------------------------------------------------------------------------------

for argument, shape, dtype in (
    ("k", SHAPES["k"], "float32"),
    ("v", SHAPES["v"], "float32"),
    ("mask", (Q_LEN, K_LEN), "bool"),
    ("bias", (Q_LEN, K_LEN), "float32"),
    ("sinks", (HEADS,), "float32"),
    ("scale", (), "float32"),
):
    bad(f"{argument} of another library", errors.LibraryMismatchError, argument, ("an array of",),
        lambda make, a=argument, s=shape, d=dtype: {a: make.other(*s, dtype=d)})  # fmt: skip
