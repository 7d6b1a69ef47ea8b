"""The generator of certified vectors: what is proven of a rounding, and that the vectors are what it makes."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import flint
import numpy as np
import pytest
from flint import arb, fmpq

import oracle
from certify.attend import RefusedError, certify
from certify.call import Book, Call, Recipe
from certify.draw import Draw, fits
from certify.gradients import certify_gradients
from certify.pairs import slope
from certify.recipes import BOOKS
from certify.rounding import exact, midpoints, rounded
from certify.write import compare, files, vectors_of
from refattn import vectors
from refattn.conformance import plain

RECIPES = [(book.chapter, recipe) for book in BOOKS for recipe in book.recipes]
SHIPPED = {vector.name: vector.raw for vector in vectors.load()}
# How many recipes the default run makes anew; `nox -s vectors` makes all.
SAMPLE = 40


# ---- one rounding -----------------------------------------------------------------------------------------


def test_a_ball_proves_its_rounding_or_none() -> None:
    """A ball strictly between two midpoints has one float64; one that touches a midpoint has none."""
    with flint.ctx.workprec(200):
        third = arb(1) / 3
        assert rounded(third) == 1 / 3
        below, above = midpoints(1 / 3)
        for edge in (below, above):
            assert rounded(arb(edge)) is None
            assert rounded(arb(edge) + arb(0, 1e-40)) is None
        assert rounded(arb(below) + arb(2) ** -150) == 1 / 3
        assert rounded(arb(below) - arb(2) ** -150) == math.nextafter(1 / 3, 0)
        assert rounded(arb("nan")) is None
        assert rounded(arb(10) ** 400) is None
    with flint.ctx.workprec(60):
        assert rounded(arb(1) / 3 - arb(1) / 3 + 1) is not None
        assert rounded(arb(2).sqrt() - arb(2).sqrt()) is None


def test_small_balls_round_as_subnormal_numbers_do() -> None:
    """Below the normal range the midpoints are those of the subnormal numbers, and 0 has them as well."""
    with flint.ctx.workprec(200):
        least = arb(2) ** -1074
        assert rounded(least * 3 / 5) == 5e-324
        assert rounded(least * 2 / 5) == 0.0
        assert rounded(least / 2) is None
        assert rounded(arb(-(10**6)).exp()) == 0.0
        assert rounded(least * 17 / 7) == 1e-323


@pytest.mark.parametrize("x", [0.0, 5e-324, 2.0**-1022, 0.1, 1.0, -1.0, 1e300, 1.7976931348623157e308])
def test_rationals_round_to_even(x: float) -> None:
    """A rational midpoint goes to the even neighbour, and what lies between two midpoints to the one number there."""
    for midpoint in midpoints(x):
        if abs(midpoint) < exact(1.7976931348623157e308):
            assert rounded(midpoint) == float(Fraction(int(midpoint.p), int(midpoint.q)))
    below, above = midpoints(x)
    assert rounded((below + 3 * exact(x)) / 4) == x == rounded((above + 3 * exact(x)) / 4)


def test_exactness_in_a_dtype_is_that_of_rounding() -> None:
    """A number fits a dtype if rounding to it changes nothing, at all ends of its range."""
    draw = Draw("fits", "float64")
    numbers = [math.ldexp(draw.below(2**12), draw.below(60) - 45) for _ in range(500)]
    numbers += [0.0, 65504.0, 65505.0, 65536.0, 2.0**-24, 2.0**-25, 2.0**-133, 2.0**-134, 2.0**-149, 2.0**-150, 5e-324]
    for dtype in ("float16", "float32", "float64"):
        for x in numbers:
            assert fits(x, dtype) == bool(plain.rounded(np.asarray(x), dtype) == x), (x, dtype)
    assert fits(255.0, "bfloat16") and not fits(257.0, "bfloat16") and fits(256.0, "bfloat16")


# ---- one call ---------------------------------------------------------------------------------------------


def test_what_is_rational_needs_no_ball() -> None:
    """Equal logits, constant columns and single keys are rationals: exact weights, zeros and midpoints included."""
    q, k = np.zeros((2, 3)), Draw("k", "base").array(2, 3)
    midpoint = np.asarray([[1.0, -0.75], [math.nextafter(1.0, 2.0), 0.75]])
    result = certify(Call(q=q, k=k, v=midpoint))
    assert result.weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert result.output.tolist() == [[1.0, 0.0], [1.0, 0.0]]  # the midpoint of 1 and its neighbour goes to the even 1
    assert result.lse.tolist() == [math.log(2)] * 2
    assert result.rational == 8


def test_what_no_precision_settles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no precision that is allowed settles a rounding, the input is refused, not guessed at."""
    monkeypatch.setattr("certify.attend.PRECISIONS", (8, 16))
    with pytest.raises(RefusedError, match="16 bits"):
        certify(Call(**Draw("x", "base").qkv(2, 3)))


def test_slopes_of_heads() -> None:
    """The published slopes, those that are no power of two as balls that contain them."""
    for heads in (1, 2, 3, 4, 6, 8, 12, 16):
        for head, expected in enumerate(oracle.alibi_slopes(heads)):
            assert float(slope(head, heads)) == pytest.approx(expected, rel=1e-14)
    assert slope(0, 8) == fmpq(1, 2)


