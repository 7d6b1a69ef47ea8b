"""Pictures as SVG: each cell is what the matrix says, of the worst head, cut to a readable size, with words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import refattn
from refattn import cli, masks
from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.judge import Result, golden_of
from refattn.conformance.records import Pictured
from refattn.conformance.reports.heatmap import Axis, Kind, heatmap, shrunk
from refattn.conformance.reports.pictures import AROUND_ZERO, MOST, Picture, colours_for, pictures_of
from refattn.testing import mask_svg, weights_svg

SVG = "{http://www.w3.org/2000/svg}"


def cells_of(svg: str) -> dict[tuple[int, int], str]:
    """(row, column) -> the class of the cell there, read back from the rectangles."""
    found: dict[tuple[int, int], str] = {}
    (group, *_) = (one for one in ElementTree.fromstring(svg).iter(f"{SVG}g") if "scale" in one.get("transform", ""))
    for path in group.iter(f"{SVG}path"):
        look = path.get("class", "")
        if look in ("sign", "grid"):
            continue
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path.get("d", "")):
            for column in range(int(x), int(x) + int(width)):
                assert (int(y), column) not in found
                found[int(y), column] = look
    return found


def words_of(svg: str) -> str:
    return " ".join(ElementTree.fromstring(svg).itertext())


@settings(settings.get_profile("few"))
@given(arrays.arrays(np.int64, arrays.array_shapes(min_dims=2, max_dims=2, max_side=70), elements=st.integers(0, 2)))
def test_every_cell_is_drawn_once(cells: Array) -> None:
    """The rectangles cover each cell of the matrix exactly once, with the class of its kind."""
    kinds = (Kind("a", "one"), Kind("b", "two", "cross"), Kind("c", "three"))
    svg = heatmap(cells, kinds, name="n", title="<t>", says="]]>", axes=(Axis("query", 5), Axis("key", 0, 3)))
    looks = [kind.look for kind in kinds]
    assert cells_of(svg) == {(int(r), int(c)): looks[cells[r, c]] for r, c in np.ndindex(cells.shape)}
    for number, kind in enumerate(kinds):
        assert (kind.words in words_of(svg)) == bool(np.any(cells == number))
    assert "<t>" in words_of(svg)


@settings(settings.get_profile("few"))
@given(arrays.arrays(bool, arrays.array_shapes(min_dims=2, max_dims=2, max_side=200)))
def test_blocks_are_shares(visible: Array) -> None:
    """Each block holds the share of what is visible in it, none is larger than needed, and none is left out."""
    shares, rows, columns = shrunk(visible, MOST)
    assert max(shares.shape) <= MOST
    assert (rows == 1) == (visible.shape[0] <= MOST)
    for (i, j), share in np.ndenumerate(shares):
        block = visible[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        assert share == pytest.approx(np.mean(block))
    assert shares.shape == tuple(-(-size // step) for size, step in zip(visible.shape, (rows, columns)))


@pytest.mark.parametrize(
    ("values", "looks"),
    [
        ([-2.0, -1.0, 0.0, 1.0, 2.0], ["n4", "n2", "z", "p2", "p4"]),
        ([1.0, 2.0, 3.0], ["w1", "w4", "w7"]),
        ([0.0, 0.0, 5.0], ["w1", "w1", "w7"]),
        ([np.nan, np.inf, -np.inf, 3.0], ["bad", "bad", "bad", "p4"]),
    ],
)
def test_colours_follow_the_numbers(values: list[float], looks: list[str]) -> None:
    """Zero has the middle colour of numbers on both sides; NaN and the infinities have signs of their own."""
    matrix = np.asarray([values])
    colours = colours_for(matrix, matrix)
    kinds = [colours.kinds[index] for index in colours.cells(matrix)[0]]
    assert [kind.look for kind in kinds] == looks
    for kind, value in zip(kinds, values):
        assert bool(kind.sign) != bool(np.isfinite(value))
    assert len({kind.sign for kind in kinds if kind.sign}) == np.sum(~np.isfinite(values))
    largest = np.asarray([[-1e300, 1e300, -1.0, 1.0]])
    beyond = colours_for(np.asarray([[-1.0, 1.0]]), largest).cells(largest)[0]
    assert [beyond[0] - len(AROUND_ZERO), beyond[1] - len(AROUND_ZERO)] == [0, 1]


def call(q_len: int, k_len: int, width: int = 8, **options: Any) -> Problem:
    """A problem of two batch entries and three heads."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, length, width)) for length in (q_len, k_len, k_len))
    return Problem(dtype="float64", q=q, k=k, v=v, **options)


