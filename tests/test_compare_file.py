"""`refattn compare FILE`: tensors dumped from anywhere, in the layouts, dtypes and bases that programs have."""

from __future__ import annotations

import io
import json
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn
from refattn import cli
from refattn.arrays import Array
from refattn.conformance.captured import check_group, read_groups
from refattn.conformance.case import Problem
from refattn.conformance.exchange.bits import Tensor, tensor_of
from refattn.conformance.exchange.files import TensorFileError
from refattn.conformance.judge import golden_of
from refattn.conformance.plain import rounded

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def call(dtype: Any = np.float32, seed: int = 0, **options: Any) -> dict[str, Array]:
    """q of three tokens, k and v of five, in two heads over one, with refattn's own output and log-sum-exp."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (2, 2, 3, 8), "k": (2, 1, 5, 8), "v": (2, 1, 5, 4)}
    tensors = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    output, lse = refattn.attention_with_lse(*tensors.values(), **options)
    return tensors | {"output": output, "lse": lse}


def saved(path: Path, tensors: dict[str, Any]) -> Path:
    """The tensors in a file of the kind that its name says."""
    arrays: dict[str, Any] = {name: np.asarray(x) for name, x in tensors.items()}
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        safetensors.numpy.save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, path)
    return path


def compare(path: Path, *arguments: str) -> int:
    return cli.main(["compare", str(path), *arguments])


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_right_dumps_conform(kind: str, dtype: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What refattn computes conforms in both kinds of file; .npz files lose bfloat16, which --dtype brings back."""
    path = saved(tmp_path / f"dump.{kind}", call(dtype, causal=True, q_start=2))
    lost = dtype is ml_dtypes.bfloat16 and kind == "npz"
    if lost:
        assert compare(path, "--causal", "--q-start", "2") == 2
        assert "NumPy files lose bfloat16, so name it with --dtype" in capsys.readouterr().err
    assert compare(path, "--causal", "--q-start", "2", *(("--dtype", "bfloat16") if lost else ())) == 0
    assert "conforms (1 pass)" in " ".join(capsys.readouterr().out.split())


def test_bfloat16_in_other_clothes(tmp_path: Path) -> None:
    """Bit patterns in uint16, numbers widened to float32, and an entry dtype, all mean bfloat16."""
    tensors = call(ml_dtypes.bfloat16)
    bits = {name: x.view(np.uint16) if name != "lse" else x for name, x in tensors.items()}
    wide = {name: x.astype(np.float32) for name, x in tensors.items()}
    assert compare(saved(tmp_path / "bits.npz", bits), "--dtype", "bfloat16") == 0
    assert compare(saved(tmp_path / "wide.npz", wide), "--dtype", "bfloat16") == 0
    assert compare(saved(tmp_path / "entry.npz", wide | {"dtype": "bfloat16"})) == 0
    # Judged as what they seem to be, results of 8 bits are far off.
    assert compare(saved(tmp_path / "claimed.npz", wide)) == 1


def test_a_result_in_a_wider_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output that bfloat16 cannot hold was not returned in it (A4); inputs that it cannot hold are refused."""
    tensors = call(ml_dtypes.bfloat16)
    wide = {name: x.astype(np.float32) for name, x in tensors.items()}
    wide["output"] = wide["output"] * np.float32(1.0001)
    assert compare(saved(tmp_path / "wide.npz", wide), "--dtype", "bfloat16") == 1
    assert "the output has dtype float32, expected that of q, bfloat16 [A4]" in capsys.readouterr().out
    assert compare(saved(tmp_path / "other.npz", call()), "--dtype", "bfloat16") == 2
    assert "q is float32 and holds what is no number of bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_eight_bits(dtype: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs of 8 bits are read from their patterns, and the output is judged in its own dtype (A4)."""
    tensors = call(dtype)
    assert compare(saved(tmp_path / "dump.safetensors", tensors), "--json", "-") == 0
    (record,) = json.loads(capsys.readouterr().out)["records"]
    assert record["dtype"] == "float32"
    assert dtype.__name__ in record["notes"][0]
    low = tensors | {"output": tensors["output"].astype(ml_dtypes.bfloat16)}
    assert compare(saved(tmp_path / "low.safetensors", low)) == 0


