"""The certified vectors as they are shipped: their form, their reader, and that refattn keeps its bounds on them."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import refattn
from libraries import host_cast
from refattn import CLAUSES, masks, vectors
from refattn.conformance.judge import error_over_bound
from refattn.conformance.plain import rounded
from refattn.conformance.tracked import pair_sums, turned, turning_error
from refattn.errors import VectorError
from refattn.golden_gradients import GoldenGradients
from refattn.goldens import golden_visible
from refattn.vectors import Vector

VECTORS = vectors.load()
MANIFEST = vectors.manifest()
SCHEMA = json.loads((vectors.FOLDER / vectors.SCHEMA).read_bytes())
READER = Path(__file__).parents[1] / "docs" / "vectors" / "reader.mjs"
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
    labels = {clause.label for clause in CLAUSES}
    assert shown | set(reasons) <= labels
    assert labels <= shown | set(reasons), "write a vector, or a reason into NOT_SHOWN of tests/certify/recipes"
    assert not shown & set(reasons), "take what is shown out of NOT_SHOWN of tests/certify/recipes"
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
    used = {flag for vector in VECTORS for flag in vector.flags}
    assert set(meanings) == used, (
        f"schema.json has the sentence of each flag in use: it differs in {meanings.keys() ^ used}"
    )
    assert all("failing" in meaning and meaning.endswith(".") for meaning in meanings.values())


def test_inputs_are_exact_in_their_dtypes() -> None:
    """q, k and v do not change when they are rounded to any dtype that a vector names."""
    for vector in VECTORS:
        for dtype in vector.dtypes:
            for x in (vector.q, vector.k, vector.v):
                np.testing.assert_array_equal(rounded(x, dtype), x, err_msg=f"{vector.name} {dtype}")


# ---- what refattn makes of them ---------------------------------------------------------------------------


def inputs(vector: Vector, dtype: str = "float64") -> list[Any]:
    """q, k and v as NumPy arrays of a dtype, turned where the vector says so."""
    q, k, v = (host_cast(x, dtype) for x in (vector.q, vector.k, vector.v))
    if vector.rotary is not None:
        style = {name: vector.rotary[name] for name in ("style", "base", "width")}
        q, k = (refattn.rope(x, vector.rotary[f"{n}_positions"], **style) for n, x in (("q", q), ("k", k)))
    return [q, k, v]


def golden_of(vector: Vector, dtype: str = "float64") -> refattn.Golden:
    """The golden value of a vector's call; where q and k are turned first, its bounds include the error of that."""
    plain: dict[str, Any] = {name: getattr(vector, name) for name in ("bias", "scale", "softcap", "sinks")}
    x = {"q": vector.q, "k": vector.k, "v": vector.v}
    error = {name: np.zeros(x[name].shape) for name in x}
    if (rotary := vector.rotary) is not None:
        for name in ("q", "k"):
            where = np.asarray(rotary[f"{name}_positions"], dtype=np.float64)
            where = where[..., None, :] if where.ndim > 1 else where
            style, width = rotary["style"], rotary["width"] or x[name].shape[-1]
            error[name] = turning_error(pair_sums(x[name], style, width), where, dtype)
            x[name] = turned(x[name], where, style, rotary["base"], width)
    errors = None if rotary is None else (error["q"], error["k"], error["v"])
    return golden_visible(**x, visible=vector.visible, weights=True, errors=errors, **plain)


def worst_ratio(vector: Vector, results: Any, golden: refattn.Golden, dtype: str = "float64") -> float:
    """The largest error over its bound of output, log-sum-exp and weights, but for rows that have no number for one."""
    output, lse, weights = (np.asarray(x, dtype=np.float64) for x in results)
    options: dict[str, Any] = {"dtype": dtype, "coherent": dtype != "float64"}
    numbered = ~np.isnan(vector.lse)[..., None] & np.ones(vector.weights.shape, dtype=bool)
    assert output.shape == vector.output.shape and lse.shape == vector.lse.shape, vector.name
    return max(
        error_over_bound(output, vector.output, golden.bound(**options)),
        error_over_bound(lse, vector.lse, golden.lse_bound(**options)),
        error_over_bound(weights[numbered], vector.weights[numbered], golden.weights_bound(**options)[numbered]),
    )


def core(vector: Vector, dtype: str = "float64") -> tuple[Any, ...]:
    """Output, log-sum-exp and weights of the specification itself."""
    options = vector.options(lambda host: host_cast(host, dtype) if host.dtype.kind == "f" else host)
    stages = refattn.attention_stages(*inputs(vector, dtype), **options)
    return stages.output, stages.lse, stages.weights


