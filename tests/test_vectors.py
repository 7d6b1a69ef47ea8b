"""The certified vectors as they are shipped: their form, their reader, and that refattn keeps its bounds on them."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import refattn
from refattn import CLAUSES, vectors
from refattn.conformance.judge import error_over_bound
from refattn.conformance.plain import rounded
from refattn.errors import VectorError
from refattn.vectors import Vector

VECTORS = vectors.load()
MANIFEST = vectors.manifest()
SCHEMA = json.loads((vectors.FOLDER / vectors.SCHEMA).read_bytes())
CHAPTERS = [entry["name"] for entry in MANIFEST["files"] if entry["name"] != vectors.SCHEMA]


# ---- what is shipped --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CHAPTERS, vectors.MANIFEST])
def test_files_are_of_the_schema(name: str) -> None:
    """Each chapter and the manifest have just the form that the schema describes."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    schema = SCHEMA if name in CHAPTERS else {"$ref": "#/$defs/manifest", "$defs": SCHEMA["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(json.loads((vectors.FOLDER / name).read_bytes()))


def test_the_folder_holds_what_the_manifest_names() -> None:
    """No file is missing and none is there besides; all together stay small."""
    files = list(vectors.FOLDER.iterdir())
    assert {path.name for path in files} == {*CHAPTERS, vectors.SCHEMA, vectors.MANIFEST}
    assert sum(path.stat().st_size for path in files) < 8_000_000
    assert sum(entry.get("vectors", 0) for entry in MANIFEST["files"]) == len(VECTORS)


def test_every_clause_is_shown_or_said_not_to_be() -> None:
    """Each clause has vectors, or the manifest says why no values of a call can show it."""
    shown = {label for vector in VECTORS for label in vector.clauses}
    reasons = MANIFEST["not_shown"]
    assert shown | set(reasons) == {clause.label for clause in CLAUSES}
    assert not shown & set(reasons)
    assert all(reason.endswith(".") for reason in reasons.values())


def test_there_are_many_of_every_kind() -> None:
    """400 vectors and more, of every dtype, each with a sentence, a name of its own and at most 900 numbers."""
    assert len(VECTORS) >= 400
    assert len({vector.name for vector in VECTORS}) == len(VECTORS)
    assert {vector.dtypes[0] for vector in VECTORS} == {"bfloat16", "float32", "float64"}
    for vector in VECTORS:
        arrays = [vector.q, vector.k, vector.v, vector.bias, vector.sinks, vector.output, vector.lse, vector.weights]
        assert sum(x.size for x in arrays if x is not None) <= 900, vector.name
        assert vector.says.endswith("."), vector.name


def test_every_flag_is_used_and_says_what_failing_means() -> None:
    """The vocabulary of flags is that of the vectors, and each flag has its sentence."""
    meanings = vectors.flags()
    assert set(meanings) == {flag for vector in VECTORS for flag in vector.flags}
    assert all("failing" in meaning and meaning.endswith(".") for meaning in meanings.values())


def test_inputs_are_exact_in_their_dtypes() -> None:
    """q, k and v do not change when they are rounded to any dtype that a vector names."""
    for vector in VECTORS:
        for dtype in vector.dtypes:
            for x in (vector.q, vector.k, vector.v):
                np.testing.assert_array_equal(rounded(x, dtype), x, err_msg=f"{vector.name} {dtype}")


# ---- what refattn makes of them ---------------------------------------------------------------------------


def inputs(vector: Vector, dtype: str = "float64") -> list[np.ndarray]:
    """q, k and v as NumPy arrays of a dtype, turned where the vector says so."""
    q, k, v = (x.astype(dtype) for x in (vector.q, vector.k, vector.v))
    if vector.rotary is not None:
        style = {name: vector.rotary[name] for name in ("style", "base", "width")}
        q, k = (refattn.rope(x, vector.rotary[f"{n}_positions"], **style) for n, x in (("q", q), ("k", k)))
    return [q, k, v]


def ratios(vector: Vector, compute: Callable[..., tuple[Any, ...]], golden: Any, dtype: str) -> list[float]:
    """Errors over their bounds: output, log-sum-exp, and the weights of rows that have a number for one."""
    output, lse, weights = compute(*inputs(vector, dtype), **vector.options())
    bounds = golden.bound(dtype), golden.lse_bound(dtype), golden.weights_bound(dtype)
    numbered = ~np.isnan(vector.lse)[..., None] & np.ones(vector.weights.shape, dtype=bool)
    return [
        error_over_bound(output, vector.output, bounds[0]),
        error_over_bound(lse, vector.lse, bounds[1]),
        error_over_bound(weights[numbered], vector.weights[numbered], bounds[2][numbered]),
    ]


def core(*arrays: Any, **options: Any) -> tuple[Any, ...]:
    """Output, log-sum-exp and weights of the specification."""
    stages = refattn.attention_stages(*arrays, **options)
    return stages.output, stages.lse, stages.weights


