"""Certified vectors: calls of attention whose results are proven, read from JSON (E5).

Outputs, log-sum-exps, weights and gradients are the real numbers of the specification, each rounded once to float64; no
line of refattn computed them. A file is read as data alone, and only if it is the one that the manifest names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import biases, masks
from .arrays import Array
from .errors import VectorError
from .whole_files import write_arrays

FOLDER = Path(__file__).parent / "conformance" / "vectors"
MANIFEST, SCHEMA = "manifest.json", "schema.json"
FORMAT = 1
# Larger files than these are refused unread.
MOST_BYTES = 2**24
# Bytes of a number in each dtype; a bfloat16 is the upper half of a float32.
WIDTHS = {"bfloat16": 2, "float32": 4, "float64": 8}

REQUIRED = ("name", "clauses", "says", "flags", "dtypes", "q", "k", "v", "options", "visible", "expected", "proof")
OPTIONAL = ("parts", "cache", "grad_output")
OPTIONS = ("causal", "mask", "bias", "scale", "softcap", "sinks", "q_start", "k_start", "rotary")

Convert = Callable[[Array], Array]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Results over the keys from start to stop - 1, without sinks: output (..., H, Lq, d_v), lse (..., H, Lq)."""

    start: int
    stop: int
    output: Array
    lse: Array


