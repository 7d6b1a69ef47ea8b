"""Calling conventions: the files that ship, files of a user's own, and what is refused of them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn
from refattn import cli, masks
from refattn.conformance.cases import all_cases
from refattn.conformance.conventions import ConventionError, convention_names, find_convention, read_convention
from refattn.conformance.conventions.convention import (
    ARGUMENTS,
    Alibi,
    Bias,
    Causal,
    Convention,
    Lengths,
    Lse,
    Mask,
    Names,
    Packed,
    Window,
)
from refattn.conformance.conventions.express import Lacking, Parts, express
from refattn.conformance.plain import positions
from refattn.conformance.records import BROKEN, Report
from refattn.conformance.runner import chosen_pairs, run_suite
from refattn.conformance.targets import TargetError, find_target
from refattn.conformance.targets.convention import ConventionTarget

# Everything that a file can say and that no shipped one does.
OWN = """\
says = "tokens, batch, heads, width; hidden pairs; a window that counts the query; a buffer for the output"
layout = "SBHD"
output_layout = "BSHD"
aligns = "q_start"
positional = ["plan", "q", "k", "v", "softcap"]
fixed = { plan = "none", version = 2 }
off = { softcap = 0.0, window = "none" }
grouped = true

[names]
scale = "temperature"
softcap = "cap"
sinks = "sink_logits"
q_start = "offset"
output = "out"

[causal]
name = "mode"
value = "causal"
with_mask = true

[mask]
name = "key_padding"
means = "hidden"
axes = "BK"

[window]
size = "sliding"

[lengths]
name = "seq_lens"