def drawn(problem: Problem, **changes: Any) -> tuple[dict[str, Picture], str]:
    """Pictures of the golden result with what differs from it."""
    golden = golden_of(problem)
    result = Result(**{"output": golden.output, "dtype": "float64", "lse": golden.lse, **changes})
    pictures, sentence = pictures_of(Pictured(problem, result), "case")
    return {picture.heading: picture for picture in pictures}, sentence


def test_the_worst_head_is_drawn() -> None:
    """One wrong element leads to its batch entry, head and place; its neighbours are within the bound."""
    problem = call(4, 6, causal=True, q_start=2)
    output = golden_of(problem).output.copy()
    output[1, 2, 3, 5] = np.nan
    pictures, sentence = drawn(problem, output=output)
    assert list(pictures) == ["Visibility", "Expected", "Actual", "Error over bound"]
    assert "batch entry 1, head 2" in sentence
    assert sentence.startswith("1 of 192 elements of the output")
    seen = cells_of(pictures["Visibility"].svg)
    assert {pair for pair, look in seen.items() if look == "w6"} == {(i, j) for i, j in np.ndindex(4, 6) if j <= i + 2}
    errors = cells_of(pictures["Error over bound"].svg)
    assert {place for place, look in errors.items() if look != "s0"} == {(3, 5)}
    assert "wrong NaN or infinity" in words_of(pictures["Error over bound"].svg)
    assert "1 NaN" in words_of(pictures["Actual"].svg)
    assert "NaN" not in words_of(pictures["Expected"].svg)


def test_a_bias_of_minus_infinity_hides() -> None:
    """Visibility is that of mask, causal rule and bias together."""
    bias = np.zeros((6,))
    bias[4] = -np.inf
    problem = call(4, 6, bias=bias)
    pictures, _ = drawn(problem, output=golden_of(problem).output + 1)
    seen = cells_of(pictures["Visibility"].svg)
    assert {pair for pair, look in seen.items() if look == "z"} == {(i, 4) for i in range(4)}


def test_larger_matrices_are_cut_around_the_worst() -> None:
    """No picture has more than 64 rows or columns; a note says what is left out, and the worst element is in it."""
    problem = call(150, 200, width=96)
    output = golden_of(problem).output.copy()
    output[0, 0, 149, 40] += 1
    pictures, _ = drawn(problem, output=output)
    for picture in pictures.values():
        assert max(max(place) for place in cells_of(picture.svg)) < MOST
        assert picture.note
    assert pictures["Expected"].note == "cut to query 86 to 149 of 150, width 8 to 71 of 96"
    assert pictures["Visibility"].note == "each cell stands for 3 x 4 pairs (queries x keys)"
    wrong = {place for place, look in cells_of(pictures["Error over bound"].svg).items() if look != "s0"}
    assert wrong == {(63, 32)}


def test_a_wrong_log_sum_exp_is_drawn_as_such() -> None:
    """Where the output is right and the log-sum-exp is not, heads and queries are the axes."""
    problem = call(4, 6)
    lse = golden_of(problem).lse.copy()
    lse[0, 1] += 1
    pictures, sentence = drawn(problem, lse=lse)
    assert sentence.startswith("4 of 24 log-sum-exps are beyond the bound")
    errors = cells_of(pictures["Error over bound"].svg)
    assert {place for place, look in errors.items() if look != "s0"} == {(1, i) for i in range(4)}


@pytest.mark.parametrize(("q_len", "k_len", "width"), [(0, 4, 8), (4, 0, 8), (4, 4, 0), (1, 1, 1)])
def test_sizes_of_zero_have_no_picture_but_a_sentence(q_len: int, k_len: int, width: int) -> None:
    """Nothing, a wrong shape and right numbers are said, whatever the sizes."""
    problem = call(q_len, k_len, width)
    for result in (None, Result(output=np.zeros((7, 7)), dtype="float64")):
        pictures, sentence = pictures_of(Pictured(problem, result), "case")
        assert len(pictures) == (q_len > 0 and k_len > 0)
        assert sentence.startswith("No result has the shape" if result else "The call gave no result")
    assert drawn(problem)[1].startswith(("Every number is within", "No result has the shape"))


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_weights_are_those_of_the_specification(rank: int) -> None:
    """A cell's shade is the golden weight of that head, dark for the largest; hidden pairs are marked as hidden."""
    rng = np.random.default_rng(1)
    heads = {2: (), 3: (4,), 5: (2, 3, 4)}[rank]
    kv_heads = heads[:-1] + ((2,) if heads else ())
    q, k, v = (rng.standard_normal((*lead, n, 8)) for lead, n in ((heads, 5), (kv_heads, 7), (kv_heads, 7)))
    options: dict[str, Any] = {
        "causal": True,
        "q_start": 2,
        "mask": masks.window(2, None),
        "bias": refattn.biases.alibi(heads[-1] if heads else 1),
    }
    entry, head = (4, 3) if rank == 5 else (0, 3 if heads else 0)
    svg = weights_svg(q, k, v, entry=entry, head=head, **options)
    stages = refattn.attention_stages(q, k, v, **options)
    at = {2: (), 3: (head,), 5: (1, 1, head)}[rank]  # entry 4 of (2, 3)
    weights, visible = np.asarray(stages.weights)[at], np.asarray(stages.visible)[at]
    steps = np.rint(weights / weights.max() * 6).astype(int)
    expected = {p: f"w{steps[p] + 1}" if visible[p] else "z" for p in np.ndindex(5, 7)}
    assert cells_of(svg) == expected
    for words in ("A diagnostic: where a query reads, not why.", "X1: ", "X2: ", f"head {head}"):
        assert words in words_of(svg)


