"""The layer as a module of PyTorch: what it computes, what it is made of, and that it learns."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import numpy as np
import pytest

import refattn
from refattn import AttentionWeights, KVCache, Rotary, errors, masks

pytestmark = pytest.mark.library("torch")

torch: Any = pytest.importorskip("torch", reason="the module is PyTorch's, which is not installed")
MultiHeadAttention: Any = importlib.import_module("refattn_backends.torch_layer").MultiHeadAttention
BATCH, TOKENS, WIDTH, HEADS = 2, 10, 64, 4
NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same parameters and inputs each time."""
    torch.manual_seed(7)


class Readable(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Causal multi-head attention written out, as it is taught."""

    def __init__(self, width: int, heads: int, **made: Any) -> None:
        super().__init__()
        self.heads = heads
        for name in NAMES:
            setattr(self, name, torch.nn.Linear(width, width, bias=False, **made))

    def forward(self, x: Any) -> tuple[Any, Any]:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).movedim(-2, -3) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        logits = (torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        weights = logits.softmax(-1)
        return self.out_proj(torch.einsum("bhij,bhjd->bihd", weights, v).flatten(-2)), weights


def close(actual: Any, expected: Any) -> None:
    """Equal as far as float64 goes."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def moved(layer: Any) -> Any:
    """The layer with biases other than 0, which is what they begin with."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return layer


# ---- what it computes -------------------------------------------------------------------------------------


def test_it_is_the_readable_layer() -> None:
    """2 x 10 x 64 in 4 heads: with the state_dict of a layer written out, the same output, weights and gradients."""
    readable, layer = (
        Readable(WIDTH, HEADS).double(),
        MultiHeadAttention(WIDTH, HEADS, causal=True, dtype=torch.float64),
    )
    layer.load_state_dict(readable.state_dict())
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    (output, weights), (expected, expected_weights) = layer(x), readable(x)
    assert output.shape == (2, 10, 64) and weights.shape == (2, 4, 10, 10)
    close(output, expected)
    close(weights, expected_weights)
    assert weights[..., 0, 1:].count_nonzero() == 0
    for each in (output, expected):
        each.square().sum().backward()
    for name in NAMES:
        close(getattr(layer, name).weight.grad, getattr(readable, name).weight.grad)


def test_one_head_without_projection() -> None:
    """2 x 3 tokens of width 8 with d_k = 4 and d_v = 5: three matrices, and attention over [batch, tokens, width]."""
    layer = MultiHeadAttention(8, 1, d_k=4, d_v=5, project=False, causal=True, dtype=torch.float64)
    assert {name: tuple(w.shape) for name, w in layer.state_dict().items()} == {
        "q_proj.weight": (4, 8), "k_proj.weight": (4, 8), "v_proj.weight": (5, 8)
    }  # fmt: skip
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    output, weights = layer(x)
    q, k, v = (x @ getattr(layer, name).weight.T for name in NAMES[:3])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert output.shape == (2, 3, 5) and weights.shape == (2, 1, 3, 3)
    close(output, expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "a context of another width": {"kdim": 6, "vdim": 6},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_torch_multihead_attention(name: str, masked: bool) -> None:
    """From torch.nn.MultiheadAttention: the same output and weights, and the same gradients of x and parameters."""
    theirs = moved(torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, **OPTIONS[name]))
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    context = torch.randn(2, 7, OPTIONS[name].get("kdim", 12), dtype=torch.float64, requires_grad=True)
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[1, 4:] = False
    expected, expected_weights = theirs(
        x, context, context, key_padding_mask=~keep if masked else None, average_attn_weights=False
    )
    output, weights = ours(x, context, mask=masks.padding(keep) if masked else None)
    close(output, expected)
    close(weights, expected_weights)
    direction = torch.randn_like(output)
    found, wanted = (
        torch.autograd.grad(each, [x, context, *module.parameters()], direction)
        for each, module in ((output, ours), (expected, theirs))
    )
    close(found[:2], wanted[:2])
    gradients = dict(zip((name for name, _ in theirs.named_parameters()), wanted[2:], strict=True))
    stacked = [gradients[f"{one}_proj_weight"] for one in "qkv"] if "kdim" in OPTIONS[name] else []
    expected_matrices = stacked or [*gradients["in_proj_weight"].chunk(3)]
    mine = dict(zip((name for name, _ in ours.named_parameters()), found[2:], strict=True))
    for one, wanted_matrix in zip(NAMES, [*expected_matrices, gradients["out_proj.weight"]], strict=True):
        close(mine[f"{one}.weight"], wanted_matrix)
    if "in_proj_bias" in gradients:
        for one, bias in zip(NAMES, [*gradients["in_proj_bias"].chunk(3), gradients["out_proj.bias"]], strict=True):
            close(mine[f"{one}.bias"], bias)


def test_gradients_are_those_of_differences() -> None:
    """Grouped heads, rotary positions, a window and an empty row: autograd agrees with finite differences."""
    layer = moved(
        MultiHeadAttention(6, 2, kv_heads=1, d_k=4, d_v=3, bias=True, rope=Rotary("half"), dtype=torch.float64)
    )
    keep = torch.tensor([[False, True, True, True]])
    options = {"causal": True, "mask": masks.window(1, 0) & masks.padding(keep), "return_weights": False}
    x = torch.randn(1, 4, 6, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def call(x: Any, *parameters: Any) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,), options)[0]

    assert torch.autograd.gradcheck(call, (x, *layer.parameters()))


def test_caches_continue() -> None:
    """With a cache the third field is the cache, and prefill and decode give what one causal pass gives."""
    layer = moved(MultiHeadAttention(16, 4, kv_heads=2, bias=True, rope=Rotary("half"), dtype=torch.float64)).eval()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    with torch.no_grad():
        expected, weights = layer(x, causal=True)
        cache = KVCache.allocate(x, 2, layer.kv_heads, 6, layer.d_k, layer.d_v)
        for start, stop in ((0, 3), (3, 5), (5, 6)):
            output, part, cache = layer(x[:, start:stop], cache=cache)
            close(output, expected[:, start:stop])
            close(part, weights[:, :, start:stop, :stop])
        cache = KVCache.allocate(x, 2, layer.kv_heads, 6, layer.d_k, layer.d_v)
        padded = layer(x[:, :4], cache=cache, counts=[4, 1])
        close(padded.output[0], expected[0, :4])
        close(padded.output[1, :1], expected[1, :1])
        assert padded.cache.length.tolist() == [4, 1]


# ---- pooling ----------------------------------------------------------------------------------------------


def test_pooling_equal_heads_changes_nothing() -> None:
    """Where the heads of a group are equal, the layer with one of them in their place computes the same."""
    layer = moved(MultiHeadAttention(12, 6, kv_heads=2, d_k=4, bias=True, causal=True, dtype=torch.float64))
    weights = layer.as_weights()
    repeated = {
        name: w.unflatten(-1, (2, 1, 4)).expand(*w.shape[:-1], 2, 3, 4).flatten(-3)
        for name, w in weights._asdict().items()
        if name in ("w_k", "w_v", "b_k", "b_v")
    }
    wide = MultiHeadAttention.from_weights(weights._replace(**repeated), heads=6, causal=True)
    pooled, x = wide.pooled(2), torch.randn(2, 5, 12, dtype=torch.float64)
    close(pooled(x), wide(x))
    assert pooled.kv_heads == 2 and [*pooled.state_dict()] == [*wide.state_dict()] == [*layer.state_dict()]
    for name, w in layer.state_dict().items():
        close(pooled.state_dict()[name], w)


def test_pooling_is_the_mean() -> None:
    """Keys and values of the pooled layer are the means over each group of the layer's own; it goes on alone."""
    layer = moved(MultiHeadAttention(16, 4, bias=True, rope=Rotary("half"), causal=True, dtype=torch.float64)).eval()
    pooled, x = layer.pooled(2), torch.randn(2, 5, 16, dtype=torch.float64)
    for name in ("k_proj", "v_proj"):
        heads = getattr(layer, name)(x).unflatten(-1, (2, 2, 4)).mean(-2)
        close(getattr(pooled, name)(x), heads.flatten(-2))
    assert (pooled.rope, pooled.causal, pooled.training, pooled.kv_heads) == (layer.rope, True, False, 2)
    assert {w.data_ptr() for w in pooled.parameters()}.isdisjoint(w.data_ptr() for w in layer.parameters())
    for kv_heads in (3, 0, 8):
        with pytest.raises(errors.HeadSplitError):
            layer.pooled(kv_heads)


# ---- a module among modules -------------------------------------------------------------------------------


def test_parameters_begin_as_documented() -> None:
    """Matrices are uniform within sqrt(6 / (rows + columns)), biases 0, and reset_parameters draws anew."""
    layer = MultiHeadAttention(32, 4, kv_heads=2, bias=True, context_width=24)
    before = {name: w.clone() for name, w in layer.state_dict().items()}
    assert [*before] == [f"{name}.{kind}" for name in NAMES for kind in ("weight", "bias")]
    layer.reset_parameters()
    for name, w in layer.state_dict().items():
        if name.endswith("bias"):
            assert w.count_nonzero() == 0
        else:
            edge = (6 / sum(w.shape)) ** 0.5
            assert 0.9 * edge < w.abs().max() <= edge and not torch.equal(w, before[name])
    assert (layer.k_proj.weight.shape, layer.out_proj.weight.shape) == ((16, 24), (32, 32))


def test_what_modules_can_do() -> None:
    """It is copied, saved and restored, moved between dtypes and devices, and says what it is."""
    layer = MultiHeadAttention(16, 4, kv_heads=2, rope=Rotary("half"), causal=True)
    x = torch.randn(2, 5, 16)
    copied, restored = copy.deepcopy(layer), MultiHeadAttention(16, 4, kv_heads=2, rope=Rotary("half"), causal=True)
    restored.load_state_dict(layer.state_dict())
    for other in (copied, restored):
        assert torch.equal(other(x)[0], layer(x)[0])
    with torch.no_grad():
        copied.q_proj.weight.zero_()
    assert not torch.equal(copied(x)[0], layer(x)[0])
    half = restored.half()(x.half())
    assert (half[0].dtype, half[1].dtype) == (torch.float16, torch.float32)  # weights have the compute dtype (L5)
    torch.testing.assert_close(half[0].float(), layer(x)[0], rtol=0.05, atol=0.01)
    assert layer(x, return_weights=False)[1] is None
    on_meta = MultiHeadAttention(16, 4, kv_heads=2, device="meta", dtype=torch.bfloat16)
    output, weights = on_meta(torch.empty(2, 5, 16, device="meta", dtype=torch.bfloat16))
    assert (output.device.type, output.dtype, weights.shape) == ("meta", torch.bfloat16, (2, 4, 5, 5))
    assert "heads=4, kv_heads=2, d_k=4, d_v=4, causal=True, rope=Rotary(style='half'" in repr(layer)


@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_it_compiles_and_exports(path: str) -> None:
    """torch.compile takes it as one graph, backward included, and torch.export makes a program of it."""
    layer = moved(
        MultiHeadAttention(16, 4, kv_heads=2, bias=True, rope=Rotary("half"), causal=True, dtype=torch.float64)
    )
    x, options = torch.randn(2, 5, 16, dtype=torch.float64), {"path": path, "return_weights": path == "dense"}
    expected = layer(x)[0]
    expected.square().sum().backward()
    gradients = {name: w.grad.clone() for name, w in layer.named_parameters()}
    layer.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, **options)[0]
    close(compiled, expected)
    compiled.square().sum().backward()
    for name, w in layer.named_parameters():
        close(w.grad, gradients[name])
    close(torch.export.export(layer, (x,), options).module()(x, **options)[0], expected)