@pytest.mark.parametrize("dtype", [E4M3, E5M2, ml_dtypes.bfloat16])
def test_all_bit_patterns(dtype: Any) -> None:
    """Every pattern means the number that ml_dtypes says, and comes back from it."""
    patterns = np.arange(2 ** (8 * np.dtype(dtype).itemsize)).astype(f"u{np.dtype(dtype).itemsize}")
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = patterns.view(dtype).astype(np.float64)
    name = np.dtype(dtype).name
    np.testing.assert_array_equal(Tensor(patterns, name).values(), expected)
    if name == "bfloat16":
        back = tensor_of(expected, name).values()
        np.testing.assert_array_equal(back, expected)
        np.testing.assert_array_equal(rounded(expected, name), expected)


def test_layouts_and_bases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens before heads, also in the log-sum-exp, and its base 2, are read as the options say."""
    tensors = call()
    turned = {name: x.swapaxes(1, 2) for name, x in tensors.items()}
    turned["lse"] = turned["lse"] / np.float32(np.log(2))
    path = saved(tmp_path / "dump.npz", turned)
    assert compare(path, "--layout", "BSHD", "--lse-layout", "BSH", "--lse-base", "2") == 0
    capsys.readouterr()
    assert compare(path, "--layout", "BSHD", "--lse-layout", "BSH") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "the log-sum-exp is in base 2" in out
    assert "P4: Log-sum-exp" in out
    assert compare(path) == 2
    flat = saved(tmp_path / "flat.npz", {name: x[0, 0] for name, x in tensors.items()})
    assert compare(flat) == 0
    assert compare(flat, "--layout", "BSHD") == 2
    assert "lacks the axes of tokens and heads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "lse", "code"), [(0.0, 0.0, 0), (0.0, 1.8, 0), (0.0, 2.2, 1), (1.5, 0.0, 1), (1.5, 1.8, 1)]
)
def test_base_2_widens_the_bound_of_the_log_sum_exp_alone(output: float, lse: float, code: int, tmp_path: Path) -> None:
    """A log-sum-exp in base 2 may be twice its bound off, which excuses no output that is beyond its own."""
    tensors = call()
    q, k, v = (tensors[name].astype(np.float64) for name in "qkv")
    golden = golden_of(Problem(q=q, k=k, v=v, dtype="float32"))
    tensors["output"] = (golden.output + output * golden.bound("float32", "fused")).astype(np.float32)
    tensors["lse"] = (golden.lse + lse * golden.lse_bound("float32", "fused")) / np.log(2)
    assert compare(saved(tmp_path / "dump.npz", tensors), "--lse-base", "2") == code


@pytest.mark.parametrize(
    ("made", "asked", "words"),
    [
        ({"causal": True, "q_start": 0}, ("--causal", "--q-start", "2"), "causal aligned top-left, q_start=0 instead"),
        ({"scale": 1.0}, (), 'matches "no scale" [S1]'),
        ({}, ("--scale", "0.5"), 'matches "scale is ignored" [S2]'),
        ({}, ("--softcap", "1.0"), 'matches "cap is ignored" [S3]'),
    ],
)
def test_wrong_dumps_are_explained(
    made: dict[str, Any], asked: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result that follows another reading of the options says which."""
    assert compare(saved(tmp_path / "dump.npz", call(**made)), *asked) == 1
    assert words in " ".join(capsys.readouterr().out.split())


def test_reports_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--html draws a wrong dump, and --junit counts it, in the dtype that an alias names."""
    tensors = call(ml_dtypes.bfloat16, causal=True, q_start=2)
    tensors["output"] = tensors["output"][..., ::-1]
    tensors = {name: np.asarray(x).astype(np.float32) for name, x in tensors.items() if name != "lse"}
    path = saved(tmp_path / "dump.npz", tensors)
    page, suite = tmp_path / "page.html", tmp_path / "suite.xml"
    options = ("--causal", "--q-start", "2", "--dtype", "bf16", "--html", str(page), "--junit", str(suite))
    assert compare(path, *options) == 1
    assert "columns in another order" in page.read_text()
    assert "<svg" in page.read_text()
    assert 'failures="1"' in suite.read_text()
    assert compare(path, "--html", str(tmp_path)) == 2


def test_a_causal_rule_that_was_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong dump of a causal kernel gets the hint at --causal where that is left out, and a full one does not."""
    for causal in (True, False):
        tensors = call(scale=0.1, causal=causal, **({"q_start": 0} if causal else {}))
        del tensors["lse"]
        assert compare(saved(tmp_path / "dump.npz", tensors)) == 1
        assert ("if that was meant, add --causal" in " ".join(capsys.readouterr().out.split())) is causal


