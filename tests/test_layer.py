"""The attention layer against its definition in plain float64 NumPy, and cached against uncached."""

import importlib
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

import oracle
import refattn
from libraries import EAGER, NOT_JAX, Library, eager
from refattn import AttentionWeights, KVCache, Rotary, errors, masks, multi_head_attention
from refusals import assert_refused

BATCH, LENGTH, WIDTH, SOURCE, SOURCE_WIDTH = 2, 5, 6, 4, 7


class Layer(NamedTuple):
    """Parameters of a layer on the host, and how many heads they have."""

    heads: int
    kv_heads: int
    weights: AttentionWeights

    def on(self, library: Library, dtype: str = "float64") -> AttentionWeights:
        """The parameters as arrays of the library."""
        return AttentionWeights(*(None if w is None else library.array(w, dtype) for w in self.weights))


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Reproducible normal numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def layer(
    heads: int, kv_heads: int, d_k: int = 4, d_v: int = 3, source: int = WIDTH, bias: bool = True, out: int | None = 5
) -> Layer:
    """A random layer; out None is a layer without output projection."""
    shapes = [(WIDTH, heads * d_k), (source, kv_heads * d_k), (source, kv_heads * d_v), (heads * d_v, out or 0)]
    matrices: list[Any] = [draw(*shape, seed=i) / 2 for i, shape in enumerate(shapes)]
    biases: list[Any] = [draw(shape[1], seed=9 + i) if bias else None for i, shape in enumerate(shapes)]
    if out is None:
        matrices[3], biases[3] = None, None
    return Layer(heads, kv_heads, AttentionWeights(*matrices, *biases))


def projected(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, heads: int) -> np.ndarray:
    """x w + b, component by component, with the heads apart: (..., S, D) as (..., H, S, D / H)."""
    y = np.zeros((*x.shape[:-1], w.shape[1]))
    for index in np.ndindex(*y.shape):
        y[index] = sum(x[index[:-1]][i] * w[i, index[-1]] for i in range(w.shape[0])) + (
            0 if b is None else b[index[-1]]
        )
    width = w.shape[1] // heads
    return np.stack([y[..., h * width : (h + 1) * width] for h in range(heads)], axis=-3)