def test_certified_values_are_within_the_float64_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """The core and the golden value lie within a quarter of the float64 bound around every certified value."""
    worst = {"core": (0.0, ""), "golden": (0.0, "")}
    for vector in VECTORS:
        golden = golden_of(vector)
        results = {"core": core(vector), "golden": (golden.output, golden.lse, golden.weights)}
        for who, result in results.items():
            worst[who] = max(worst[who], (worst_ratio(vector, result, golden), vector.name))
    with capsys.disabled():
        said = ", ".join(f"{who} {ratio:.3f} ({name})" for who, (ratio, name) in worst.items())
        print(f"\nlargest error over the float64 bound: {said}")
    assert all(ratio <= 0.25 for ratio, _ in worst.values()), worst


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_core_keeps_the_bound_of_every_dtype(dtype: str) -> None:
    """In every dtype that holds a vector's inputs, the core is within that dtype's bound around its results."""
    judged = 0
    for vector in VECTORS:
        summands = [x for x in (vector.bias, vector.sinks) if x is not None]
        if dtype in vector.dtypes and all(np.array_equal(rounded(x, dtype), x, equal_nan=True) for x in summands):
            ratio = worst_ratio(vector, core(vector, dtype), golden_of(vector, dtype), dtype)
            assert ratio <= 1 or np.isnan(ratio), f"{vector.name}: {ratio}"
            judged += not np.isnan(ratio)
    assert judged > 300


def test_certified_gradients_are_within_the_float64_bound() -> None:
    """attention_vjp and the golden gradients lie within a quarter of the float64 bound around every certified one."""
    found = [vector for vector in VECTORS if vector.gradients]
    assert len(found) > 40
    for vector in found:
        computed = refattn.attention_vjp(vector.q, vector.k, vector.v, vector.grad_output, **vector.options())
        table = vector.bias_terms != ()
        shapes = {name: x.shape for name, x in vector.gradients.items() if not (table and name == "bias")}
        exact = GoldenGradients(golden_of(vector), np.asarray(vector.grad_output), shapes)
        bounds = exact.bounds("float64")
        for name in shapes:
            for who, values in (("core", getattr(computed, name)), ("golden", exact.values[name])):
                ratio = error_over_bound(values, vector.gradients[name], bounds[name])
                assert ratio <= 0.25, f"{vector.name}, {name}, {who}: {ratio}"
        if table:
            np.testing.assert_allclose(computed.bias, vector.gradients["bias"], rtol=0, atol=1e-14)


def test_visible_pairs_and_biases_are_what_the_options_say() -> None:
    """The plain arrays, from which other languages work, are those of refattn's lazy masks and biases."""
    for vector in VECTORS:
        stages = refattn.attention_stages(vector.q, vector.k, vector.v, **vector.options())
        np.testing.assert_array_equal(np.broadcast_to(stages.visible, vector.visible.shape), vector.visible)
        if vector.mask_data is not None:
            assert vector.mask is not None
            size = vector.q.shape[-2], vector.k.shape[-2]
            starts = {"q_start": vector.q_start or 0, "k_start": vector.k_start}
            lazy = vectors.mask_of(vector.mask_data).to_array(*size, **starts)
            shape = vector.visible.shape
            np.testing.assert_array_equal(np.broadcast_to(lazy, shape), np.broadcast_to(vector.mask, shape))
        if vector.bias is not None and vector.bias_terms:
            plain = refattn.attention_stages(vector.q, vector.k, vector.v, **vector.options() | {"bias": vector.bias})
            seen = vector.visible  # what stages hold at other pairs is not specified
            np.testing.assert_allclose(stages.biased[seen], plain.biased[seen], rtol=1e-14, err_msg=vector.name)


def test_parts_merge_to_the_whole() -> None:
    """Certified parts, merged, give the certified whole within the bound, and the core gives each part."""
    found = [vector for vector in VECTORS if vector.parts]
    assert len(found) > 20
    for vector in found:
        golden = golden_of(vector)
        merged = refattn.merge([refattn.Partial(x.output, x.lse) for x in vector.parts], sinks=vector.sinks)
        assert error_over_bound(merged.output, vector.output, golden.bound("float64")) <= 1, vector.name
        assert error_over_bound(merged.lse, vector.lse, golden.lse_bound("float64")) <= 1, vector.name
        options = vector.options()
        options.pop("sinks", None)
        for part in vector.parts:
            keys = np.zeros((1, vector.k.shape[-2]), dtype=bool)
            keys[:, part.start : part.stop] = True
            masked = options | {"mask": masks.dense(keys) & options["mask"] if "mask" in options else keys}
            output, lse = refattn.attention_with_lse(vector.q, vector.k, vector.v, **masked)
            golden = golden_of(dataclasses.replace(vector, visible=vector.visible & keys, sinks=None))
            assert error_over_bound(output, part.output, golden.bound("float64")) <= 0.25, vector.name
            assert error_over_bound(lse, part.lse, golden.lse_bound("float64")) <= 0.25, vector.name


