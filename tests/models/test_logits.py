"""Logits of small decoders on refattn and on eager attention, within a bound that is derived for each of them."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from models.attention_functions import register, scaled_by_model_width, scaled_one_percent_off
from models.decoder_bound import LOCAL, Watched, eager_attention, golden
from models.decoders import DECODERS, batch, build
from models.error_bound import UNIT_ROUNDOFF
from models.judged import AT_ONCE, LENGTH, PADDINGS, STEPS, Judged, inputs, judged, run
from refattn_backends.transformers import attention_forward

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@DTYPES
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_keep_to_the_bound(name: str, padding: str, dtype: torch.dtype) -> None:
    """A full pass on refattn, and a prefill with cached steps after it, keep to the bound of the exact logits.

    So does eager attention, and both keep to twice the bound of each other. Rows of padding are not judged.
    """
    given = judged(name, padding)
    model, both = given.models[dtype], 1.0 if dtype == torch.float32 else 2.0  # the exact run is in float64 itself
    eager = run(model, given.batch, "eager")
    assert given.ratio(eager, given.exact) <= both
    for stops in (AT_ONCE,) if padding == "right" else (AT_ONCE, STEPS):
        actual = run(model, given.batch, attention_forward, stops)
        print(f"error over bound: {given.ratio(actual, given.exact):.2g}")
        assert given.ratio(actual, given.exact) <= both
        assert given.ratio(actual, eager) <= 2


def test_every_local_bound_covers_its_operation() -> None:
    """Each float32 operation of a run on refattn errs by its local bound at most: the premise of the analysis."""
    ratios: dict[str, float] = {}

    def see(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        name = func.__name__
        # An addition meets its bound by IEEE arithmetic, and one that is done in place has lost its operands.
        if name in LOCAL and result.dtype == torch.float32 and name != "index_add_":
            exact = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in args]
            wide = {key: torch.float64 if x is torch.float32 else x for key, x in kwargs.items()}
            expected = func(*exact, **wide)
            bound = UNIT_ROUNDOFF[torch.float32] * LOCAL[name](expected, *exact, **wide)
            error = (result.double() - expected).abs()
            assert bool((error <= bound).all()), name
            ratios[name] = max(ratios.get(name, 0.0), float((error / bound.clamp(min=1e-300)).max()))

    watched = Watched(see)
    register("judged", watched.unseen(attention_forward))
    for config in DECODERS.values():
        model = build(config)
        model.set_attn_implementation("judged")
        with torch.no_grad(), watched:
            model(**inputs(batch("left", LENGTH)))
    print(f"error over local bound: {ratios}")
    assert set(ratios) == set(LOCAL) - {"index_add_"}


def against_eager(given: Judged, attention: Any, dtype: torch.dtype) -> float:
    """The largest difference of a full pass from eager's, over what two correct runs may differ by."""
    actual, eager = (run(given.models[dtype], given.batch, function) for function in (attention, "eager"))
    return given.ratio(actual, eager) / 2