def test_masks_are_drawn_as_they_read(tmp_path: Path) -> None:
    """`refattn plot --window L,R` without a file draws what the mask's text shows."""
    out = tmp_path / "mask.svg"
    options = ["--window", "3,1", "--causal", "--q-len", "5", "--k-len", "8", "--q-start", "2", "--svg", str(out)]
    assert cli.main(["plot", *options]) == 0
    text = (masks.window(3, 1) & masks.causal()).to_text(5, 8, q_start=2)
    looks = {"x": "w6", ".": "z"}
    rows = [line.split() for line in text.splitlines()]
    assert cells_of(out.read_text()) == {(i, j): looks[rows[i][j]] for i in range(5) for j in range(8)}
    assert (
        out.read_text().rstrip() == mask_svg((masks.window(3, 1) & masks.causal()).to_array(5, 8, q_start=2)).rstrip()
    )


def test_plots_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors and options come from the file, more options from the command line; the picture needs nothing else."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((3, length, 4)).astype("f4") for length in (5, 6, 6))
    path = tmp_path / "dump.npz"
    shown = rng.random((5, 6)) < 0.7
    np.savez(path, q=q, k=k, v=v, mask=shown, scale=np.asarray(0.7))
    assert (
        cli.main(["plot", str(path), "--svg", "-", "--head", "2", "--causal", "--q-start", "1", "--window", "2,"]) == 0
    )
    mask = masks.dense(shown) & masks.window(2, None)
    expected = weights_svg(q, k, v, head=2, scale=0.7, causal=True, q_start=1, mask=mask)
    printed = capsys.readouterr().out
    assert cells_of(printed) == cells_of(expected)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", printed)
    assert "prefers-color-scheme: dark" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{file}", "--head", "3"], "head: expected an index below 3; got 3"),
        (["{file}", "--entry", "1"], "entry: expected an index below 1; got 1"),
        (["{file}", "--causal"], "q_start: expected a value"),
        (["{file}", "--name", "layer7"], "no 'layer7'"),
        (["{file}", "--q-len", "3"], "are for a mask alone"),
        (["missing.npz"], "there is no file missing.npz"),
        (["--causal"], "name a FILE.npz"),
        (["--q-len", "3"], "needs --causal or --window"),
        (["--q-len", "3", "--k-len", "5", "--causal"], "name --q-start [M5]"),
        (["--q-len", "3", "--window", "3"], "expected L,R"),
        (["--q-len", "0", "--causal"], "--q-len N of at least 1"),
    ],
)
def test_what_cannot_be_drawn(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence says why, and the exit code is 2."""
    path = tmp_path / "dump.npz"
    np.savez(path, q=np.ones((3, 5, 4)), k=np.ones((3, 6, 4)), v=np.ones((3, 6, 4)))
    given = [argument.replace("{file}", str(path)) for argument in arguments]
    assert cli.main(["plot", *given, "--svg", str(tmp_path / "out.svg")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out.svg").exists()


@pytest.mark.parametrize("visible", [np.ones(3, dtype=bool), np.ones((2, 2)), np.ones((0, 3), dtype=bool), [[True]]])
def test_masks_that_are_none(visible: Any) -> None:
    """mask_svg takes a boolean matrix that is not empty."""
    with pytest.raises(refattn.errors.InputsError, match="visible: expected a boolean matrix"):
        mask_svg(visible)


def test_no_plotting_library_is_needed() -> None:
    """Reports and plots import no matplotlib."""
    code = "import refattn.conformance.reports.plots, sys; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
