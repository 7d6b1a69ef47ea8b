"""Vectors and their manifest in canonical form: sorted keys, one vector per line, numbers as bit patterns."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import flint
import numpy as np

from certify.attend import PRECISIONS, Certified, certify
from certify.call import Book, Call, Recipe
from certify.draw import KINDS, fits
from certify.gradients import certify_gradients
from certify.pairs import added, pair_of, visible
from certify.recipes import BOOKS, NOT_SHOWN
from certify.rounding import exact, rounded

FORMAT = 1
# What one vector may hold, so that it stays small enough to look at.
MOST_NUMBERS = 900
SCHEMA = "schema.json"
MANIFEST = "manifest.json"
WIDTHS = {"bfloat16": 4, "float16": 4, "float32": 8, "float64": 16}


def files(schema: bytes, books: Iterable[Book] = BOOKS) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every file: one per chapter, then the manifest with the sums of these and of the schema."""
    listed = [_listed(SCHEMA, schema, None)]
    known = {one["const"] for one in json.loads(schema)["$defs"]["flag"]["oneOf"]}
    for book in books:
        vectors = [vector for recipe in book.recipes for vector in vectors_of(recipe, book.chapter)]
        for vector in vectors:
            unknown, shown = {*vector["flags"]} - known, NOT_SHOWN.keys() & vector["clauses"]
            assert not unknown, f"{vector['name']}: say in {SCHEMA} what failing at {', '.join(unknown)} means"
            assert not shown, f"{vector['name']}: take {', '.join(shown)} out of NOT_SHOWN"
        lines = ",\n".join(_json(vector) for vector in vectors)
        data = f'{{"chapter":"{book.chapter}","format":{FORMAT},"vectors":[\n{lines}\n]}}\n'.encode()
        name = f"{book.chapter}.json"
        listed.append(_listed(name, data, len(vectors)))
        yield name, data
    manifest = {"format": FORMAT, "files": listed, "not_shown": NOT_SHOWN}
    yield MANIFEST, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def vectors_of(recipe: Recipe, chapter: str) -> Iterator[dict[str, Any]]:
    """The vectors of a recipe, each as the data that JSON holds."""
    for name, kind, call in recipe.calls():
        vector = vector_of(call, kind)
        flags = {*recipe.flags, *_flags_of(call, kind, vector)}
        about = {"name": name, "clauses": list(recipe.clauses), "says": recipe.says, "flags": sorted(flags)}
        count = _numbers(vector)
        assert count <= MOST_NUMBERS, f"{name} holds {count} numbers"
        assert all(clause[0] in "ASMPGBKTDN" for clause in recipe.clauses) and recipe.clauses[0][0] == chapter, name
        yield about | vector


def vector_of(call: Call, kind: str) -> dict[str, Any]:
    """Inputs, options and certified results of one call."""
    result = certify(call)
    gradients = None if call.grad_output is None else certify_gradients(call)
    stored = KINDS[kind][0]
    for name in ("q", "k", "v", "sinks", "grad_output"):
        if (values := getattr(call, name)) is not None:
            for dtype in ("float32", "float64") if name in call.wide else KINDS[kind]:
                assert all(fits(float(x), dtype) for x in values.ravel()), f"{name} is not exact in {dtype}"
    return {
        "dtypes": list(KINDS[kind]),
        **{name: array(getattr(call, name), stored) for name in ("q", "k", "v")},
        "options": _options(call, stored),
        "visible": booleans(result.visible),
        **({} if call.grad_output is None else {"grad_output": array(call.grad_output, stored)}),
        "expected": _expected(result, weights=True)
        | ({} if gradients is None else {"gradients": {n: array(x, "float64") for n, x in gradients.values.items()}}),
        **({"parts": [_part(call, keys) for keys in call.parts]} if call.parts else {}),
        **({"cache": call.cache} if call.cache else {}),
        "proof": {
            "bits": max(result.precision, gradients.precision if gradients else 0),
            "rational": result.rational + (gradients.rational if gradients else 0),
        },
    }


def array(values: np.ndarray, dtype: str) -> dict[str, Any]:
    """A floating array as bit patterns of a dtype that holds it exactly."""
    words = " ".join(pattern(float(x), dtype) for x in np.asarray(values).ravel())
    return {"dtype": dtype, "shape": list(np.shape(values)), "bits": words}


def pattern(x: float, dtype: str) -> str:
    """The bits of x in a dtype, as hexadecimal digits, most significant first; every NaN is the same one."""
    if math.isnan(x):
        return {"bfloat16": "7fc0", "float32": "7fc00000", "float64": "7ff8000000000000"}[dtype]
    assert fits(x, dtype), f"{x!r} is not exact in {dtype}"
    # A bfloat16 is the upper half of a float32.
    bits = struct.pack(">d", x) if dtype == "float64" else struct.pack(">f", x)
    return bits.hex()[: WIDTHS[dtype]]


def booleans(values: np.ndarray) -> dict[str, Any]:
    """A boolean array as ones and zeros, one word per row."""
    values = np.asarray(values)
    rows = values.reshape(-1, values.shape[-1]) if values.size else values.reshape(0, 1)
    words = ("".join("1" if x else "0" for x in row) for row in rows)
    return {"dtype": "bool", "shape": list(values.shape), "bits": " ".join(words)}