def by_definition(
    x: np.ndarray, layer: Layer, context: np.ndarray | None = None, rope: Rotary | None = None,
    positions: Any = None, **options: Any,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Output and weights of the layer in float64, head by head."""
    w, source = layer.weights, x if context is None else context
    q = projected(x, w.w_q, w.b_q, layer.heads)
    k = projected(source, w.w_k, w.b_k, layer.kv_heads)
    v = projected(source, w.w_v, w.b_v, layer.kv_heads)
    if rope is not None:
        at = options.get("q_start", 0) + np.arange(x.shape[-2]) if positions is None else positions
        q = oracle.rope(q, at, **rope._asdict())
        k = oracle.rope(k, at if context is None else np.arange(source.shape[-2]), **rope._asdict())
    result = oracle.attention(q, k, v, **options)
    joined = np.concatenate([result.output[..., h, :, :] for h in range(layer.heads)], axis=-1)
    if w.w_o is None:
        return joined, result.weights
    return joined @ w.w_o + (0 if w.b_o is None else w.b_o), result.weights


def close(library: Library, actual: Any, expected: np.ndarray, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(library.host(actual), expected, rtol=1e-12, atol=atol)


@pytest.mark.parametrize(("heads", "kv_heads"), [eager(1, 1), eager(2, 2), (4, 2), eager(4, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention(library: Library, heads: int, kv_heads: int, causal: bool) -> None:
    """Projections, grouped heads, concatenation and output projection, with biases here and there."""
    x, parameters = draw(BATCH, LENGTH, WIDTH), layer(heads, kv_heads, bias=causal)
    output, weights = by_definition(x, parameters, causal_too=causal)
    options: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "causal": causal}
    result = multi_head_attention(library.array(x), parameters.on(library), **options, return_weights=True)
    close(library, result.output, output)
    assert result.weights is not None
    close(library, result.weights, weights)
    assert tuple(result.output.shape) == (BATCH, LENGTH, 5)
    assert result.cache is None
    plain = multi_head_attention(library.array(x), parameters.on(library), **options)
    np.testing.assert_array_equal(library.host(plain.output), library.host(result.output))
    assert plain.weights is None


@EAGER
@pytest.mark.parametrize(
    "shape", [(LENGTH, WIDTH), (BATCH, LENGTH, WIDTH), (3, BATCH, LENGTH, WIDTH), (BATCH, 0, WIDTH)]
)
def test_every_rank(library: Library, shape: tuple[int, ...]) -> None:
    """x may have no batch axis, or several, and no tokens; the axes before the tokens come back."""
    x, parameters = draw(*shape), layer(2, 1)
    result = multi_head_attention(library.array(x), parameters.on(library), heads=2, kv_heads=1, causal=True)
    close(library, result.output, by_definition(x, parameters, causal_too=True)[0])


@NOT_JAX
def test_one_head_without_output_projection(library: Library) -> None:
    """[batch, tokens, width] with its own d_k and d_v is attention of three projections."""
    x, parameters = draw(BATCH, LENGTH, WIDTH), layer(1, 1, d_k=3, d_v=8, bias=False, out=None)
    result = multi_head_attention(library.array(x), parameters.on(library), heads=1, causal=True)
    w = parameters.weights
    expected = refattn.attention(*(np.stack([x @ m], axis=1) for m in (w.w_q, w.w_k, w.w_v)), causal=True)[:, 0]
    assert tuple(result.output.shape) == (BATCH, LENGTH, 8)
    close(library, result.output, expected)


@NOT_JAX
def test_cross_attention(library: Library) -> None:
    """Keys and values come from the context, of its own length, width and padding."""
    x, context = draw(BATCH, LENGTH, WIDTH), draw(BATCH, SOURCE, SOURCE_WIDTH)
    parameters = layer(4, 2, source=SOURCE_WIDTH)
    keep = np.asarray([[True] * SOURCE, [True, False, True, False]])
    for rope in (None, Rotary("half", width=2)):
        output, weights = by_definition(x, parameters, context, rope, mask=oracle.padding(keep))
        result = multi_head_attention(
            library.array(x), parameters.on(library), heads=4, kv_heads=2, context=library.array(context),
            mask=masks.padding(library.array(keep)), rope=rope, return_weights=True,
        )  # fmt: skip
        close(library, result.output, output)
        assert result.weights is not None
        close(library, result.weights, weights)


@pytest.mark.parametrize("rope", [eager(Rotary("half")), eager(Rotary("interleaved", 100.0)), Rotary("half", 500.0, 2)])
def test_rotary_positions(library: Library, rope: Rotary) -> None:
    """Queries and keys turn at 0, 1, ..., at q_start + i, or at the positions given."""
    x, parameters = draw(BATCH, LENGTH, WIDTH), layer(4, 2)
    own, arrays = library.array(x), parameters.on(library)
    options: dict[str, Any] = {"heads": 4, "kv_heads": 2, "causal": True, "rope": rope}
    expected = by_definition(x, parameters, rope=rope, causal_too=True)[0]
    close(library, multi_head_attention(own, arrays, **options).output, expected)
    shifts: list[Any] = [7, [7, 300], library.array(np.asarray([7, 300])), np.asarray([7, 300])]
    for start in shifts[-2:-1] if library.slow else shifts:  # which changes positions, but no difference of positions
        shifted = multi_head_attention(own, arrays, **options, q_start=start, k_start=start)
        close(library, shifted.output, expected, atol=1e-9)
    positions = np.asarray([[3, 1, 4, 1, 5], [0, 0, 2, 7, 1]])
    expected = by_definition(x, parameters, rope=rope, positions=positions, causal_too=True)[0]
    forms: list[Any] = [library.array(positions), positions, positions.tolist()]
    for at in forms[:1] if library.slow else forms:
        close(library, multi_head_attention(own, arrays, **options, positions=at).output, expected)


def test_left_padding_with_positions(library: Library) -> None:
    """A left-padded entry gives at its kept tokens what it gives without padding."""
    x, parameters, pads = draw(BATCH, LENGTH, WIDTH), layer(4, 2), 2
    keep = np.asarray([[True] * LENGTH, [False] * pads + [True] * (LENGTH - pads)])
    positions = np.maximum(np.cumsum(keep, axis=1) - 1, 0)
    result = multi_head_attention(
        library.array(x), parameters.on(library), heads=4, kv_heads=2, causal=True, rope=Rotary("half"),
        mask=masks.padding(library.array(keep)), positions=library.array(positions),
    )  # fmt: skip
    alone = by_definition(x[1:, pads:], parameters, rope=Rotary("half"), causal_too=True)[0]
    close(library, result.output[1:, pads:, ...], alone)
    close(library, result.output[:1, ...], by_definition(x[:1], parameters, rope=Rotary("half"), causal_too=True)[0])


def test_options_reach_attention(library: Library) -> None:
    """scale, soft cap, bias, sinks and masks mean what they mean for attention."""
    x, parameters, sinks, bias = draw(BATCH, LENGTH, WIDTH), layer(4, 2), draw(4), draw(4, LENGTH, LENGTH)
    result = multi_head_attention(
        library.array(x), parameters.on(library), heads=4, kv_heads=2, causal=False, scale=-0.5, softcap=1.5,
        sinks=library.array(sinks), bias=library.array(bias), mask=masks.window(1, 2), return_weights=True,
    )  # fmt: skip
    output, weights = by_definition(
        x, parameters, scale=-0.5, softcap=1.5, sinks=sinks, bias=oracle.array_bias(bias), mask=oracle.window(1, 2)
    )
    close(library, result.output, output)
    assert result.weights is not None
    close(library, result.weights, weights)


@NOT_JAX
def test_a_pooled_layer_is_the_mean(library: Library) -> None:
    """Each key/value head of a pooled layer, biases included, is the mean of its group; the rest stays as it was."""
    parameters = layer(4, 4)
    arrays = parameters.on(library)
    pooled = arrays.pooled(heads=4, kv_heads=2)
    for name, w, before in zip(AttentionWeights._fields, pooled, parameters.weights, strict=True):
        expected = before
        if name in ("w_k", "w_v", "b_k", "b_v"):
            heads = np.split(before, 4, axis=-1)
            expected = np.concatenate([(heads[0] + heads[1]) / 2, (heads[2] + heads[3]) / 2], axis=-1)
        close(library, w, expected)
    few = Layer(4, 2, AttentionWeights(*(library.host(w) for w in pooled)))
    x = draw(BATCH, LENGTH, WIDTH)
    result = multi_head_attention(library.array(x), pooled, heads=4, kv_heads=2)
    close(library, result.output, by_definition(x, few)[0])
    refused: list[tuple[str, Any, Any, str]] = [
        ("heads", 0, 1, ">= 1"), ("kv_heads", 4, 2.0, ">= 1"), ("kv_heads", 4, 3, "divisor of heads = 4"),
        ("w_k", 5, 5, "divisible by heads = 5"),
    ]  # fmt: skip
    for argument, heads_given, kv_heads, word in refused:
        assert_refused(errors.HeadSplitError, argument, (word,), arrays.pooled, heads_given, kv_heads)


def test_paths_of_a_layer(library: Library) -> None:
    """A layer takes a path as attention does; weights come with the dense one alone, named or not."""
    x, parameters = library.array(draw(BATCH, LENGTH, WIDTH)), layer(4, 2)
    call: dict[str, Any] = {"heads": 4, "kv_heads": 2, "causal": True}
    weights = parameters.on(library)
    expected = by_definition(library.host(x), parameters, causal_too=True)[0]
    for options in ({"path": "tiled"}, {"path": "dense", "return_weights": True}):
        close(library, multi_head_attention(x, weights, **call, **options).output, expected)
    refused = {**call, "path": "tiled", "return_weights": True}
    assert_refused(errors.LayerError, "path", ("return_weights", "tiled"), multi_head_attention, x, weights, **refused)


def test_low_precisions(library: Library, storage_dtype: str) -> None:
    """Every product is taken in at least float32; the dtype of x comes back."""
    x, parameters = draw(BATCH, LENGTH, WIDTH), layer(4, 2)
    own, arrays = library.array(x, storage_dtype), parameters.on(library, storage_dtype)
    rounded = Layer(4, 2, AttentionWeights(*(library.host(w).astype(np.float64) for w in arrays)))
    expected = by_definition(library.host(own).astype(np.float64), rounded, causal_too=True)[0]
    result = multi_head_attention(own, arrays, heads=4, kv_heads=2, causal=True, return_weights=True)
    assert result.output.dtype == own.dtype
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[storage_dtype]
    # Three roundings to the storage dtype, each amplified by sums of about ten terms of size one.
    np.testing.assert_allclose(library.host(result.output), expected, rtol=0, atol=60 * unit)


# ---- caches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [eager([1, 1, 1, 1, 1]), [3, 2], eager([0, 4, 0, 1])])
@pytest.mark.parametrize("rope", [eager(None), Rotary("interleaved", width=2)])
def test_cached_equals_one_full_pass(library: Library, chunks: list[int], rope: Rotary | None) -> None:
    """Token by token, or prefill and decode in any chunks, outputs and weights are those of a full causal pass."""
    x, parameters = draw(BATCH, LENGTH, WIDTH), layer(4, 2)
    arrays = parameters.on(library)
    output, weights = by_definition(x, parameters, rope=rope, causal_too=True)
    cache: Any = KVCache.allocate(arrays.w_q, BATCH, 2, LENGTH + 2, 4, 3)
    start = 0
    for count in chunks:
        tokens = library.array(x[:, start : start + count])
        result = multi_head_attention(tokens, arrays, heads=4, kv_heads=2, rope=rope, cache=cache, return_weights=True)
        stop, cache = start + count, result.cache
        assert cache is not None
        assert cache.length == stop
        close(library, result.output, output[:, start:stop])
        assert result.weights is not None
        close(library, result.weights, weights[:, :, start:stop, :stop])
        start = stop


def test_cached_without_causality(library: Library) -> None:
    """With causal=False a chunk sees all of itself; a mask has as many keys as the cache then holds."""
    x, parameters = draw(BATCH, LENGTH, WIDTH), layer(4, 2)
    arrays = parameters.on(library)
    first = multi_head_attention(
        library.array(x[:, :2]), arrays, heads=4, kv_heads=2, cache=KVCache.allocate(arrays.w_q, BATCH, 2, 8, 4, 3)
    )
    result = multi_head_attention(
        library.array(x[:, 2:]), arrays, heads=4, kv_heads=2, cache=first.cache, causal=False,
        mask=masks.padding([[True] * LENGTH, [False] + [True] * (LENGTH - 1)]),
    )  # fmt: skip
    keep = np.ones((BATCH, LENGTH), dtype=bool)
    keep[1, 0] = False
    expected = by_definition(x, parameters, mask=oracle.padding(keep))[0]
    close(library, result.output, expected[:, 2:])


REFUSED: dict[str, dict[str, Any]] = {
    "negative soft cap": {"softcap": -1.0},
    "integer mask": {"mask": np.ones((1, 3), dtype=int)},
    "mask of another shape": {"mask": np.ones((3, 3), dtype=bool)},
    "bias": {"bias": 1.0},
    "path": {"path": "magic"},
    "causal": {"causal": 1},
    "unknown option": {"no_such_option": 1},
    "positions": {"positions": [0, 1], "rope": Rotary("half")},
    "q_start": {"q_start": 1.5},
    "return_weights": {"return_weights": 1},
    "heads": {"heads": 3},
    "rope": {"rope": "half"},
    "weights": {"weights": None},
    "over capacity": {"x": draw(BATCH, 7, WIDTH)},
    "another batch": {"x": draw(BATCH + 1, 2, WIDTH)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_leaves_the_cache_as_it_was(library: Library, name: str) -> None:
    """After any refused call the cache holds what it held, and going on with it gives the full pass."""
    x, parameters = draw(BATCH, LENGTH, WIDTH), layer(4, 2)
    arrays = parameters.on(library)
    options: dict[str, Any] = {"heads": 4, "kv_heads": 2}
    empty = KVCache.allocate(arrays.w_q, BATCH, 2, LENGTH + 3, 4, 3)
    cache = multi_head_attention(library.array(x[:, :2]), arrays, **options, cache=empty).cache
    assert cache is not None
    before = [library.host(a[:, :, :2, :]).tobytes() for a in (cache.k, cache.v)]
    change = dict(REFUSED[name])
    tokens = library.array(change.pop("x", x[:, 2:3]))
    weights = change.pop("weights", arrays)
    with pytest.raises((errors.RefattnError, TypeError)):
        multi_head_attention(tokens, weights, **{**options, **change}, cache=cache)
    assert cache.length == 2
    assert [library.host(a[:, :, :2, :]).tobytes() for a in (cache.k, cache.v)] == before
    result = multi_head_attention(library.array(x[:, 2:]), arrays, **options, cache=cache)
    close(library, result.output, by_definition(x, parameters, causal_too=True)[0][:, 2:])


@pytest.mark.library("torch")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_cached_layer_compiles_whole(library: Library, dynamic: bool) -> None:
    """Prefill and decode with a cache and RoPE are one graph for torch.compile, of fixed or open sizes."""
    torch = importlib.import_module("torch")
    x, parameters = library.array(draw(BATCH, LENGTH, WIDTH)), layer(4, 2)

    def steps(x: Any, *weights: Any) -> Any:
        cache = KVCache.allocate(x, BATCH, 2, LENGTH, 4, 3)
        options: dict[str, Any] = {"heads": 4, "kv_heads": 2, "rope": Rotary("half")}
        first = multi_head_attention(x[:, :3], AttentionWeights(*weights), **options, cache=cache)
        return multi_head_attention(x[:, 3:], AttentionWeights(*weights), **options, cache=first.cache).output

    torch._dynamo.reset()
    compiled = torch.compile(steps, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    expected = by_definition(library.host(x), parameters, rope=Rotary("half"), causal_too=True)[0]
    close(library, compiled(x, *parameters.on(library)), expected[:, 3:])


@pytest.mark.library("torch")
def test_the_first_call_of_a_process_may_be_compiled(library: Library) -> None:
    """torch.compile traces attention although no call has met PyTorch's arrays before."""
    program = (
        "import torch, refattn; q = torch.ones(2, 4, 3); "
        "f = torch.compile(lambda q: refattn.attention(q, q, q, causal=True), fullgraph=True, backend='aot_eager'); "
        "assert torch.allclose(f(q), q)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