def test_certified_values_are_those_of_the_definition() -> None:
    """Plain loops over floats agree to rounding with a call that uses every option."""
    draw = Draw("all", "float64")
    data, bias, shown = draw.qkv(4, 6), draw.array(4, 6), draw.shown(4, 6)
    options: dict[str, Any] = {"scale": 0.7, "softcap": 2.5, "sinks": draw.array(2), "q_start": [1, 2], "k_start": -1}
    arrays: dict[str, Any] = {"mask": {"kind": "dense", "array": shown}, "bias": ({"kind": "array", "array": bias},)}
    ours = certify(Call(**data, **options, **arrays, causal=True))
    theirs = oracle.attention(
        **data, **options, causal_too=True, mask=oracle.dense(shown), bias=oracle.array_bias(bias)
    )
    for name in ("output", "lse", "weights"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-13, atol=1e-15)


def test_certified_gradients_are_slopes_of_the_definition() -> None:
    """Plain loops over floats rise along a direction as the certified gradients say, every option being in use."""
    draw = Draw("slopes", "float64")
    data, bias, sinks = draw.qkv(4, 6, heads=4, kv_heads=2), draw.array(6), draw.array(4)
    gradient, shown = draw.array(2, 4, 4, 8), draw.shown(4, 6)
    plain_options: dict[str, Any] = {"scale": 0.7, "softcap": 2.5, "q_start": [1, 2], "k_start": -1}
    arrays = {**data, "bias": bias, "sinks": sinks}
    term = ({"kind": "array", "array": bias},)
    call = Call(**data, **plain_options, sinks=sinks, bias=term, mask={"kind": "dense", "array": shown}, causal=True)
    ours = certify_gradients(replace(call, grad_output=gradient)).values
    steps = {name: draw.array(*x.shape) for name, x in arrays.items()}

    def output(step: float) -> Any:
        x = {name: array + step * steps[name] for name, array in arrays.items()}
        options = {**plain_options, "mask": oracle.dense(shown), "bias": oracle.array_bias(x["bias"])}
        return oracle.attention(x["q"], x["k"], x["v"], sinks=x["sinks"], causal_too=True, **options).output

    rise = float(np.sum((output(1e-5) - output(-1e-5)) * gradient)) / 2e-5
    assert rise == pytest.approx(sum(float(np.sum(ours[name] * steps[name])) for name in arrays), rel=1e-7)


# ---- all of them ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chapter", "recipe"), random.Random(4).sample(RECIPES, SAMPLE), ids=lambda x: getattr(x, "name", x)
)
def test_a_recipe_makes_what_is_shipped(chapter: str, recipe: Recipe) -> None:
    """Made anew, inputs and proven results are the shipped ones to the bit."""
    for vector in vectors_of(recipe, chapter):
        assert json.loads(json.dumps(vector)) == SHIPPED[vector["name"]]


def test_every_shipped_vector_has_its_recipe() -> None:
    """No vector is there that no recipe makes, and none is missing."""
    made = [name for _, recipe in RECIPES for name, _, _ in recipe.calls()]
    assert sorted(made) == sorted(SHIPPED)


def test_draws_are_the_same_everywhere() -> None:
    """Inputs come from SHA-256 alone: these digits must never change."""
    numbers = b"".join(Draw("x", kind).array(9).tobytes() for kind in ("base", "float32", "float64"))
    assert hashlib.sha256(numbers).hexdigest()[:16] == "25766efa2cfa2f01"


def test_the_command_names_what_differs(tmp_path: Path) -> None:
    """Without --write nothing is changed and each file that differs, is missing or does not belong is named."""
    folder = Path(shutil.copytree(vectors.FOLDER, tmp_path / "vectors"))
    (folder / "K.json").write_bytes((folder / "K.json").read_bytes()[:-1])
    (folder / "stray.json").write_text("{}", encoding="utf-8")
    books = [book for book in BOOKS if book.chapter in "GK"]
    (folder / "G.json").unlink()
    different = compare(folder, write=False, books=books)
    assert "G.json is missing" in different and "K.json differs" in different
    assert "stray.json is not made by any recipe" in different
    assert not (folder / "G.json").exists()


@pytest.mark.parametrize(
    ("label", "flag", "words"),
    [("S1", "shiny", "say in schema.json what failing at shiny means"), ("S4", "softcap", "take S4 out of NOT_SHOWN")],
)
def test_a_vector_has_its_words(label: str, flag: str, words: str) -> None:
    """A flag without a sentence, and a clause that is said to be shown by no vector, are refused by name."""
    book = Book("S")
    book.recipe(label, flags=(flag,), kinds=(("base", 1),))(lambda draw: Call(**draw.qkv(2, 3)))
    with pytest.raises(AssertionError, match=words):
        list(files((vectors.FOLDER / vectors.SCHEMA).read_bytes(), [book]))


def test_the_generator_imports_nothing_that_it_judges() -> None:
    """No line of refattn takes part in making a vector."""
    program = "import sys, certify.write; sys.exit('refattn' in sys.modules)"
    path = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {program}"], check=False)
    assert done.returncode == 0
