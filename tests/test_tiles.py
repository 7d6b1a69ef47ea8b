"""The tiled paths: any tile size gives what the specification gives (T1), within memory linear in the length (T4)."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import refattn
from drawn_calls import Call, calls
from libraries import EAGER, Library
from refattn import mask_kinds
from refattn.arguments import check_call
from refattn_backends import numpy_products, numpy_tiles, pieces, tiles
from test_random_options import assert_within, float64_bounds

NUMPY = pytest.mark.library("numpy")


@pytest.fixture(params=[(1, 1, 0, 1), (2, 3, 0, 2), (5, 2, 1, 8), (5, 2, 99, 1)], ids=str)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tiles that small calls have many of: rows, keys, up to how many rows share keys out, and heads of a job."""
    rows, keys, few, heads = request.param
    for module in (tiles, numpy_tiles):
        monkeypatch.setattr(module, "ROWS", rows)
        monkeypatch.setattr(module, "KEYS", keys)
    monkeypatch.setattr(numpy_tiles, "EDGE", 2)
    monkeypatch.setattr(numpy_tiles, "FEW", few)
    monkeypatch.setattr(numpy_tiles, "SPLIT", 3)
    monkeypatch.setattr(numpy_tiles, "HEADS", heads)
    return request.param


def check(library: Library, call: Call) -> None:
    arrays, options = call.arguments(library, "float64")
    expected = call.expected("float64")
    bound = float64_bounds(call, expected)
    output, lse = refattn.attention_with_lse(*arrays, **options, path="tiled")
    assert output.dtype == arrays[0].dtype
    # Merging rounds once more per tile than the dense core does.
    assert_within(library.host(output), expected.output, 4 * bound["output"], "output")
    assert_within(library.host(lse), expected.lse, 4 * bound["lse"], "lse")


@EAGER
@given(data=st.data())
# The tile size is the same for all examples.
@settings(settings.get_profile("few"), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tile_size_agrees_with_the_oracle(tile: Any, library: Library, data: st.DataObject) -> None:
    """Random shapes and options, poison apart, computed in tiles of any size, agree with the oracle."""
    check(library, data.draw(calls()))


@NUMPY
@pytest.mark.parametrize("kind", ["alibi", "relative", "array", "sum"])
def test_biases_of_each_head(tile: Any, library: Library, kind: str) -> None:
    """Each head of a group, and each entry with its start, gets its own bias, however heads are shared out."""
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal((2, heads, 6, 4)) for heads in (4, 2, 2))
    alibi, table = refattn.biases.alibi(4), refattn.biases.relative(library.array(rng.standard_normal((4, 5))))
    array = library.array(rng.standard_normal((2, 4, 6, 6)))
    bias = {"alibi": alibi, "relative": table, "array": array, "sum": array + alibi + table}[kind]
    options: dict[str, Any] = {"bias": bias, "q_start": np.asarray([0, 3])}
    q, k, v = (library.array(x) for x in (q, k, v))
    expected = refattn.golden(q, k, v, **options)
    output = refattn.attention(q, k, v, **options, path="tiled")
    assert np.all(np.abs(output - expected.output) <= 4 * expected.bound("float64"))


@EAGER
def test_first_tile_masked_before_very_negative_logits(tile: Any, library: Library) -> None:
    """A wholly masked first tile leaves no maximum behind that very negative logits then vanish under."""
    q, k = np.full((1, 3, 1), -30.0), np.full((1, 7, 1), 30.0) + np.linspace(0, 0.01, 7)[:, None]
    v = np.linspace(1.0, 2.0, 7).reshape(1, 7, 1)
    shown = np.arange(7) >= 5
    q, k, v, shown = (library.array(x) for x in (q, k, v, shown))
    output, lse = refattn.attention_with_lse(q, k, v, mask=refattn.masks.dense(shown), path="tiled")
    expected = refattn.golden(q, k, v, mask=refattn.masks.dense(shown))
    assert float(np.max(expected.lse)) < -800
    assert np.all(np.abs(library.host(output) - expected.output) <= expected.bound("float64"))
    assert np.all(np.abs(library.host(lse) - expected.lse) <= expected.lse_bound("float64"))