def test_autocast() -> None:
    """Under autocast the layer casts as nn.Linear does: 16 bits in or out, trained in float32; float64 stays."""
    layer = moved(MultiHeadAttention(WIDTH, HEADS, kv_heads=2, bias=True, causal=True))
    x = torch.randn(BATCH, TOKENS, WIDTH)
    half = copy.deepcopy(layer).bfloat16()
    expected, _ = half(x.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (x, x.bfloat16()):
            output, _ = layer(given)
            assert output.dtype == torch.bfloat16
            assert torch.equal(output, expected)
        assert layer.double()(x.double())[0].dtype == torch.float64
    layer = layer.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)[0].float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


def test_what_is_fed_is_blamed() -> None:
    """x and the context are blamed for their width, dtype or library, and not the layer's own parameters."""
    layer, x = MultiHeadAttention(8, 2, context_width=6), torch.randn(2, 3, 8)
    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (errors.LayerError, (x[..., :5], x[..., :6]), "x"),
        (errors.LayerError, (x.double(), x[..., :6].double()), "x"),
        (errors.LibraryMismatchError, (x.numpy(), x[..., :6].numpy()), "x"),
        (errors.DeviceMismatchError, (x.to("meta"), x[..., :6].to("meta")), "x"),
        (errors.LayerError, (x, x), "context"),
        (errors.LayerError, (x,), "context"),
        (errors.LayerError, (x, x[..., :6].double()), "context"),
    ]
    for error, arguments, argument in cases:
        with pytest.raises(error) as raised:
            layer(*arguments)
        assert raised.value.argument == argument, raised.value


