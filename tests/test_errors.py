"""Refused arguments: each raises the class of its clause, says what was wanted and what came, and changes nothing."""

import copy
import importlib
import math
import pickle
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import refattn
from hostile_values import APART, layouts
from libraries import Library
from malformed_calls import BATCH, D_K, D_V, HEADS, K_LEN, Q_LEN, SHAPES, TABLE
from refattn import biases, errors, masks
from refattn.arrays import in_rows, library_of
from refattn.testing import assert_attention_close, assert_gradients_close
from refusals import Maker, assert_refused


class Unprintable:
    """An object that refuses to be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("name", TABLE)
def test_malformed_arguments_of_attention(library: Library, name: str) -> None:
    """The class, the argument, what was expected, what came and the clause; and no argument is changed."""
    make = Maker(library)
    options = TABLE[name].options(make)
    arrays = {
        **{key: make(*shape) for key, shape in SHAPES.items()},
        **{key: options[key] for key in options if key in SHAPES},
    }
    options = {key: value for key, value in options.items() if key not in SHAPES}
    ours = {key: x for key, x in arrays.items() if type(x) is type(make(1))}
    before = {key: library.host(x).tobytes() for key, x in ours.items()}
    error, argument, got, _ = TABLE[name]
    functions: list[Callable[..., Any]] = [refattn.attention, refattn.attention_with_lse, refattn.attention_stages]
    for function in functions[:2] if argument == "path" else functions:
        assert_refused(error, argument, got, function, **arrays, **options)
    assert {key: library.host(x).tobytes() for key, x in ours.items()} == before


def test_positions_are_needed_when_keys_start_elsewhere(library: Library) -> None:
    """With Lq == Lk a given k_start makes q_start necessary for whatever reads positions, and for nothing else."""
    make = Maker(library)
    q, k, v = make(BATCH, HEADS, K_LEN, D_K), make(BATCH, HEADS, K_LEN, D_K), make(BATCH, HEADS, K_LEN, D_V)
    for start in (1, -1, [0, 1], make(BATCH, dtype="int32")):
        for options in ({"causal": True}, {"mask": masks.chunks(2)}, {"bias": biases.alibi(HEADS)}):
            words = ("k_start", "top-left", "bottom-right")
            assert_refused(errors.PositionError, "q_start", words, refattn.attention, q, k, v, k_start=start, **options)
        for mask in (masks.prefix(2), masks.lengths(2), masks.documents([0] * K_LEN), masks.padding([True] * K_LEN)):
            assert refattn.attention(q, k, v, mask=mask, k_start=start).shape == (BATCH, HEADS, K_LEN, D_V)


def test_rank_2_has_one_batch_entry(library: Library) -> None:
    """With rank 2 and 3 per-entry options take a single value, and sinks of rank 2 are () or (1,)."""
    make = Maker(library)
    leads: list[tuple[int, ...]] = [(), (HEADS,)]
    for lead in leads:
        q, k, v = make(*lead, Q_LEN, D_K), make(*lead, K_LEN, D_K), make(*lead, K_LEN, D_V)
        for name, options in {
            "q_start": {"q_start": [0]},
            "k_start": {"q_start": 0, "k_start": make(1, dtype="int32")},
            "lengths(n)": {"mask": masks.lengths([1])},
            "padding(keep)": {"mask": masks.padding([[True] * K_LEN])},
            "documents(q_ids)": {"mask": masks.documents([[0] * Q_LEN], [0] * K_LEN)},
        }.items():
            assert_refused(errors.BatchError, name, ("batch ()",), refattn.attention, q, k, v, **options)
    q, k, v = make(Q_LEN, D_K), make(K_LEN, D_K), make(K_LEN, D_V)
    shapes: list[tuple[int, ...]] = [(2,), (1, 1)]
    for shape in shapes:
        assert_refused(
            errors.SinkError, "sinks", ("() or (1,)", str(shape)), refattn.attention, q, k, v, sinks=make(*shape)
        )


def test_an_unprintable_argument_is_an_ordinary_error(library: Library) -> None:
    """What refuses to be printed is refused like anything else."""
    make = Maker(library)
    q = make(HEADS, Q_LEN, D_K)
    for error, argument in ((errors.CausalError, "causal"), (errors.StartError, "q_start"), (errors.PathError, "path")):
        assert_refused(error, argument, ("Unprintable",), refattn.attention, q, q, q, **{argument: Unprintable()})
    assert_refused(errors.NotAnArrayError, "q", ("Unprintable",), refattn.attention, Unprintable(), q, q)


def test_starts_of_another_library_are_refused_though_nothing_reads_them(library: Library) -> None:
    """A start is checked whether or not a mask reads it; host arrays and lists serve every library."""
    make = Maker(library)
    q = make(BATCH, HEADS, Q_LEN, D_K)
    starts = np.zeros(BATCH, dtype=np.int32)
    assert refattn.attention(q, q, q, q_start=starts, k_start=starts.tolist()).shape == q.shape
    if library.name == "numpy":
        foreign = make.other(BATCH, dtype="int32")
        for name in ("q_start", "k_start"):
            assert_refused(errors.LibraryMismatchError, name, ("NumPy",), refattn.attention, q, q, q, **{name: foreign})


def test_small_integers_numpy_scalars_and_byte_orders_are_welcome() -> None:
    """NumPy's numbers serve as Python's, and the byte order of an array does not matter."""
    values = np.random.default_rng(0).standard_normal((HEADS, Q_LEN, D_K)).astype(np.float32)
    expected = refattn.attention(values, values, values, scale=0.5, softcap=2.0, causal=True, q_start=3, k_start=3)
    for kind in (np.int8, np.uint8, np.int64, np.uint64):
        start = kind(3)
        actual = refattn.attention(
            values,
            values,
            values,
            scale=np.float32(0.5),
            softcap=np.float64(2),
            causal=True,
            q_start=start,
            k_start=start,
        )
        np.testing.assert_array_equal(actual, expected)
    turned = values.astype(values.dtype.newbyteorder())
    for q, k, v in ((turned, turned, turned), (values, turned, values), (turned, values, values)):
        actual = refattn.attention(q, k, v, scale=Fraction(1, 2), softcap=2, causal=True)
        assert actual.dtype == q.dtype
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("lead", [(), (BATCH, HEADS)])
@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_memory_layouts_do_not_matter(path: str, lead: tuple[int, ...]) -> None:
    """Order, strides, alignment, byte order, read-only memory and subclasses change no bit, of gradients neither."""

    class Own(np.ndarray):
        """A subclass that does nothing else."""

    def results(x: Any) -> list[np.ndarray]:
        options: dict[str, Any] = {"causal": True, "path": path}
        return [
            *refattn.attention_with_lse(x, x, x, **options),
            *refattn.attention_vjp(x, x, x, x, **options)[:3],
        ]

    values = np.random.default_rng(0).standard_normal((*lead, 67, 16))
    flipped = np.ascontiguousarray(values[..., ::-1, ::-1])[..., ::-1, ::-1]
    locked = values.copy()
    locked.flags.writeable = False
    unaligned = np.frombuffer(bytearray(values.nbytes + 1), dtype=np.uint8)[1:].view(values.dtype).reshape(values.shape)
    unaligned[...] = values
    turned = values.astype(values.dtype.newbyteorder())
    sliced = np.repeat(values, 2, axis=-1)[..., ::2]
    for x in (np.asfortranarray(values), flipped, sliced, locked, unaligned, turned, values.view(Own)):
        for actual, expected in zip(results(x), results(values), strict=True):
            np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(x, values)
    spread = np.broadcast_to(values[..., :1, :], values.shape)
    for actual, expected in zip(results(spread), results(spread.copy()), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_rows_may_lie_apart(path: str, kind: str) -> None:
    """Such arrays, of which tokens before heads are the commonest, are read in place, and results keep the bound."""
    rng = np.random.default_rng(0)
    plain = [rng.standard_normal((HEADS, 67, 16)) for _ in range(4)]
    apart = [layouts(x)[kind] for x in plain]
    library = library_of(plain[0], "q")
    assert all(in_rows(library, x) is x for x in apart)
    q, k, v, gradient = apart
    assert_attention_close(refattn.attention(q, k, v, causal=True, path=path), *plain[:3], causal=True)
    found = refattn.attention_vjp(q, k, v, gradient, causal=True, path=path)
    assert_gradients_close(found, *plain, causal=True)


@pytest.mark.library("torch")
def test_sparse_tensors_are_refused(library: Library) -> None:
    """A tensor that is not dense is an error that names its layout."""
    torch = importlib.import_module("torch")
    x = torch.ones(2, 3)
    odd = x.to_sparse()
    for arrays in ((odd, odd, odd), (x, odd, x)):
        name = "q" if arrays[0] is odd else "k"
        assert_refused(errors.NotAnArrayError, name, ("dense", "layout"), refattn.attention, *arrays)
    assert_refused(errors.NotAnArrayError, "bias", ("layout",), refattn.attention, x, x, x, bias=odd)


@pytest.mark.library("torch")
def test_nested_and_unreadable_tensors_are_refused(library: Library) -> None:
    """A nested tensor, which has no shape to ask for, is refused wherever it stands; so is one that cannot be read."""
    torch = importlib.import_module("torch")
    with warnings.catch_warnings(action="ignore"):  # of a prototype
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    x = torch.ones(2, 3)
    for argument, error in {
        "q": errors.NotAnArrayError,
        "mask": errors.NotAnArrayError,
        "bias": errors.NotAnArrayError,
        "scale": errors.ScaleError,
        "softcap": errors.SoftcapError,
        "sinks": errors.NotAnArrayError,
        "q_start": errors.StartError,
    }.items():
        assert_refused(error, argument, (), refattn.attention, **{"q": x, "k": x, "v": x, argument: nested})
    assert_refused(errors.MaskArgumentError, "window(left)", (), masks.window, nested, 0)
    assert_refused(errors.HeadSplitError, "heads", (), refattn.split_heads, x, nested)
    meta = torch.ones(2, 3, device="meta")
    assert_refused(errors.NotAnArrayError, "q", ("read",), refattn.golden, meta, meta, meta)
    turned = torch.complex(x, -x).conj().imag  # negated by a bit that NumPy has not
    assert np.array_equal(refattn.golden(turned, x, x).output, np.ones((2, 3)))


@pytest.mark.library("dask")
def test_unknown_shapes_are_refused(library: Library) -> None:
    """A Dask array whose sizes are not known is an error that says how to find them."""
    x = library.array(np.ones((4, 3)))
    unknown = x[library.array(np.asarray([True, False, True, True]))]
    for arrays in ((unknown, x, x), (x, unknown, unknown)):
        name = "q" if arrays[0] is unknown else "k"
        assert_refused(errors.NotAnArrayError, name, ("compute_chunk_sizes()", "nan"), refattn.attention, *arrays)


def test_errors_survive_pickling_and_copying() -> None:
    """A pickled or copied error keeps its class, parts and message."""
    copies: list[Callable[[Any], Any]] = [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy]  # noqa: S301  # made here
    for make in copies:
        with pytest.raises(errors.ScaleError) as caught:
            refattn.attention(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)), scale=math.nan)
        again = make(caught.value)
        assert type(again) is errors.ScaleError
        assert (str(again), again.argument, again.clause) == (str(caught.value), "scale", "S2")