[lse]
axes = "BSH"
position = 0
base = "2"
"""

LAYOUTS = "'BHSD', 'BSHD', 'SBHD', 'HSD', 'SHD' or 'THD'"
MEANS = "'visible', 'hidden' or 'added'"


def own(
    plan: Any,
    q: Any,
    k: Any,
    v: Any,
    cap: float,
    /,
    *,
    extra: int = 0,
    base: float = 2.0,
    read: bool = True,
    **rest: Any,
) -> Any:
    """A function of that convention, on refattn; or a wider window, another base, the mask read the other way."""
    assert plan is None and rest.pop("version") == 2 and cap >= 0
    q, k, v = (np.moveaxis(x, 0, -2) for x in (q, k, v))
    chosen: list[Any] = []
    causal, size, out = rest.pop("mode", "") == "causal", rest.pop("sliding"), rest.pop("out")
    if size is not None:
        chosen.append(masks.window(size - 1 + extra, None))
    if (hidden := rest.pop("key_padding", None)) is not None:
        chosen.append(masks.padding(~hidden if read else hidden))
    if (counts := rest.pop("seq_lens", None)) is not None:
        chosen.append(masks.lengths(counts))
    mask = None
    for one in chosen:
        mask = one if mask is None else mask & one
    options = {"scale": rest.pop("temperature", None), "sinks": rest.pop("sink_logits", None)}
    q_start = rest.pop("offset", None)
    assert not rest, rest
    output, lse = refattn.attention_with_lse(
        q, k, v, causal=causal, mask=mask, softcap=cap or None, q_start=q_start, **options
    )
    out[...] = np.swapaxes(output, -2, -3)
    return (np.swapaxes(lse, -1, -2) / math.log(base),)


def judged(target: ConventionTarget, *names: str, dtypes: tuple[str, ...] = ("float32", "float16")) -> Report:
    """The report on the cases of those chapters, or of those names."""
    cases = [case for case in all_cases() if case.build and case.name.startswith(names)]
    return run_suite(target, chosen_pairs(cases, None, dtypes), 20)


def broken(report: Report) -> set[str]:
    """The names of the cases that speak against a target."""
    return {record.case for record in report.records if record.verdict in BROKEN}


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """The file of that convention."""
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


def test_a_convention_of_ones_own(own_file: Path) -> None:
    """Layouts, a buffer, positional options, hidden pairs, lengths, starts and base 2: all is said right."""
    target = ConventionTarget("own", read_convention(own_file), function=own)
    report = judged(target, "scores.", "masks.", "masks_by_index.", "softmax.", "heads.", "arrays.")
    assert report.conforms, report.broken[0]
    verdicts = {(record.case, record.dtype): record for record in report.records}
    for name in ("masks.window_of_three_keys", "masks.window_over_a_cache", "masks_by_index.padding_and_causal"):
        assert verdicts[name, "float32"].verdict == "pass", verdicts[name, "float32"].message
    for name in ("masks.aligned_top_left", "masks.aligned_bottom_right", "masks_by_index.lengths", "softmax.sinks"):
        assert verdicts[name, "float16"].verdict == "pass", verdicts[name, "float16"].message
    assert verdicts["masks.window_both_ways", "float32"].missing == ("mask",)
    assert verdicts["masks.starts_per_batch_entry", "float32"].verdict == "unsupported"


@pytest.mark.parametrize(
    ("wrong", "cases"),
    [
        ({"extra": 1}, {"masks.window_of_three_keys", "masks.window_over_a_cache"}),
        ({"base": math.e}, {"softmax.causal_log_sum_exp", "masks.causal"}),
        ({"read": False}, {"masks_by_index.right_padding"}),
    ],
)
def test_a_departure_from_ones_own(wrong: dict[str, Any], cases: set[str], own_file: Path) -> None:
    """A function that counts, measures or reads otherwise than its file says fails."""

    def function(*args: Any, **options: Any) -> Any:
        return own(*args, **options, **wrong)

    target = ConventionTarget("own", read_convention(own_file), function=function)
    assert cases <= broken(judged(target, *cases))


def test_another_layout_fails(own_file: Path) -> None:
    """Heads where tokens should be: wrong numbers where their counts agree, a shape that is named where not."""
    own_file.write_text(OWN.replace('output = "out"\n', ""))

    def function(*args: Any, **options: Any) -> Any:
        q = args[1]
        out = np.empty((q.shape[1], q.shape[0], q.shape[2], args[3].shape[-1]), q.dtype)
        (lse,) = own(*args, **options, out=out)
        return np.swapaxes(out, 1, 2), lse

    text = own_file.read_text().replace("position = 0", "position = 1")
    own_file.write_text(text)
    report = judged(ConventionTarget("own", read_convention(own_file), function=function), "masks.causal")
    shape = next(record for record in report.records if record.case == "masks.causal")
    assert shape.verdict == "fail"
    assert shape.message == "the output has shape (2, 2, 6, 8), expected (2, 6, 2, 8), which is BSHD"
    assert shape.about == "A1"


@pytest.mark.library("torch")
def test_torch_and_triton() -> None:
    """The library's own function is called right by the file torch, and five positional arguments by triton."""
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention
    chapters = ("masks.", "masks_by_index.", "heads.", "biases.", "scores.worked")
    report = judged(ConventionTarget("sdpa", find_convention("torch"), function=sdpa), *chapters)
    assert report.conforms and report.counts["pass"] > 80, (report.counts, report.broken[:1])

    def upside_down(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False) -> Any:
        return sdpa(query, key, value, attn_mask=None if attn_mask is None else ~attn_mask, is_causal=is_causal)

    target = ConventionTarget("upside_down", find_convention("torch"), function=upside_down)
    assert "scale" not in (target.features or ()) and "enable_gqa" in target.notes[0]
    assert "masks.true_means_visible" in broken(judged(target, "masks.true_means_visible"))

    def tutorial(q: Any, k: Any, v: Any, causal: bool, sm_scale: float) -> Any:
        return sdpa(q, k, v, is_causal=causal, scale=sm_scale)

    triton = find_convention("triton")
    report = judged(ConventionTarget("tutorial", triton, function=tutorial), "masks.causal", "scores.", "masks.aligned")
    assert broken(report) <= {"scores.zero_scale"}  # of which torch's own CPU kernel makes NaN
    assert report.counts["pass"] >= 10
    swapped = ConventionTarget(
        "swapped", triton, function=lambda q, k, v, scale, causal: tutorial(q, k, v, bool(causal), scale)
    )
    assert "scores.worked_example" in broken(judged(swapped, "scores.worked_example"))


@pytest.mark.library("jax")
def test_jax() -> None:
    """The library's own function is called right by the file jax: windows, lengths, mask beside causal."""
    import jax

    names = ("masks.window_both_ways", "masks_by_index.lengths", "softmax.causal_log_sum_exp", "biases.alibi_over")
    target = ConventionTarget("jax", find_convention("jax"), function=jax.nn.dot_product_attention)
    report = judged(target, *names, dtypes=("float32",))
    assert report.conforms and report.counts["pass"] >= len(names), (report.counts, report.broken[:1])

    def exclusive(*args: Any, local_window_size: Any = None, **options: Any) -> Any:
        sides = local_window_size and tuple(max(side - 1, 0) for side in local_window_size)
        return jax.nn.dot_product_attention(*args, local_window_size=sides, **options)

    target = ConventionTarget("exclusive", find_convention("jax"), function=exclusive)
    assert "masks.window_both_ways" in broken(judged(target, "masks.window_both_ways", dtypes=("float32",)))