@dataclass(frozen=True, kw_only=True)
class Vector:
    """One call and its results, host NumPy: floats as float64, exactly; shapes as in `attention`.

    dtypes are those that hold q, k and v exactly, the first the one in which they are stored. mask (bool) and bias are
    plain arrays that broadcast to (..., H, Lq, Lk); mask_data and bias_terms say where they come from, and bias_exact
    whether bias is the sum of these exactly. visible, of that whole shape, is what mask, causal and biases of -inf
    leave. rotary, if given, says how q and k are to be turned first. gradients are those of q, k, v, bias and sinks for
    a grad_output, in their shapes; of a relative bias that of the table. raw is the vector as JSON has it.
    """

    name: str
    clauses: tuple[str, ...]
    says: str
    flags: tuple[str, ...]
    dtypes: tuple[str, ...]
    q: Array
    k: Array
    v: Array
    causal: bool
    mask: Array | None
    mask_data: dict[str, Any] | None
    bias: Array | None
    bias_terms: tuple[dict[str, Any], ...]
    bias_exact: bool
    scale: float | None
    softcap: float | None
    sinks: Array | None
    q_start: Any
    k_start: Any
    rotary: dict[str, Any] | None
    visible: Array
    output: Array
    lse: Array
    weights: Array
    grad_output: Array | None
    gradients: dict[str, Array]
    parts: tuple[Part, ...]
    cache: dict[str, Any] | None
    raw: dict[str, Any]

    @property
    def chapter(self) -> str:
        """The letter of the chapter that it is about."""
        return self.clauses[0][0]

    def options(self, array: Convert = lambda host: host) -> dict[str, Any]:
        """The options as `attention` takes them, with lazy masks and biases; `array` makes arrays of a library.

        rotary is not among them: q and k are to be turned with `rope` before the call.
        """
        given: dict[str, Any] = {"causal": True} if self.causal else {}
        if self.mask_data is not None:
            given["mask"] = mask_of(self.mask_data, array)
        if self.bias is not None:
            given["bias"] = bias_of(self.bias_terms, self.q, array) if self.bias_terms else array(self.bias)
        for name in ("scale", "softcap", "q_start"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        if self.sinks is not None:
            given["sinks"] = array(self.sinks)
        return given | ({} if self.k_start == 0 else {"k_start": self.k_start})


def load(folder: Path = FOLDER, chapters: Iterable[str] | None = None) -> tuple[Vector, ...]:
    """All vectors of a folder, or those of some chapters, in order  # E5

    Raises VectorError, naming the file, for one that is missing, truncated, altered or not of this form.

    >>> import refattn
    >>> from refattn import vectors
    >>> one = vectors.load(chapters="P")[0]
    >>> one.chapter, refattn.attention(one.q, one.k, one.v, **one.options()).shape == one.output.shape
    ('P', True)
    """
    wanted = None if chapters is None else set(chapters)
    return tuple(
        vector
        for entry in manifest(folder)["files"]
        if entry["name"] != SCHEMA and (wanted is None or entry["name"].partition(".")[0] in wanted)
        for vector in _vectors_in(entry["name"], checked_bytes(folder, entry))
    )


def manifest(folder: Path = FOLDER) -> dict[str, Any]:
    """The manifest: "files", each with name, sha256 and bytes, and "not_shown", clauses without a vector and why."""
    data = _parsed(MANIFEST, _read(folder / MANIFEST))
    entries = data.get("files") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
        raise VectorError(MANIFEST, "a list of files, each with name, sha256 and bytes", "another form")
    if data.get("format") != FORMAT:
        raise VectorError(MANIFEST, f"format {FORMAT}, which this version reads", repr(data.get("format")))
    return dict(data)


def flags(folder: Path = FOLDER) -> dict[str, str]:
    """Each flag that a vector may bear, and what failing such a vector means."""
    entry = next((entry for entry in manifest(folder)["files"] if entry["name"] == SCHEMA), None)
    if entry is None:
        raise VectorError(MANIFEST, f"an entry for {SCHEMA}", "none")
    schema = _parsed(SCHEMA, checked_bytes(folder, entry))
    try:
        return {one["const"]: one["description"] for one in schema["$defs"]["flag"]["oneOf"]}
    except (KeyError, TypeError) as fault:
        raise VectorError(SCHEMA, "a definition of the flags", "another form") from fault


def checked_bytes(folder: Path, entry: dict[str, Any]) -> bytes:
    """The bytes of a file that the manifest names, which must be those that it was made with."""
    data = _read(folder / entry["name"])
    if len(data) != entry["bytes"]:
        raise VectorError(entry["name"], f"{entry['bytes']} bytes, as {MANIFEST} says", f"{len(data)}")
    if (digest := hashlib.sha256(data).hexdigest()) != entry["sha256"]:
        raise VectorError(entry["name"], f"the SHA-256 {entry['sha256']} that {MANIFEST} names", digest)
    return data


def save_npz(vector: Vector, folder: Path) -> None:
    """Writes NAME.npz, inputs and options as `refattn check --inputs` reads them, and NAME.expected.npz, the results.

    q, k, v, bias and sinks are in float32 where that holds them, bfloat16 being nothing that such files know.
    """
    inputs: dict[str, Any] = {name: getattr(vector, name) for name in ("q", "k", "v", "bias", "sinks", "grad_output")}
    dtype = "float64" if vector.dtypes[0] == "float64" else "float32"
    inputs = {name: None if x is None else x.astype(dtype) for name, x in inputs.items()}
    inputs |= {name: getattr(vector, name) for name in ("mask", "scale", "softcap", "q_start", "visible")}
    inputs |= {"causal": vector.causal or None, "k_start": None if vector.k_start == 0 else vector.k_start}
    inputs |= {f"rotary_{name}": value for name, value in (vector.rotary or {}).items() if value is not None}
    write_arrays(folder / f"{vector.name}.npz", {name: x for name, x in inputs.items() if x is not None})
    expected = {"output": vector.output, "lse": vector.lse, "weights": vector.weights}
    expected |= {f"gradient_{name}": x for name, x in vector.gradients.items()}
    write_arrays(folder / f"{vector.name}.expected.npz", expected)


def mask_of(data: dict[str, Any], array: Convert = lambda host: host) -> Any:
    """The lazy mask that a vector's mask data describe. Raises VectorError for an unknown kind."""
    kind, rest = data.get("kind"), {name: value for name, value in data.items() if name != "kind"}
    if kind in ("and", "or", "not"):
        parts = [mask_of(part, array) for part in rest["of"]]
        return ~parts[0] if kind == "not" else parts[0] & parts[1] if kind == "and" else parts[0] | parts[1]
    makers: dict[Any, Callable[..., Any]] = {
        "causal": masks.causal,
        "window": masks.window,
        "chunks": masks.chunks,
        "prefix": masks.prefix,
        "documents": masks.documents,
        "lengths": masks.lengths,
        "padding": masks.padding,
        "dense": masks.dense,
        "blocks": masks.blocks,
    }
    if kind not in makers:
        raise VectorError("mask", f"a kind out of {', '.join(makers)}, and, or, not", repr(kind))
    return makers[kind](**{name: array(booleans(x)) if isinstance(x, dict) else x for name, x in rest.items()})


def bias_of(terms: Iterable[dict[str, Any]], q: Array, array: Convert = lambda host: host) -> Any:
    """The sum of the biases that a vector's terms describe, for queries q. Raises VectorError for an unknown kind."""
    total: Any = None
    for term in terms:
        if term.get("kind") == "alibi":
            one: Any = biases.alibi(q.shape[-3] if q.ndim > 2 else 1)
        elif term.get("kind") == "relative":
            one = biases.relative(array(floats(term["table"])))
        elif term.get("kind") == "array":
            one = array(floats(term["array"]))
        else:
            raise VectorError("bias", "a kind out of array, alibi, relative", repr(term.get("kind")))
        total = one if total is None else total + one
    return total


def floats(data: dict[str, Any]) -> Array:
    """A floating array from its bit patterns, as float64, read-only. Raises VectorError unless they fill its shape."""
    import numpy as np

    width, shape = WIDTHS.get(data["dtype"]), _shape(data)
    if width is None:
        raise VectorError("dtype", f"one of {', '.join(WIDTHS)}", repr(data["dtype"]))
    try:
        packed = bytes.fromhex(data["bits"])
    except ValueError as fault:
        raise VectorError("bits", "hexadecimal digits", str(fault)) from fault
    if len(packed) != width * math.prod(shape):
        raise VectorError("bits", f"{math.prod(shape)} numbers for {shape}, {width} bytes each", f"{len(packed)} bytes")
    if width == 2:
        values = (np.frombuffer(packed, dtype=">u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(packed, dtype=f">f{width}")
    return _locked(values.astype(np.float64).reshape(shape))


def booleans(data: dict[str, Any]) -> Array:
    """A boolean array from its ones and zeros, read-only. Raises VectorError if they do not fill its shape."""
    import numpy as np

    digits, shape = "".join(data["bits"].split()), _shape(data)
    if data["dtype"] != "bool" or len(digits) != math.prod(shape) or set(digits) - {"0", "1"}:
        raise VectorError("bits", f"{math.prod(shape)} ones and zeros for {shape}", f"{len(digits)} characters")
    return _locked(np.frombuffer(digits.encode(), dtype=np.uint8).reshape(shape) == ord("1"))


def number(bits: str) -> float:
    """A float64 from its bit pattern."""
    return float(floats({"dtype": "float64", "shape": [], "bits": bits}))


def _vectors_in(file: str, data: bytes) -> Iterator[Vector]:
    """The vectors of one file, whose bytes have been checked."""
    chapter = _parsed(file, data)
    _keys(file, chapter, ("chapter", "format", "vectors"))
    if chapter["format"] != FORMAT:
        raise VectorError(file, f"format {FORMAT}, which this version reads", repr(chapter["format"]))
    if not isinstance(chapter["vectors"], list):
        raise VectorError(file, "a list of vectors", type(chapter["vectors"]).__name__)
    for place, raw in enumerate(chapter["vectors"]):
        _keys(f"{file}, vector {place}", raw, REQUIRED, OPTIONAL)
        try:
            yield _vector(raw)
        except VectorError as fault:
            where = f"{file}, {raw['name']}, {fault.argument}"
            raise VectorError(where, fault.expected, fault.got) from fault
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            raise VectorError(f"{file}, {raw['name']}", f"the form that {SCHEMA} describes", repr(fault)) from fault


def _vector(raw: dict[str, Any]) -> Vector:
    options = raw["options"]
    _keys("options", options, (), OPTIONS)
    _keys("expected", raw["expected"], ("output", "lse", "weights"), ("gradients",))
    mask, bias, rotary = options.get("mask"), options.get("bias"), options.get("rotary")
    return Vector(
        name=raw["name"],
        says=raw["says"],
        clauses=_texts(raw, "clauses"),
        flags=_texts(raw, "flags"),
        dtypes=_texts(raw, "dtypes"),
        q=floats(raw["q"]),
        k=floats(raw["k"]),
        v=floats(raw["v"]),
        causal=options.get("causal", False),
        mask=None if mask is None else booleans(mask["values"]),
        mask_data=None if mask is None else mask["description"],
        bias=None if bias is None else floats(bias["values"]),
        bias_terms=tuple(bias.get("terms", ())) if bias else (),
        bias_exact=bias is None or bias["exact"],
        scale=number(options["scale"]) if "scale" in options else None,
        softcap=number(options["softcap"]) if "softcap" in options else None,
        sinks=floats(options["sinks"]) if "sinks" in options else None,
        q_start=options.get("q_start"),
        k_start=options.get("k_start", 0),
        rotary=None if rotary is None else rotary | {"base": number(rotary["base"])},
        visible=booleans(raw["visible"]),
        output=floats(raw["expected"]["output"]),
        lse=floats(raw["expected"]["lse"]),
        weights=floats(raw["expected"]["weights"]),
        grad_output=floats(raw["grad_output"]) if "grad_output" in raw else None,
        gradients={name: floats(x) for name, x in raw["expected"].get("gradients", {}).items()},
        parts=tuple(_part(part) for part in raw.get("parts", ())),
        cache=raw.get("cache"),
        raw=raw,
    )


def _texts(raw: dict[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts; only of flags may there be none."""
    found = raw[key]
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise VectorError(key, "a list of texts", repr(found))
    if not found and key != "flags":
        raise VectorError(key, "at least one", "none")
    return tuple(found)


def _part(raw: dict[str, Any]) -> Part:
    _keys("parts", raw, ("keys", "output", "lse"))
    start, stop = raw["keys"]
    return Part(start=start, stop=stop, output=floats(raw["output"]), lse=floats(raw["lse"]))


def _keys(where: str, data: Any, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """An object with these keys and no others."""
    if not isinstance(data, dict):
        raise VectorError(where, "an object", type(data).__name__)
    if missing := [name for name in required if name not in data]:
        raise VectorError(where, f"the keys {', '.join(required)}", f"none of the name {', '.join(missing)}")
    if unknown := sorted(set(data) - {*required, *optional}):
        raise VectorError(where, f"no keys but {', '.join((*required, *optional))}", ", ".join(unknown))


def _shape(data: dict[str, Any]) -> tuple[int, ...]:
    _keys("array", data, ("dtype", "shape", "bits"))
    if not isinstance(data["shape"], list) or not all(type(n) is int and n >= 0 for n in data["shape"]):
        raise VectorError("shape", "a list of sizes", repr(data["shape"]))
    return tuple(data["shape"])


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as fault:
        raise VectorError(path.name, f"a readable file in {path.parent}", fault.strerror or str(fault)) from fault
    if len(data) > MOST_BYTES:
        raise VectorError(path.name, f"at most {MOST_BYTES} bytes", "more")
    return data


def _parsed(file: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as fault:
        raise VectorError(file, "JSON", str(fault)) from fault


def _is_entry(entry: Any) -> bool:
    """Whether the manifest's entry is of the right form, and names a file of its own folder."""
    if not isinstance(entry, dict):
        return False
    name, digest, size = (entry.get(key) for key in ("name", "sha256", "bytes"))
    plain = isinstance(name, str) and name.removesuffix(".json").isalnum() and name.endswith(".json")
    return plain and isinstance(digest, str) and type(size) is int


def _locked(values: Array) -> Array:
    values.flags.writeable = False
    return values