@EAGER
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e300])
def test_poison_in_hidden_keys_is_harmless(tile: Any, library: Library, poison: float) -> None:
    """What hidden keys and values hold changes no element beyond the bound, in any tile."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 6, 4)) for _ in range(3))
    keep = np.asarray([True, True, False, True, False, False])
    mask = refattn.masks.padding(keep)
    expected = refattn.golden(q, k, v, mask=mask, causal=True)
    k[:, ~keep], v[:, ~keep] = poison, poison
    q, k, v = (library.array(x) for x in (q, k, v))
    output = library.host(refattn.attention(q, k, v, mask=mask, causal=True, path="tiled"))
    assert np.all(np.abs(output - expected.output) <= expected.bound("float64"))


@EAGER
@pytest.mark.parametrize("sink", [np.nan, np.inf])
def test_a_nan_sink_outdoes_infinite_values(tile: Any, library: Library, sink: float) -> None:
    """A sink that makes its rows NaN does so where visible values are infinite too."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 6, 4)) for _ in range(3))
    v[:, 1, :2] = np.inf, -np.inf
    sinks = np.asarray([sink, 0.0])
    expected = refattn.golden(q, k, v, sinks=sinks)
    q, k, v, sinks = (library.array(x) for x in (q, k, v, sinks))
    output = library.host(refattn.attention(q, k, v, sinks=sinks, path="tiled"))
    for kind in (np.isnan, np.isposinf, np.isneginf):
        assert np.array_equal(kind(output), kind(expected.output))


@EAGER
@pytest.mark.parametrize("sinks", [None, [-np.inf, 1.0]], ids=str)
@pytest.mark.parametrize("last", [-1e200, 1.0])
def test_logits_of_minus_infinity(tile: Any, library: Library, last: float, sinks: Any) -> None:
    """Stretches of visible logits that are all -inf harm a row only if there is nothing else, no finite sink either."""
    q, k = np.full((2, 6, 1), 1e200), np.full((2, 9, 1), -1e200)
    v = np.random.default_rng(1).standard_normal((2, 9, 3))
    v[1, 2, :2] = np.nan, np.inf
    k[:, 8] = last * 1e-200 if last > 0 else last
    sinks = None if sinks is None else np.asarray(sinks)
    expected = refattn.golden(q, k, v, sinks=sinks)
    q, k, v = (library.array(x) for x in (q, k, v))
    sinks = None if sinks is None else library.array(sinks)
    output, lse = map(library.host, refattn.attention_with_lse(q, k, v, sinks=sinks, path="tiled"))
    for got, exact, bound in ((output, expected.output, expected.bound), (lse, expected.lse, expected.lse_bound)):
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(got[~finite], exact[~finite])
        assert np.all(np.abs(got[finite] - exact[finite]) <= bound("float64")[finite])


@NUMPY
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shift", ["none", "far below", "far above", "rising", "falling"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softcap": 5.0}], ids=str)
def test_many_rows_and_keys(dtype: str, shift: str, options: dict[str, Any]) -> None:
    """Lengths that no tile size divides, grouped heads, and logits near and far from zero keep the bound."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((2, heads, 1100, 16)).astype(dtype) for heads in (4, 2, 2))
    slopes = np.linspace(-1.0, 1.0, 1100)
    q[..., 0] = 100.0
    k[..., 0] = {"none": 0, "far below": -20, "far above": 20, "rising": 20 * slopes, "falling": -20 * slopes}[shift]
    output, lse = refattn.attention_with_lse(q, k, v, **options, path="tiled")
    rows = [0, 1, 255, 256, 511, 700, 1099]
    expected = refattn.golden(q, k, v, rows=rows, **options)
    assert np.all(np.abs(output[..., rows, :] - expected.output) <= expected.bound(dtype))
    assert np.all(np.abs(lse[..., rows] - expected.lse) <= expected.lse_bound(dtype))


@NUMPY
@pytest.mark.parametrize("q_len", [1, 300])
def test_very_negative_logits_that_no_sample_sees(q_len: int) -> None:
    """Rows keep the bound whose few visible keys stand where nobody looks for a level beforehand."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((2, n, 8)) for n in (q_len, 700, 700))
    q[..., 0], k[..., 0] = 100.0, -30.0
    residues = np.asarray([0, 5])[:, None, None]  # of the keys that a head sees: the first head's are looked at
    options: dict[str, Any] = {"mask": np.arange(700) % 16 == residues}
    output, lse = refattn.attention_with_lse(q, k, v, **options, path="tiled")
    expected = refattn.golden(q, k, v, **options)
    assert float(np.max(expected.lse)) < -800
    assert np.all(np.abs(output - expected.output) <= expected.bound("float64"))
    assert np.all(np.abs(lse - expected.lse) <= expected.lse_bound("float64"))