def test_options_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several problems with options of their own are judged one by one; an option said twice is refused."""
    mask = np.random.default_rng(1).random((3, 5)) > 0.4
    plain, masked = call(), call(seed=1, mask=mask, scale=0.25) | {"mask": mask, "scale": np.float32(0.25)}
    wrong = plain | {"output": -plain["output"]}
    named = {"a": plain, "b.c": masked, "d": wrong}
    tensors = {f"{name}.{part}": x for name, parts in named.items() for part, x in parts.items()}
    path = saved(tmp_path / "dump.npz", tensors)
    assert compare(path, "--json", "-") == 1
    records = json.loads(capsys.readouterr().out)["records"]
    assert [(record["case"], record["verdict"]) for record in records] == [
        ("a", "pass"),
        ("b.c", "pass"),
        ("d", "fail"),
    ]
    assert compare(path, "--scale", "0.5") == 2
    assert "b.c.scale is in the file, and was given beside it" in capsys.readouterr().err


def test_the_model_is_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result with a rounded product is wrong as fused, right as tf32; a model that there is none of lists them."""
    tensors = call()
    q, k = (np.round(tensors[name] * 2**9) / 2**9 for name in ("q", "k"))
    tensors["output"] = refattn.attention(q.astype("f4"), k.astype("f4"), tensors["v"])
    del tensors["lse"]
    path = saved(tmp_path / "dump.npz", tensors)
    assert compare(path) == 1
    assert compare(path, "--model", "tf32") == 0
    assert compare(path, "--model", "magic") == 2
    assert "no model 'magic'; there are fused" in capsys.readouterr().err
    assert compare(path, "--dtype", "int8") == 2
    assert compare(path, "--case", "x") == 2


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_damaged_files(suffix: str, tmp_path: Path) -> None:
    """Bytes that are turned, cut out or cut off give the tensors of some file, or one sentence, and nothing else."""
    rng, path = np.random.default_rng(0), saved(tmp_path / f"dump{suffix}", call())
    whole, sentences = path.read_bytes(), []
    for _ in range(300):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), rng.integers(1, 4)):
            place = int(place % rng.choice([64, 400, len(data)]))
            kind = rng.integers(4)
            if kind == 0:
                data[place] ^= 1 << int(rng.integers(8))
            elif kind == 1:
                data[place : place + 8] = rng.bytes(8)
            elif kind == 2:
                del data[place : place + 8]
            else:
                data[place : place + 8] = b"\xff" * 8
        path.write_bytes(data)
        try:
            for group in read_groups(path):
                check_group(group)
        except TensorFileError as fault:
            sentences.append(str(fault))
    assert len(sentences) > 100
    assert all("\n" not in sentence and len(sentence) < 1000 for sentence in sentences)