def test_parameters_repeat_the_mask() -> None:
    """Where a problem names its window, counts or slopes, these are its mask and bias, whichever way it is told."""
    told = 0
    for case in all_cases():
        problem = case.problem(case.dtypes[0], 20) if case.build else None
        if problem is None or (problem.window is None and problem.counts is None and problem.slopes is None):
            continue
        told += 1
        q_len, k_len = problem.q.shape[-2], problem.k.shape[-2]
        query, key = positions(q_len, k_len, 0 if problem.q_start is None else problem.q_start, problem.k_start)
        if problem.window is not None or problem.counts is not None:
            left, right = problem.window or (None, None)
            seen = np.ones((1, 1), dtype=bool)
            seen = seen if left is None else seen & (key >= query - left)
            seen = seen if right is None else seen & (key <= query + right)
            if problem.counts is not None:
                seen = seen & (np.arange(k_len) < np.asarray(problem.counts)[..., None, None, None])
            assert problem.shown is not None
            assert np.all(seen == problem.shown), case.name
        if problem.slopes is not None:
            assert problem.bias is not None
            assert np.all(problem.bias == -problem.slopes[:, None, None] * np.abs(query - key)), case.name
    assert told >= 20


@pytest.mark.parametrize("name", convention_names())
def test_what_ships_is_sound(name: str) -> None:
    """Each shipped file is read, and passes nothing under a name that stands for two things."""
    convention = find_convention(name)
    assert convention.name == name and convention.says
    apart = [one for argument in ARGUMENTS if argument != "bias" for one in convention.parameters(argument)]
    assert len(apart) == len(set(apart))


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    """The file that the README shows is one."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(readme.partition("```toml\n")[2].partition("```")[0])
    assert read_convention(path).window == Window(pair="window_size", unbounded=-1)


def test_probes_speak_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`refattn probe --convention` calls a function of another layout, and finds what it does to heads."""
    (tmp_path / "turned.py").write_text(
        "import numpy as np, refattn\n"
        "def attend(q, k, v):\n"
        "    q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))\n"
        "    heads = np.arange(q.shape[1]) % k.shape[1]\n"
        "    return np.swapaxes(refattn.attention(q, k[:, heads], v[:, heads]), 1, 2)\n"
    )
    (tmp_path / "turned.toml").write_text('says = "tokens first"\nlayout = "BSHD"\n')
    options = ("--convention", str(tmp_path / "turned.toml"), "--json", "-")
    assert cli.main(["probe", f"{tmp_path / 'turned.py'}:attend", *options]) == 0
    found = {one["name"]: one["found"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["head mapping"] == "h % Hkv"


def test_the_page_names_every_key() -> None:
    """docs/conventions.md shows the example of the README, and has each key of each table, and no other."""
    root = Path(__file__).parents[1]
    page, readme = ((root / name).read_text(encoding="utf-8") for name in ("docs/conventions.md", "README.md"))
    example = readme.partition("```toml\n")[2].partition("```")[0]
    assert f"```toml\n{example}```" in page
    keys = set(re.findall(r"`([a-z_]+)`", "".join(line for line in page.splitlines() if line.startswith("|"))))
    tables = (Names, Causal, Mask, Bias, Window, Lengths, Packed, Alibi, Lse)
    assert keys == {one.name for table in (Convention, *tables) for one in fields(table)}


def test_what_has_no_words_is_lacking() -> None:
    """Where a convention has no words for a mask or an open window, it lacks them or says them by a mask."""
    problems = {case.name: case.problem("float16", 20) for case in all_cases() if case.build and "masks" in case.name}
    with pytest.raises(Lacking, match="cannot express mask"):
        express(find_convention("flash-attn"), Parts.of(problems["masks_by_index.padding_with_holes"]))
    said = express(find_convention("flash-attn"), Parts.of(problems["masks.window_unbounded_left"]))
    assert said == {"window_size": (-1, 1)}
    said = express(find_convention("jax"), Parts.of(problems["masks.window_unbounded_left"]))
    assert list(said) == ["mask"]
    said = express(find_convention("flashinfer"), Parts.of(problems["masks.window_of_three_keys"]))
    assert said == {"kv_layout": "NHD", "causal": True, "window_left": 2}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('layout = "SBHD"', 'layout = "SHBD"', f"layout: expected {LAYOUTS}, got a string, 'SHBD'"),
        ('layout = "SBHD"\n', "", f"layout: expected {LAYOUTS}, got nothing"),
        ("grouped = true", "grouped = 1", "grouped: expected true or false, got an integer, 1"),
        ("grouped = true", "grupped = true", "got this key; did you mean grouped?"),
        ('cap = "cap"', "cap = 3", "names.softcap: expected a string, got an integer, 3"),
        ('sinks = "sink', 'sink = "sink', "names.sink: expected one of q, k, v, scale"),
        ('means = "hidden"', 'means = "masked"', f"mask.means: expected {MEANS}, got a string, 'masked'"),
        ('means = "hidden"\n', "", f"mask.means: expected {MEANS}, got nothing"),
        ('base = "2"', "base = 2", "lse.base: expected 'e' or '2', got an integer, 2"),
        ('base = "2"', "base = 2 2", "expected TOML, got an error:"),
        ('aligns = "q_start"\n', "", "because there is a table causal, got nothing"),
        ('q_start = "offset"\n', "", "names.q_start: expected the name of a parameter, because"),
        ('size = "sliding"', 'size = "sliding"\nleft = "l"', "window: expected exactly one of pair, left"),
        ('[lengths]\nname = "seq_lens"', 'lengths = "x"', "lengths: expected a table, got a string, 'x'"),
        ("softcap = 0.0, ", "", "off.softcap: expected what to pass where a case does not use it"),
        ('"softcap"]', '"bias"]', "or keys of fixed, not 'bias', got ["),
        ('axes = "BSH"', 'axes = "HT"', "lse.axes: expected axes that go with the layout SBHD, got a string, 'HT'"),
        ("off = {", "off = { bias = 1, ", "off: expected options that the convention has, not 'bias', got {"),
        ('layout = "SBHD"', 'layout = "THD"', "packed: expected a table if the layout is THD"),
        ("grouped = true", 'dtypes = ["float8"]', "dtypes: expected bfloat16"),
        ("grouped = true", "grouped = " + "1" * 5000, "expected TOML, got an error: Exceeds the limit"),
        ("grouped = true", "grouped = " + "[" * 10_000, "expected TOML, got an error: maximum recursion depth"),
    ],
)  # fmt: skip
def test_malformed_files_are_refused(old: str, new: str, words: str, own_file: Path) -> None:
    """One sentence names the file, the key, what was expected and what came."""
    assert old in OWN
    text = OWN.replace(old, new, 1)
    if new.startswith("lengths"):  # a key of the top may not follow a table
        text = f"{new}\n{OWN.replace(old, '')}"
    own_file.write_text(text)
    with pytest.raises(ConventionError) as refusal:
        read_convention(own_file)
    message = str(refusal.value)
    assert message.startswith(f"{own_file}: ") and words in message and "\n" not in message, message