@NUMPY
@pytest.mark.parametrize("q_len", [1, 5, 300])
def test_values_near_the_largest_number(q_len: int) -> None:
    """Values that a weight above 1 would take beyond the dtype keep the bound: weights are at most 1 there."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, n, 8)).astype(np.float32) for n in (q_len, 700, 700))
    q[..., 0], k[..., 0], v[..., 0] = 5.0, 5.0, 1e37
    output = refattn.attention(q, k, v, path="tiled")
    expected = refattn.golden(q, k, v)
    assert np.all(np.abs(output - expected.output) <= expected.bound("float32"))


@NUMPY
@pytest.mark.parametrize("q_len", [1, 100])
@pytest.mark.parametrize(
    ("query", "key", "scale"), [(100.0, 1e-37, 1e37), (1e-3, 3e38, 1e-38), (1.234e-34, 3e38, 2.0**-23)]
)
def test_scales_far_from_one(q_len: int, query: float, key: float, scale: float) -> None:
    """A scale that queries cannot be multiplied by, but scores can, keeps the bound."""
    rng = np.random.default_rng(3)
    q = np.full((2, q_len, 64), query, np.float32)
    k, v = (rng.uniform(0.5, 1.0, (2, 9, 64)).astype(np.float32) for _ in range(2))
    k *= np.float32(key)
    output, lse = refattn.attention_with_lse(q, k, v, scale=scale, path="tiled")
    expected = refattn.golden(q, k, v, scale=scale)
    assert np.all(np.abs(output - expected.output) <= expected.bound("float32"))
    assert np.all(np.abs(lse - expected.lse) <= expected.lse_bound("float32"))


@NUMPY
def test_one_query_that_the_scale_cannot_multiply() -> None:
    """One query that would overflow once scaled keeps the bound, and rows of other tiles keep their bits."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, n, 64)).astype(np.float32) for n in (600, 50, 50))
    k[1, :, 0] = 3e-39
    usual = refattn.attention(q, k, v, scale=3.7, path="tiled")
    q[1, 400] = np.where(np.arange(64) == 0, 3e38, 0.0)
    output, lse = refattn.attention_with_lse(q, k, v, scale=3.7, path="tiled")
    assert np.array_equal(output[:, :256], usual[:, :256])
    expected = refattn.golden(q, k, v, scale=3.7)
    assert np.all(np.abs(output - expected.output) <= expected.bound("float32"))
    assert np.all(np.abs(lse - expected.lse) <= expected.lse_bound("float32"))


@NUMPY
@pytest.mark.parametrize("q_len", [1, 100])
def test_values_near_the_largest_number_beside_logits_of_minus_infinity(q_len: int) -> None:
    """Keys that are hidden, or whose logits overflow to -inf under two summands, harm no row of large values."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, n, 8)).astype(np.float32) for n in (q_len, 1500, 1500))
    q[..., 0], k[..., 0], v[..., 0] = 5.0, 5.0, 1e37
    least = np.where(np.arange(1500) < 1300, np.finfo(np.float32).min, np.float32(0))
    mask = refattn.masks.padding(np.arange(1500) >= 900) & refattn.masks.dense(rng.random((q_len, 1)) < 0.9)
    options: dict[str, Any] = {"bias": refattn.biases.as_bias(least) + least, "mask": mask}
    output, lse = refattn.attention_with_lse(q, k, v, **options, path="tiled")
    expected = refattn.golden(q, k, v, **options)
    assert np.all(np.abs(output - expected.output) <= expected.bound("float32"))
    assert np.array_equal(lse == -np.inf, expected.lse == -np.inf)
    some = expected.lse > -np.inf
    assert np.all(np.abs(lse[some] - expected.lse[some]) <= expected.lse_bound("float32")[some])


@NUMPY
@pytest.mark.parametrize("masked", [False, True])
def test_memory_is_linear_in_the_length(masked: bool) -> None:
    """A long call needs a few tiles beyond its arguments and output, and no dense mask of a lazy one."""
    length = 8192
    q = np.random.default_rng(4).standard_normal((1, length, 8)).astype(np.float32)
    mask = refattn.masks.window(600, 0) & ~refattn.masks.prefix(5) if masked else None
    tracemalloc.start()
    output = refattn.attention(q, q, q, mask=mask, path="tiled")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - output.nbytes < 16 * 2**20 < length * length


@NUMPY
def test_one_infinite_value_costs_no_memory() -> None:
    """A value that is not finite has its own rows computed again, not those of all entries and heads at once."""
    q, k, v = np.random.default_rng(4).standard_normal((3, 16, 16, 256, 4)).astype(np.float32)
    v[3, 4, 100] = np.nan
    refattn.attention(q[:2], k[:2], v[:2], path="tiled")
    tracemalloc.start()
    output = refattn.attention(q, k, v, mask=refattn.masks.lengths([256] * 3 + [99] * 13), path="tiled")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.isfinite(output).all()
    assert peak - output.nbytes < 16 * 2**20


@NUMPY
def test_many_small_entries_are_no_jobs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that are small are computed together, with the options of each."""
    monkeypatch.setattr(numpy_tiles, "_Tiled", None)
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((50, 2, n, 4)) for n in (3, 9, 9))
    options: dict[str, Any] = {
        "causal": True,
        "q_start": rng.integers(0, 9, 50),
        "bias": rng.standard_normal((50, 1, 3, 9)),
    }
    output, lse = refattn.attention_with_lse(q, k, v, **options, path="tiled")
    expected = refattn.golden(q, k, v, **options)
    assert np.all(np.abs(output - expected.output) <= expected.bound("float64"))
    assert np.all(np.abs(lse - expected.lse) <= expected.lse_bound("float64"))


