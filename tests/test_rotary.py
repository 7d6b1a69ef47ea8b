"""RoPE: pairs of components turned by position-dependent angles, against complex numbers."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import refattn
from libraries import Library
from refattn import Rotary, errors, rope
from refusals import Maker, assert_refused

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 4, 6
POSITIONS = np.asarray([[0, 1, 2, 3], [7, 5, 1000, -2]])


def draw(*shape: int) -> np.ndarray:
    """Reproducible normal numbers."""
    return np.random.default_rng(list(shape)).standard_normal(shape)


def by_rotation(x: np.ndarray, positions: Any, style: str, base: float, width: int) -> np.ndarray:
    """The definition in complex numbers: pair c times e^(i * position * base^(-2c/width))."""
    angles = np.asarray(positions, dtype=np.float64)[..., None] * base ** (-np.arange(0, width, 2) / max(width, 1))
    if angles.ndim > 2:
        angles = angles[..., None, :, :]
    turned = x.copy()
    first = slice(0, width // 2) if style == "half" else slice(0, width, 2)
    second = slice(width // 2, width) if style == "half" else slice(1, width, 2)
    pairs = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    turned[..., first], turned[..., second] = pairs.real, pairs.imag
    return turned


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("width", [None, 0, 2, 4, 6])
@pytest.mark.parametrize("base", [10000.0, 500, 0.5])
def test_pairs_turn_by_their_angle(library: Library, style: str, width: int | None, base: float) -> None:
    """Each pair of the first `width` components turns, whatever the base; the others keep every bit."""
    x = draw(BATCH, HEADS, LENGTH, WIDTH)
    for positions in (POSITIONS, POSITIONS[1], POSITIONS[:1]):
        turned = library.host(rope(library.array(x), library.array(positions), style=style, base=base, width=width))
        expected = by_rotation(x, positions, style, base, WIDTH if width is None else width)
        np.testing.assert_allclose(turned, expected, rtol=0, atol=1e-11)
        if width is not None:
            np.testing.assert_array_equal(turned[..., width:], x[..., width:])


@pytest.mark.parametrize("shape", [(LENGTH, WIDTH), (HEADS, LENGTH, WIDTH), (2, BATCH, HEADS, LENGTH, WIDTH)])
def test_every_rank(library: Library, shape: tuple[int, ...]) -> None:
    """Positions are shared by heads and by entries, or one row per entry; heads are on axis -3 from rank 3 on."""
    x, batch = draw(*shape), shape[:-3]
    for lead in {(), batch, (1,) * len(batch)}:
        positions = np.random.default_rng(0).integers(-5, 50, (*lead, LENGTH))
        turned = rope(library.array(x), library.array(positions), style="half")
        np.testing.assert_allclose(library.host(turned), by_rotation(x, positions, "half", 10000.0, WIDTH), atol=1e-13)


def test_forms_of_positions(library: Library) -> None:
    """Lists, ranges, host arrays and library arrays of any integer or real dtype are the same positions."""
    x = library.array(draw(BATCH, HEADS, LENGTH, WIDTH))
    expected = library.host(rope(x, library.array(np.arange(4)), style="interleaved"))
    forms: list[Any] = [[0, 1, 2, 3], (0, 1, 2, 3), range(4), [0.0, 1.0, 2.0, 3.0], np.arange(4)]
    forms += [np.arange(4, dtype=dtype) for dtype in ("int8", "uint16", "float32")]
    forms += [library.array(np.arange(4, dtype=dtype)) for dtype in ("int8", "uint8", "int32", "float32", "float64")]
    for positions in forms:
        np.testing.assert_array_equal(library.host(rope(x, positions, style="interleaved")), expected)
    halves = library.host(rope(x, [0.5, 1.5, 2.5, 3.5], style="half"))
    np.testing.assert_allclose(halves, by_rotation(library.host(x), [0.5, 1.5, 2.5, 3.5], "half", 1e4, 6), atol=1e-13)


def test_low_precisions_compute_in_float32(library: Library, storage_dtype: str) -> None:
    """Angles and products are float32, rounded once to the dtype of x, at positions beyond what halves can hold."""
    x = library.array(draw(HEADS, LENGTH, WIDTH), storage_dtype)
    positions = [0, 1, 2049, 4097]
    turned = rope(x, positions, style="half")
    assert turned.dtype == x.dtype
    expected = by_rotation(library.host(x).astype(np.float64), positions, "half", 10000.0, WIDTH)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[storage_dtype]
    # The angle of the first pair is the position itself; its float32 error is the largest of all.
    np.testing.assert_allclose(library.host(turned), expected, rtol=2 * unit, atol=2 * unit + 4097 * 2.0**-22)


def test_scores_depend_on_differences_only(library: Library) -> None:
    """A common shift of the positions of queries and keys changes no score."""
    q, k = (library.array(draw(HEADS, LENGTH, WIDTH)), library.array(draw(HEADS, LENGTH, WIDTH) + 1))
    for style in ("half", "interleaved"):
        here, there = (
            refattn.attention_stages(rope(q, p, style=style), rope(k, p, style=style), k).scores
            for p in (range(4), range(900, 904))
        )
        np.testing.assert_allclose(library.host(here), library.host(there), atol=1e-11)


@pytest.mark.parametrize("shape", [(0, WIDTH), (HEADS, LENGTH, 0), (0, LENGTH, WIDTH), (0, HEADS, LENGTH, WIDTH)])
def test_sizes_of_zero(library: Library, shape: tuple[int, ...]) -> None:
    """Nothing turned is nothing."""
    x = library.array(np.zeros(shape))
    for style in ("half", "interleaved"):
        assert tuple(rope(x, np.zeros(shape[-2], dtype=int), style=style).shape) == shape


BAD: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "odd width": ("width", ("(2, 4, 5)", "even"), {"x": (2, 4, 5)}),
    "rank": ("x", ("(6,)", "float32"), {"x": (6,)}),
    "too wide": ("width", ("d = 6", "int 8"), {"width": 8}),
    "positions too short": ("positions", ("L = 4", "(3,)"), {"positions": [0, 1, 2]}),
    "positions too long": ("positions", ("L = 4", "(5,)"), {"positions": range(5)}),
    "positions by entry": ("positions", ("batch ()", "(2, 4)"), {"positions": [[0] * 4] * 2}),
    "positions by head": ("positions", ("(3, 4)",), {"positions": [[0] * 4] * 3}),
    "ragged positions": ("positions", ("real array",), {"positions": [[0], [0, 1]]}),
}
VALUES: dict[str, tuple[str, list[Any]]] = {
    "style": ("half, interleaved", ["", "Half", None, 1, ["half"], np.zeros(2)]),
    "base": ("> 0", [0, -1.0, math.nan, math.inf, "1", True, None, [1.0], 1j]),
    "width": ("even int from 0 to d = 6", [-2, 3, 2.0, "2", True, [2]]),
    "positions": ("real array", [None, 3, "0123", [True] * 4, [1j] * 4, {0: 1}]),
}
BAD.update({f"{key} {x!r}": (key, (word,), {key: x}) for key, (word, values) in VALUES.items() for x in values})


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(library: Library, name: str) -> None:
    """Each is a RotaryError that names the argument, what it may be and what came; styles are never guessed."""
    argument, words, changes = BAD[name]
    arguments: dict[str, Any] = {"x": (2, 4, 6), "positions": range(4), "style": "half", **changes}
    x = Maker(library)(*arguments.pop("x"))
    assert_refused(errors.RotaryError, argument, words, rope, x, **arguments)


def test_other_kinds_of_arrays(library: Library) -> None:
    """x must be a floating array, positions real ones of its library, and the style must be named."""
    make = Maker(library)
    for dtype in ("int32", "bool", "complex64"):
        assert_refused(
            errors.RotaryError, "x", ("(4, 6)", dtype), rope, make(4, 6, dtype=dtype), range(4), style="half"
        )
    for dtype in ("bool", "complex64"):
        positions = make(4, dtype=dtype)
        assert_refused(errors.RotaryError, "positions", ("(4,)", dtype), rope, make(4, 6), positions, style="half")
    for x in ([[1.0, 2.0]], None):
        assert_refused(errors.NotAnArrayError, "x", (type(x).__name__,), rope, x, [0], style="half")
    if library.name == "numpy":
        foreign = make.other(4, dtype="int32")
        assert_refused(errors.LibraryMismatchError, "positions", ("NumPy",), rope, make(4, 6), foreign, style="half")
    with pytest.raises(TypeError, match="style"):
        rope(make(4, 6), range(4))  # type: ignore[call-arg]


def test_options_may_be_numpy_or_exact_numbers() -> None:
    """base and width may be NumPy's numbers and fractions."""
    x = draw(LENGTH, WIDTH)
    expected = rope(x, range(4), style="half", base=500.0, width=4)
    for base, width in ((500, np.int8(4)), (np.float32(500), np.uint8(4)), (Fraction(500), np.int64(4))):
        np.testing.assert_array_equal(rope(x, range(4), style="half", base=base, width=width), expected)  # type: ignore[arg-type]
    assert Rotary("half") == Rotary("half", 10000.0, None)