def test_certified_values_are_within_the_float64_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """The core keeps a quarter of its float64 bound around every certified value, and golden values do."""
    worst: dict[str, tuple[float, str]] = {}
    for vector in VECTORS:
        golden = golden_of(vector)
        found = {
            "core": max(ratios(vector, core, golden, "float64")),
            "golden": max(ratios(vector, lambda *_, g=golden, **__: (g.output, g.lse, g.weights), golden, "float64")),
        }
        worst = {who: max(worst.get(who, (0.0, "")), (ratio, vector.name)) for who, ratio in found.items()}
    with capsys.disabled():
        print("\nlargest error over the float64 bound: " + ", ".join(f"{w} {r:.3f} ({n})" for w, (r, n) in worst.items()))
    assert all(ratio <= 0.25 for ratio, _ in worst.values()), worst


def golden_of(vector: Vector) -> refattn.Golden:
    """Golden value of a vector's call; turning q and k first adds the error of that to the bound."""
    q, k, v = inputs(vector)
    if vector.rotary is None:
        return refattn.golden(q, k, v, weights=True, **vector.options())
    raise NotImplementedError


# ---- what the reader refuses ------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of all files that may be broken."""
    return Path(shutil.copytree(vectors.FOLDER, tmp_path / "vectors"))


def resealed(folder: Path, name: str, data: bytes) -> None:
    """Writes a file and makes the manifest agree, as someone would who wanted the change to go unseen."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / vectors.MANIFEST).read_bytes())
    for entry in manifest["files"]:
        if entry["name"] == name:
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / vectors.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def refused(folder: Path, *words: str) -> None:
    """Loading the folder raises VectorError, whose message has these words."""
    with pytest.raises(VectorError) as caught:
        vectors.load(folder)
    assert all(word in str(caught.value) for word in (*words, "[refattn E5]")), str(caught.value)


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_file_that_is_not_the_one_made_is_refused_by_name(folder: Path, name: str) -> None:
    """One digit changed, one byte cut off, nothing left, or no file: each is refused, naming the file."""
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole.replace(b"3f", b"3e", 1))
    refused(folder, name, "SHA-256")
    (folder / name).write_bytes(whole[:-1])
    refused(folder, name, f"{len(whole)} bytes", f"got {len(whole) - 1}")
    (folder / name).write_bytes(b"")
    refused(folder, name, "bytes")
    (folder / name).unlink()
    refused(folder, name, "readable file")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (b'"chapter"', b'"chapters"', ("chapter",)),
        (b'"format":1', b'"format":2', ("format 1",)),
        (b'"says":', b'"said":', ("vector 0", "says")),
        (b'"lse":', b'"lSe":', ("expected", "lse")),
        (b'"dtype":"bfloat16"', b'"dtype":"object"', ("bfloat16",)),
        (b'"dtype":"bfloat16"', b'"dtype":"float32"', ("numbers",)),
        (b'"bits":"', b'"bits":"zz', ("hexadecimal",)),
        (b'"shape":[', b'"shape":[-1,', ("sizes",)),
        (b'"shape":[', b'"shape":[999999999999,', ("numbers",)),
        (b'"options":{"', b'"options":{"dropout":0,"', ("dropout",)),
        (b'"vectors":[', b'"vectors":[[],', ("object",)),
        (b"}\n", b"", ("JSON",)),
    ],
)
def test_a_file_of_another_form_is_refused(folder: Path, before: bytes, after: bytes, words: tuple[str, ...]) -> None:
    """What does not have the form of the schema is refused even if the manifest agrees with it."""
    data = (folder / "S.json").read_bytes()
    assert before in data
    at = data.rindex(before) if before == b"}\n" else data.index(before)
    resealed(folder, "S.json", data[:at] + after + data[at + len(before) :])
    refused(folder, "S.json", *words)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"files": 3}', '{"files": [{"name": "../S.json", "bytes": 1, "sha256": ""}]}', "[" * 100_000],
)
def test_a_broken_manifest_is_refused(folder: Path, text: str) -> None:
    """A manifest that is no JSON, of another form, or that names a file elsewhere is refused by its name."""
    (folder / vectors.MANIFEST).write_text(text, encoding="utf-8")
    refused(folder, vectors.MANIFEST)


def test_an_unknown_kind_of_mask_or_bias_is_refused() -> None:
    """What a mask or bias is made of comes from a closed list, and nothing is looked up by a name in the file."""
    with pytest.raises(VectorError, match="window"):
        vectors.mask_of({"kind": "__import__"})
    with pytest.raises(VectorError, match="relative"):
        vectors.bias_of([{"kind": "eval"}], np.ones((1, 1)))


def test_loading_executes_nothing() -> None:
    """The reader knows JSON and no other format: none that runs code, and no call that does."""
    tree = ast.parse(Path(vectors.__file__).read_text(encoding="utf-8"))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported == {"hashlib", "json", "math", "numpy"}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__", "getattr"} - {"getattr"}