@NUMPY
def test_hidden_tiles_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is evaluated on the tiles that it cuts alone, not where it hides all or nothing."""
    evaluated: set[tuple[int, int]] = set()
    cutting = pieces.Shown._cut

    def watched(self: Any, rows: range, keys: range) -> Any:
        evaluated.add((rows.start // 16, keys.start // 16))
        return cutting(self, rows, keys)

    monkeypatch.setattr(pieces.Shown, "_cut", watched)
    monkeypatch.setattr(numpy_tiles, "ROWS", 16)
    monkeypatch.setattr(numpy_tiles, "KEYS", 16)
    q, mask = np.ones((3, 256, 4), np.float32), refattn.masks.window(40, 0)
    refattn.attention(q, q, q, mask=mask, path="tiled")
    visible = mask.to_array(256, 256).reshape(16, 16, 16, 16).swapaxes(1, 2)
    some, every = (f(visible, axis=(2, 3)) for f in (np.any, np.all))
    assert evaluated == set(zip(*np.nonzero(some & ~every), strict=True))


@NUMPY
def test_a_window_asks_its_mask_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a window of fixed width hides is passed over in long stretches: questions grow about as the length does."""
    asked: list[range] = []
    answer = mask_kinds.Window.answer

    def watched(self: Any, rows: range, *more: Any) -> str:
        asked.append(rows)
        return answer(self, rows, *more)

    monkeypatch.setattr(mask_kinds.Window, "answer", watched)
    counts = []
    for length in (8192, 32768):
        q = np.ones((1, length, 4), np.float32)
        refattn.attention(q, q, q, mask=refattn.masks.window(100, 0), path="tiled")
        counts.append(len(asked))
        asked.clear()
    assert counts[1] < 1.5 * 4 * counts[0]


@NUMPY
@given(data=st.data())
@settings(settings.get_profile("few"))
def test_pieces_are_what_a_mask_shows(library: Library, data: st.DataObject) -> None:
    """The pieces of a tile overlap nowhere, hold every visible pair, and mask every hidden pair that they hold."""
    call = data.draw(calls())
    arrays, options = call.arguments(library, "float64")
    checked = check_call(*arrays, **{**options, "bias": None, "sinks": None})
    if checked.mask is None or 0 in checked.scores_shape:
        return
    lead, lengths = checked.scores_shape[:-2], checked.scores_shape[-2:]
    rows, keys = (range(*sorted(data.draw(st.sets(st.integers(0, n), min_size=2, max_size=2)))) for n in lengths)
    expected = np.broadcast_to(checked.mask.evaluate(checked.frame()), checked.scores_shape)
    held, seen = np.zeros(lengths, int), np.zeros(checked.scores_shape, bool)
    for piece in pieces.Shown(checked, data.draw(st.integers(1, 3))).pieces(rows, keys):
        at = slice(piece.rows.start, piece.rows.stop), slice(piece.keys.start, piece.keys.stop)
        held[at] += 1
        part = True if piece.visible is None else piece.visible
        seen[(..., *at)] = np.broadcast_to(part, (*lead, len(piece.rows), len(piece.keys)))
    assert held.max() <= 1
    tile = (..., slice(rows.start, rows.stop), slice(keys.start, keys.stop))
    assert np.array_equal(seen[tile], expected[tile])


@NUMPY
@given(st.integers(1, 3), st.integers(1, 400), st.integers(1, 400), st.integers(1, 700))
@settings(settings.get_profile("few"))
def test_products_in_pieces(stack: int, rows: int, inner: int, columns: int) -> None:
    """Products in pieces are the products, for stacks of any sizes and for transposed views."""
    rng = np.random.default_rng(6)
    a, b = rng.integers(-9, 9, (stack, rows, inner)) * 1.0, rng.integers(-9, 9, (stack, inner, columns)) * 1.0
    expected = np.einsum("smk,skn->smn", a, b)
    for product in (numpy_products.by_rows, numpy_products.by_columns, numpy_products.by_inner):
        for first, second in ((a, b), (np.ascontiguousarray(a.mT).mT, np.ascontiguousarray(b.mT).mT)):
            assert np.array_equal(product(first, second, np.full(expected.shape, np.nan)), expected)