def test_from_the_command_line(own_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--convention takes a name or a file; both are listed by --help, and what is wrong is said with exit code 2."""
    kernel = tmp_path / "kernel_by_own.py"
    kernel.write_text("from test_conventions import own\n")
    arguments = [f"{kernel}:own", "--convention", str(own_file), "--clauses", "M4,M10", "--quick"]
    assert cli.main(["check", *arguments]) == 0
    assert "conforms" in capsys.readouterr().out
    assert cli.main(["check", "--help"]) == 0
    shown = capsys.readouterr().out.replace("\n", "").replace(" ", "")
    assert all(name in shown for name in convention_names())
    for words, given in (
        ("no convention 'flash-atn'; did you mean flash-attn?", [f"{kernel}:own", "--convention", "flash-atn"]),
        ("a convention is for a function of your own", ["numpy", "--convention", "torch"]),
        ("missing.toml: expected a TOML file", [f"{kernel}:own", "--convention", "missing.toml"]),
    ):
        assert cli.main(["check", *given]) == 2
        assert words in capsys.readouterr().err


def test_signatures_are_held_against_the_file(own_file: Path) -> None:
    """A parameter that calls need is missed at once, and an option that the signature lacks is unsupported."""

    def few(plan: Any, q: Any, k: Any, v: Any, cap: float, *, version: int, out: Any, offset: Any = None) -> Any:
        return own(plan, q, k, v, cap, version=version, out=out, offset=offset, sliding=None)

    target = ConventionTarget("few", read_convention(own_file), function=few)
    assert target.features == frozenset({"softcap", "q_start", "k_start", "gqa", "lse"})
    assert "mode, key_padding, sliding, seq_lens, temperature, sink_logits" in target.notes[0]
    assert judged(target, "scores.softcap", "scores.worked").conforms

    def without_a_buffer(plan: Any, q: Any, k: Any, v: Any, cap: float, *, version: int) -> Any:
        raise AssertionError("never called")

    with pytest.raises(TargetError, match="no parameter 'out', which the convention own needs"):
        ConventionTarget("without", read_convention(own_file), function=without_a_buffer)
    with pytest.raises(TargetError, match="a convention is for a function"):
        find_target("torch", convention="torch")