def _options(call: Call, stored: str) -> dict[str, Any]:
    """The options that differ from their defaults."""
    options: dict[str, Any] = {}
    if call.causal:
        options["causal"] = True
    if call.mask is not None:
        plain = call.mask["array"] if call.mask["kind"] == "dense" else _squeezed(visible(call, mask_alone=True), call)
        options["mask"] = {"values": booleans(plain), "description": _described(call.mask)}
    if call.bias:
        options["bias"] = _bias(call, stored)
    for name in ("scale", "softcap"):
        if (value := getattr(call, name)) is not None:
            options[name] = pattern(value, "float64")
    if call.sinks is not None:
        options["sinks"] = array(call.sinks, "float32" if "sinks" in call.wide else stored)
    if call.q_start is not None:
        options["q_start"] = call.q_start
    if call.k_start != 0:
        options["k_start"] = call.k_start
    if call.rotary is not None:
        options["rotary"] = call.rotary | {"base": pattern(call.rotary["base"], "float64")}
    return options


def _described(mask: dict[str, Any]) -> dict[str, Any]:
    """A mask's data as JSON holds them: boolean arrays as ones and zeros, masks inside a mask likewise."""
    described = {name: booleans(x) if isinstance(x, np.ndarray) else x for name, x in mask.items()}
    if "of" in mask:
        described["of"] = [_described(one) for one in mask["of"]]
    return described


def _bias(call: Call, stored: str) -> dict[str, Any]:
    """The sum of all biases as a plain array, and the terms it comes from."""
    total, inexact = np.zeros(call.pairs), False
    for index in np.ndindex(*call.pairs):
        with flint.ctx.workprec(PRECISIONS[1]):
            value = added(call, pair_of(call, index))
            near = value if isinstance(value, float) else rounded(value)
        assert near is not None, f"the bias at {index} is not settled"
        inexact = inexact or not (isinstance(value, float) or value == exact(near))
        total[index] = near
    alone = len(call.bias) == 1 and call.bias[0]["kind"] == "array"
    total = call.bias[0]["array"] if alone else _squeezed(total, call)
    narrow = next(d for d in (stored, "float32", "float64") if all(fits(float(x), d) for x in total.ravel()))
    terms = []
    for term in call.bias:
        arrays = {n: x for n, x in term.items() if isinstance(x, np.ndarray)}
        terms.append(term | {n: array(x, "float32" if "bias" in call.wide else stored) for n, x in arrays.items()})
    return {"values": array(total, narrow), "exact": not inexact, **({} if alone else {"terms": terms})}


def _squeezed(values: np.ndarray, call: Call) -> np.ndarray:
    """The same with every axis before the last two that nothing depends on of size 1, and no leading ones."""
    for axis in range(values.ndim - 2):
        first = np.take(values, [0], axis=axis) if values.shape[axis] else values
        if values.shape[axis] and np.array_equal(np.broadcast_to(first, values.shape), values, equal_nan=True):
            values = first
    while values.ndim > 2 and values.shape[0] == 1:
        values = values[0]
    return values


def _expected(result: Certified, weights: bool) -> dict[str, Any]:
    names = ("output", "lse", "weights") if weights else ("output", "lse")
    return {name: array(getattr(result, name), "float64") for name in names}


def _part(call: Call, keys: tuple[int, int]) -> dict[str, Any]:
    return {"keys": list(keys), **_expected(certify(call, keys), weights=False)}


def _flags_of(call: Call, kind: str, vector: dict[str, Any]) -> Iterator[str]:
    """The flags that the numbers themselves call for."""
    seen = visible(call)
    if kind != "base":
        yield "full-significand"
    if 0 in (*call.pairs, call.q.shape[-1], call.v.shape[-1]):
        yield "zero-size"
    if seen.size and not seen.any(axis=-1).all():
        yield "empty-row"
    if call.q.ndim > 2 and call.q.shape[-3] != call.k.shape[-3]:
        yield "grouped-heads"
    if any("7ff8000000000000" in x["bits"] for name, x in vector["expected"].items() if name != "gradients"):
        yield "nan-expected"
    if call.causal and call.q_start is not None and call.pairs[-1] > call.pairs[-2] > 0:
        starts = np.asarray(call.q_start)
        if call.k_start == 0 and (starts == 0).all():
            yield "aligned-top-left"
        if call.k_start == 0 and (starts == call.pairs[-1] - call.pairs[-2]).all():
            yield "aligned-bottom-right"


def _numbers(data: Any) -> int:
    """How many floating numbers a vector holds."""
    if isinstance(data, dict):
        if "bits" in data and "shape" in data:
            return 0 if data["dtype"] == "bool" else math.prod(data["shape"])
        return sum(_numbers(x) for x in data.values())
    return sum(_numbers(x) for x in data) if isinstance(data, list) else 0


def _json(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _listed(name: str, data: bytes, vectors: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    return entry if vectors is None else entry | {"vectors": vectors}


def compare(folder: Path, write: bool, books: Iterable[Book] = BOOKS) -> list[str]:
    """What differs between a folder and what is made anew, in words; with `write` the folder is made to agree."""
    different, made = [], {SCHEMA}
    for name, data in files((folder / SCHEMA).read_bytes(), books):
        made.add(name)
        path = folder / name
        if not path.is_file() or path.read_bytes() != data:
            different.append(f"{name} {'differs' if path.is_file() else 'is missing'}")
            if write:
                path.write_bytes(data)
    for path in sorted(folder.iterdir()):
        if path.name not in made:
            different.append(f"{path.name} is not made by any recipe")
            if write:
                path.unlink()
    return different