def window_one_wider(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
    """A fault: a window shows one older key."""
    mask = mask | torch.nn.functional.pad(mask, (0, 1))[..., 1:]
    return attention_forward(module, q, k, v, mask, **options)


def without_soft_cap(module: Any, *tensors: Tensor, **options: Any) -> Any:
    """A fault: the soft cap is ignored."""
    return attention_forward(module, *tensors, **options | {"softcap": None})


def without_sinks(module: Any, *tensors: Tensor, **options: Any) -> Any:
    """A fault: the sinks are ignored."""
    return attention_forward(module, *tensors, **options | {"s_aux": None})


def tiled_heads(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
    """A fault: query head h takes key head h % Hkv (G1)."""
    k, v = (x.repeat(1, q.shape[1] // k.shape[1], 1, 1) for x in (k, v))
    return attention_forward(module, q, k, v, mask, **options)


def without_padding_mask(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
    """A fault: padding is attended."""
    return attention_forward(module, q, k, v, torch.ones_like(mask).tril(mask.shape[-1] - mask.shape[-2]), **options)


FAULTS = [
    *((fault, name, "") for name in DECODERS for fault in (tiled_heads, scaled_by_model_width)),
    *((window_one_wider, name, "") for name in ("Mistral", "Gemma2", "gpt-oss")),
    (without_soft_cap, "Gemma2", ""),
    (without_sinks, "gpt-oss", ""),
    (without_padding_mask, "Llama", "left"),
]


@DTYPES
@pytest.mark.parametrize(("fault", "name", "padding"), FAULTS)
def test_a_planted_fault_exceeds_the_bound(fault: Any, name: str, padding: str, dtype: torch.dtype) -> None:
    """Against eager attention each fault is ten times as far off as two correct runs can be."""
    ratio = against_eager(judged(name, padding), fault, dtype)
    print(f"error over bound: {ratio:.2g}")
    assert 10 < ratio < torch.inf  # not by a NaN


@DTYPES
@pytest.mark.parametrize("name", DECODERS)
def test_a_small_planted_fault_exceeds_the_bound(name: str, dtype: torch.dtype) -> None:
    """A scale that is 1 % off is more than rounding can explain, in float64 by far."""
    ratio = against_eager(judged(name, ""), scaled_one_percent_off, dtype)
    print(f"error over bound: {ratio:.2g}")
    assert ratio > (1 if dtype == torch.float32 else 1e8)


class Call(NamedTuple):
    """The largest error over bound of one layer's attention, and of eager's on the same inputs."""

    ours: float
    eager: float


def bfloat16_calls(name: str, padding: str, attention: Any, stops: tuple[int, ...]) -> list[Call]:
    """Every call of a run in bfloat16, judged on its own inputs, and so is eager attention on the same ones.

    Rows of padding see no key, and eager averages there: they are left out.
    """
    calls = []

    def judging(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        output, weights = attention(module, q, k, v, mask, **options)
        eager, _ = eager_attention(module, q, k, v, mask, **options)
        exact = golden(module, q, k, v, mask, **options)
        some = mask.any(-1).transpose(1, 2).numpy()[..., 0]  # (B, L)
        expected = exact.output.swapaxes(1, 2)[some]
        fused, unfused = (exact.bound("bfloat16", model, True).swapaxes(1, 2)[some] for model in ("fused", "unfused"))
        ours, theirs = (np.abs(x.double().numpy()[some] - expected) for x in (output, eager))
        assert np.isfinite(unfused).all()
        calls.append(Call((ours / fused).max(), (theirs / unfused).max()))
        return output, weights

    run(build(DECODERS[name], torch.bfloat16), batch(padding, LENGTH), judging, stops)
    return calls


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", DECODERS)
def test_each_call_in_bfloat16_keeps_to_its_own_bound(name: str, padding: str) -> None:
    """In bfloat16 refattn keeps to "fused", and eager, which stores scores and weights, to "unfused".

    Call by call, because the first-order bound of a whole model says nothing where one rounding is 2^-8.
    """
    stops = AT_ONCE if padding == "right" else STEPS
    calls = bfloat16_calls(name, padding, attention_forward, stops)
    print(*(f"{key}: {max(of):.2g}" for key, of in zip(Call._fields, zip(*calls, strict=True), strict=True)))
    assert len(calls) == 2 * len(stops)
    assert max(call.ours for call in calls) <= 1
    assert max(call.eager for call in calls) <= 1


@pytest.mark.parametrize(("fault", "name", "padding"), FAULTS)
def test_a_planted_fault_shows_in_bfloat16(fault: Any, name: str, padding: str) -> None:
    """In bfloat16 too each fault is ten times as far off as a call may be."""
    ratio = max(call.ours for call in bfloat16_calls(name, padding, fault, AT_ONCE))
    print(f"error over bound: {ratio:.2g}")
    assert 10 < ratio < torch.inf  # not by a NaN