def test_it_learns_to_look_up() -> None:
    """Of ten events one is marked, and the last one asks for its value: trained, the weight ends on the marked one."""
    generator = torch.Generator().manual_seed(0)

    def batch(count: int) -> tuple[Any, Any, Any]:
        x = torch.randn(count, 10, 6, generator=generator)
        at = torch.randint(0, 9, (count,), generator=generator)
        x[..., 4:] = 0
        x[torch.arange(count), at, 4] = 1.0
        x[:, -1, 5] = 1.0
        return x, x[torch.arange(count), at, :4], at

    layer = MultiHeadAttention(6, 2, d_k=8, d_v=8, out_width=4, causal=True)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    for _ in range(150):
        x, values, _ = batch(64)
        loss = torch.nn.functional.mse_loss(layer(x, return_weights=False)[0][:, -1], values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, values, at = batch(256)
    output, weights = layer(x)
    assert torch.nn.functional.mse_loss(output[:, -1], values) < 0.05
    assert (weights[:, :, -1].mean(1).argmax(-1) == at).double().mean() > 0.95


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"add_bias_kv": True}, "add_bias_kv: expected False; got True"),
        ({"add_zero_attn": True}, "add_zero_attn: expected False; got True"),
        ({"kdim": 3, "vdim": 5}, "kdim: expected 5; got 3"),
        ({"dropout": 0.5}, "dropout, while it trains: expected 0.0; got 0.5"),
    ],
)
def test_what_this_layer_lacks_is_refused(options: dict[str, Any], words: str) -> None:
    """A MultiheadAttention with more than this layer has is an error that says with what."""
    with pytest.raises(errors.LayerError, match=words):
        MultiHeadAttention.from_torch(torch.nn.MultiheadAttention(12, 3, **options))