def test_caches_give_what_attention_over_their_keys_gives() -> None:
    """Filled as a vector says, each kind of cache gives the certified output of its newest queries."""
    kinds = set()
    for vector in VECTORS:
        if vector.cache is not None:
            output = attended(vector)
            assert error_over_bound(output, vector.output, golden_of(vector).bound("float64")) <= 1, vector.name
            kinds.add(vector.cache["kind"])
    assert kinds == {"contiguous", "paged", "rolling"}


def attended(vector: Vector) -> Any:
    """attend() of a vector's queries over a cache that is filled append by append, ragged ones padded with NaN."""
    assert vector.cache is not None
    (batch, kv_heads, _, d_k), d_v = vector.k.shape, vector.v.shape[-1]
    sizes = {name: vector.cache[name] for name in ("capacity", "pages", "page_size", "window") if name in vector.cache}
    kind = {"contiguous": refattn.KVCache, "paged": refattn.PagedKVCache, "rolling": refattn.RollingKVCache}
    make: Any = kind[vector.cache["kind"]]
    cache: Any = make.allocate(np.zeros(1), batch, kv_heads, **sizes, d_k=d_k, d_v=d_v)
    filled = np.zeros(batch, dtype=int)
    for counts in vector.cache["appends"]:
        each = np.broadcast_to(counts, (batch,))
        new = [np.full((batch, kv_heads, int(each.max()), x.shape[-1]), np.nan) for x in (vector.k, vector.v)]
        for entry, count in enumerate(each):
            for x, source in zip(new, (vector.k, vector.v)):
                x[entry, :, :count] = source[entry, :, filled[entry] : filled[entry] + count]
        cache = cache.append(*new, counts=None if isinstance(counts, int) else counts)
        filled += each
    options = vector.options()
    return refattn.attend(vector.q, cache, **{name: options[name] for name in ("bias", "sinks") if name in options})


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
        (b'"vectors":[', b'"vectors":7,"x":[', ("no keys but",)),
        (b'"clauses":[', b'"clauses":[true,', ("clauses", "a list of texts")),
        (b'"dtypes":[', b'"dtypes":[[],', ("dtypes", "a list of texts")),
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


def test_a_file_without_vectors_is_refused(folder: Path) -> None:
    """Another thing in their place is refused too."""
    resealed(folder, "S.json", b'{"chapter": "S", "format": 1, "vectors": null}')
    refused(folder, "S.json", "a list of vectors", "NoneType")


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


# ---- another language -------------------------------------------------------------------------------------


@pytest.fixture
def node() -> str:
    """The command of Node.js."""
    command = shutil.which("node")
    if command is None:
        pytest.skip("the JavaScript reader needs Node.js, the command `node`")
    return command


def read_by_javascript(node: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What docs/vectors/reader.mjs says of all files of a folder."""
    files = [str(path) for path in sorted(folder.iterdir())]
    return subprocess.run(
        [node, str(READER), *files], capture_output=True, text=True, check=False, encoding="utf-8", timeout=60
    )


def test_the_reader_in_javascript_agrees(node: str) -> None:
    """A reader in another language, from the plain arrays alone, computes every certified value."""
    done = read_by_javascript(node, vectors.FOLDER)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = [
        re.fullmatch(r"(\w+\.json): (\d+) vectors, (\d+) values, largest error (\S+)", line)
        for line in done.stdout.splitlines()
    ]
    assert {line[1] for line in lines if line} == set(CHAPTERS)
    assert sum(int(line[2]) for line in lines if line) == len(VECTORS)
    assert sum(int(line[3]) for line in lines if line) == sum(
        x.size for vector in VECTORS for x in (vector.output, vector.lse, vector.weights, *vector.gradients.values())
    )
    assert all(float(line[4]) < 1e-13 for line in lines if line)


def test_the_reader_in_javascript_notices(node: str, folder: Path) -> None:
    """One wrong digit in an expected value, and it names the vector and exits with 1."""
    data = json.loads((folder / "G.json").read_bytes())
    output = data["vectors"][3]["expected"]["output"]
    output["bits"] = output["bits"][:4] + ("0" if output["bits"][4] != "0" else "1") + output["bits"][5:]
    (folder / "G.json").write_text(json.dumps(data), encoding="utf-8")
    done = read_by_javascript(node, folder)
    assert done.returncode == 1
    assert f"{data['vectors'][3]['name']}: output 0 is" in done.stdout


def test_the_page_lists_the_flags() -> None:
    """The page for other languages has every flag with its sentence."""
    page = (READER.parent / "README.md").read_text(encoding="utf-8")
    for flag, meaning in vectors.flags().items():
        row = f"| `{flag}` | {meaning} |"
        assert row in page, f"add to docs/vectors/README.md: {row}"