def test_files_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bombs, lies, pickles, damage and what does not fit give one sentence and exit code 2."""
    tensors = call()

    def refusal(path: Path, *arguments: str) -> str:
        assert compare(path, *arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err

    def archive(name: str, **members: bytes) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as file:
            for member, data in members.items():
                file.writestr(f"{member}.npy", data)
        return tmp_path / name

    def npy(shape: str, data: bytes = b"", descr: str = "'<f4'") -> bytes:
        header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data

    assert "expected 1,000 at most" in refusal(archive("bomb.npz", q=bytes(10**6)), "--largest", "1000")
    lies = archive("lies.npz", q=npy("(1000000, 1000000)", bytes(8)))
    assert "has 8 of 4,000,000,000,000 bytes" in refusal(lies)
    assert "cannot be read" in refusal(archive("negative.npz", q=npy("(-2, -1)", bytes(8))))
    assert "cannot be read" in refusal(archive("call.npz", q=npy("exit(3)")))
    assert "pickled objects, which are never loaded" in refusal(archive("o.npz", q=npy("(1,)", b"cos\nx", "'|O'")))
    assert "cannot be read" in refusal(archive("junk.npz", q=b"junk"))
    assert "has a header that is none" in refusal(archive("open.npz", q=npy("(1,")))
    assert "is no name" in refusal(archive("names.npz", **{"\x1b[2J\n.q": npy("()", bytes(4))}))
    with zipfile.ZipFile(tmp_path / "other.npz", "w", zipfile.ZIP_BZIP2) as file:  # 2 kB may come to 2 GB
        file.writestr("q.npy", npy("(10000,)", bytes(40_000)))
    assert "'q' is compressed as NumPy does not" in refusal(tmp_path / "other.npz")
    assert "dtype complex64, expected one of" in refusal(saved(tmp_path / "c.npz", {"q": np.ones(1, "c8")}))
    whole = saved(tmp_path / "whole.npz", tensors).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    assert "is not an .npz file" in refusal(tmp_path / "cut.npz")
    damaged = bytearray(whole)
    damaged[200] ^= 255
    (tmp_path / "damaged.npz").write_bytes(damaged)
    assert "cannot be read" in refusal(tmp_path / "damaged.npz")
    whole = saved(tmp_path / "whole.safetensors", tensors).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-3])
    assert "cut.safetensors cannot be read" in refusal(tmp_path / "cut.safetensors")
    assert "at most" in refusal(tmp_path / "whole.safetensors", "--largest", "100")
    assert "lacks output" in refusal(saved(tmp_path / "q.npz", {n: x for n, x in tensors.items() if n in "qkv"}))
    assert "lacks v" in refusal(saved(tmp_path / "v.npz", {n: x for n, x in tensors.items() if n in "qk"}))
    assert "'score' is no known tensor" in refusal(saved(tmp_path / "score.npz", tensors | {"score": np.ones(1)}))
    assert "expected q (..., H, Lq, d_k)" in refusal(saved(tmp_path / "k.npz", tensors | {"k": np.ones((2, 2), "f4")}))
    turned = {"q": np.ones((3, 2, 8), "f4"), "k": np.ones((7, 2, 8), "f4"), "v": np.ones((7, 2, 8), "f4")}
    assert "--layout BSHD" in refusal(saved(tmp_path / "turned.npz", turned | {"output": turned["q"]}))
    assert "M5" in refusal(tmp_path / "whole.npz", "--causal")
    assert "there is no file" in refusal(tmp_path / "none.npz")


@settings(max_examples=40)
@given(data=st.binary(max_size=300), cut=st.integers(0, 2000), at=st.integers(0, 2000))
def test_no_bytes_are_a_traceback(data: bytes, cut: int, at: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever bytes stand in a file, the answer is a verdict or one sentence, never a traceback."""
    folder = tmp_path_factory.mktemp("bytes")
    for name in ("x.npz", "x.safetensors"):
        arrays: Any = {part: np.zeros((2, 2), "f4") for part in ("q", "k", "v", "output")}
        file = io.BytesIO()
        if name == "x.npz":
            np.savez(file, **arrays)
        else:
            file.write(safetensors.numpy.save(arrays))
        whole = file.getvalue()
        (folder / name).write_bytes((whole[:at] + data + whole[at + len(data) :])[: len(whole) - cut % len(whole)])
        assert compare(folder / name) in (0, 1, 2)


def test_safetensors_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the library its files are refused in a sentence that says what to install."""
    path = saved(tmp_path / "dump.safetensors", call())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert compare(path) == 2
    assert "needs the library safetensors: pip install 'refattn[compare]'" in capsys.readouterr().err
    assert cli.main(["cases", "export", str(tmp_path / "x"), "--format", "safetensors", "--limit", "1"]) == 2
    assert "pip install 'refattn[compare]'" in capsys.readouterr().err


def test_check_reads_the_same_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`refattn check --inputs` takes .safetensors files too, with bfloat16, and leaves results aside."""
    path = saved(tmp_path / "dump.safetensors", call(ml_dtypes.bfloat16))
    assert cli.main(["check", "numpy", "--inputs", str(path), "--only-inputs"]) == 0
    assert "inputs.dump: pass (bfloat16)" in capsys.readouterr().out