def test_dropout_is_none_in_evaluation() -> None:
    """A trained layer with dropout is taken in eval mode, in which it drops nothing, and stays in it."""
    theirs = torch.nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True, dtype=torch.float64).eval()
    ours, x = MultiHeadAttention.from_torch(theirs), torch.randn(2, 5, 12, dtype=torch.float64)
    close(ours(x)[0], theirs(x, x, x, need_weights=False)[0])
    assert not ours.training


@pytest.mark.parametrize(
    ("error", "argument", "arguments", "options"),
    [
        (errors.LayerError, "width", (12, 5), {}),
        (errors.LayerError, "heads", (12, 0), {}),
        (errors.LayerError, "heads", (12, 2.0), {}),
        (errors.LayerError, "d_v", (12, 3), {"d_v": -1}),
        (errors.LayerError, "rope", (12, 3), {"rope": "half"}),
        (errors.HeadCountError, "heads", (12, 4), {"kv_heads": 3}),
    ],
)
def test_sizes_that_do_not_fit(error: Any, argument: str, arguments: Any, options: dict[str, Any]) -> None:
    """Sizes, head counts and rope are checked when the layer is made, in the words of refattn."""
    with pytest.raises(error) as raised:
        MultiHeadAttention(*arguments, **options)
    assert raised.value.argument == argument


def test_weights_that_do_not_fit() -> None:
    """from_weights and from_torch refuse what the layer would refuse; heads without a divisor too."""
    one = torch.ones
    square = AttentionWeights(one(8, 8), one(8, 8), one(8, 8))
    cases: list[tuple[Any, Any, str]] = [(square._replace(w_k=one(8, 6)), 2, "w_k"), (None, 2, "weights")]
    cases += [(square, heads, "w_q" if heads == 3 else "heads") for heads in (0, 3, 2.0)]
    for weights, heads, argument in cases:
        with pytest.raises(errors.LayerError) as raised:
            MultiHeadAttention.from_weights(weights, heads=heads)
        assert raised.value.argument == argument
    with pytest.raises(errors.LayerError, match="Linear"):
        MultiHeadAttention.from_torch(torch.nn.Linear(2, 2))


def test_biases_may_be_there_one_by_one() -> None:
    """Parameters with biases on queries, keys and values alone make a layer with just these."""
    rng = np.random.default_rng(0)
    matrices = [torch.from_numpy(rng.standard_normal((8, 8))) for _ in range(4)]
    weights = AttentionWeights(*matrices, *(torch.from_numpy(rng.standard_normal(8)) for _ in range(3)))
    layer, x = MultiHeadAttention.from_weights(weights, heads=2), torch.from_numpy(rng.standard_normal((2, 3, 8)))
    assert layer.out_proj.bias is None and layer.q_proj.bias is not None
    close(layer(x, return_weights=False)[0], refattn.multi_head_attention(x, weights, heads=2).output)
