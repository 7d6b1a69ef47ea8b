"""A trained six-layer encoder on refattn: its embeddings, and a check on its queries, keys and values.

Runs are compared with the bounds of error_bound.py, at components that are drawn once with a fixed seed.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from models.attention_functions import register, scaled_by_model_width, scaled_one_percent_off
from models.encoder import (
    SENTENCES,
    Batch,
    capture,
    embed,
    exact_run,
    load,
    local_bound,
    plain_attention,
    tokenize,
    watched,
)
from models.error_bound import LAMBDA, UNIT_ROUNDOFF, Bounds, every, propagate, root
from refattn.cli import main
from refattn_backends.transformers import attention_forward
from refattn_backends.transformers import register as register_refattn

COMPONENTS = 32
LAYERS, HEADS, HEAD_WIDTH = 6, 12, 32


class Encoder(NamedTuple):
    """The encoder in two precisions, a padded batch, its exact embeddings and their error bounds."""

    models: dict[torch.dtype, Any]
    batch: Batch
    exact: Tensor
    components: list[int]
    bounds: Bounds

    def ratios(self, actual: Tensor, expected: Tensor, bound: Tensor) -> Tensor:
        """|actual - expected| over a bound in units of their roundoff, at the components, (components, batch)."""
        error = (actual.double() - expected.double()).abs()[:, self.components].T
        return error / (UNIT_ROUNDOFF[actual.dtype] * bound)

    def against_eager(self, attention: Any, bound: Tensor) -> float:
        """The largest error of a float32 run with this attention against eager's, over twice the bound."""
        register(attention.__name__, attention)
        model = self.models[torch.float32]
        actual, eager = (embed(model, self.batch, name) for name in (attention.__name__, "eager"))
        return float(self.ratios(actual, eager, 2 * bound).max())


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """The exact run and its analysis take seconds, so they are made once."""
    register_refattn()
    models = {dtype: load(dtype) for dtype in (torch.float32, torch.float64)}
    batch = tokenize(SENTENCES)
    exact, steps = exact_run(models[torch.float64], batch)
    drawn = torch.randperm(exact.shape[1], generator=torch.Generator().manual_seed(2))[:COMPONENTS].tolist()
    return Encoder(models, batch, exact.detach(), drawn, propagate(exact, drawn, steps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_embeddings_equal_those_of_eager_attention(encoder: Encoder, dtype: torch.dtype) -> None:
    """Two correct runs, each within the likely bound of the exact one, are within twice that bound."""
    actual, eager = (embed(encoder.models[dtype], encoder.batch, name) for name in ("refattn", "eager"))
    assert actual.dtype == eager.dtype == dtype
    ratios = encoder.ratios(actual, eager, 2 * encoder.bounds.likely)
    print(f"error over bound: {ratios.max().item():.2g}")
    assert bool((ratios <= 1).all())


def test_float32_embeddings_are_close_to_the_exact_ones(encoder: Encoder) -> None:
    """A float32 run lies within the likely bound of the float64 run, not only near another float32 run."""
    actual = embed(encoder.models[torch.float32], encoder.batch, "refattn")
    assert bool((encoder.ratios(actual, encoder.exact, encoder.bounds.likely) <= 1).all())


def test_every_local_bound_covers_its_operation(encoder: Encoder) -> None:
    """Each float32 operation of a refattn run errs by its local bounds at most: the premise of the analysis."""
    model = encoder.models[torch.float32]
    twins = dict(zip(model.modules(), encoder.models[torch.float64].modules(), strict=True))
    ratios: dict[str, float] = {}

    def see(kind: str, module: Any, inputs: tuple[Any, ...], result: Tensor) -> None:
        if kind == "sum":
            return  # an IEEE addition meets its bound by definition
        twin = twins[module]
        exact = tuple(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs)
        expected = plain_attention(twin, *exact)[0] if kind == "attention" else twin.forward(*exact)
        error = (result.double() - expected).abs() / UNIT_ROUNDOFF[torch.float32]
        for growth, factor in ((every, 1.0), (root, LAMBDA)):
            bound = factor * local_bound(growth, kind, twin, exact)
            ratios[kind] = max(ratios.get(kind, 0.0), (error / bound).max().item())

    with torch.no_grad(), watched(model, attention_forward, see):
        model(**encoder.batch)
    print(f"error over local bound: {ratios}")
    assert set(ratios) == {"linear", "norm", "gelu", "attention"}
    assert max(ratios.values()) <= 1


def without_padding_mask(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
    """A fault: padding is attended."""
    return attention_forward(module, q, k, v, torch.ones_like(mask), **options)


def causal_by_mistake(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
    """A fault: an encoder's query sees no later key."""
    return attention_forward(module, q, k, v, mask & torch.ones_like(mask).tril(), **options)


@pytest.mark.parametrize("fault", [without_padding_mask, causal_by_mistake, scaled_by_model_width])
def test_a_planted_fault_exceeds_the_certain_bound(encoder: Encoder, fault: Any) -> None:
    """The classic faults leave even the bound that no rounding can exceed, with room for both runs."""
    ratio = encoder.against_eager(fault, encoder.bounds.certain)
    print(f"error over certain bound: {ratio:.2g}")
    assert ratio > 1


def test_a_small_planted_fault_exceeds_the_likely_bound(encoder: Encoder) -> None:
    """The bound that correct runs meet is narrow enough to show a scale 1 % off through six layers."""
    ratio = encoder.against_eager(scaled_one_percent_off, encoder.bounds.likely)
    print(f"error over likely bound: {ratio:.2g}")
    assert ratio > 1


def test_padding_does_not_change_a_sentence(encoder: Encoder) -> None:
    """A sentence alone has the embedding that it has in the padded batch: padding is invisible (M11)."""
    model, lengths = encoder.models[torch.float32], encoder.batch["attention_mask"].sum(-1)
    assert lengths.max() > 4 * lengths.min()
    together = embed(model, encoder.batch, "refattn")
    alone = torch.cat([embed(model, tokenize((sentence,)), "refattn") for sentence in SENTENCES])
    assert bool((encoder.ratios(together, alone, 2 * encoder.bounds.likely) <= 1).all())


def test_what_stands_in_padding_influences_nothing(encoder: Encoder) -> None:
    """Other token ids in the padding leave every bit of the embeddings as it is (M19)."""
    model, keep = encoder.models[torch.float32], encoder.batch["attention_mask"] == 1
    ids = torch.where(keep, encoder.batch["input_ids"], 2023)
    assert not torch.equal(ids, encoder.batch["input_ids"])
    other = embed(model, {**encoder.batch, "input_ids": ids}, "refattn")
    assert torch.equal(other, embed(model, encoder.batch, "refattn"))


def test_captured_inputs_are_those_of_every_layer(encoder: Encoder) -> None:
    """Every layer yields q, k and v of all its heads in float32, its scale, and the padding as visibility."""
    problems = capture(encoder.models[torch.float32], SENTENCES)
    keep = encoder.batch["attention_mask"].numpy() == 1
    batch, length = keep.shape
    assert len(problems) == 5 * LAYERS
    for layer in range(LAYERS):
        q, k, v, mask, scale = (problems[f"layer{layer}.{key}"] for key in ("q", "k", "v", "mask", "scale"))
        assert q.shape == k.shape == v.shape == (batch, HEADS, length, HEAD_WIDTH)
        assert q.dtype == k.dtype == v.dtype == np.float32
        assert scale.shape == ()
        assert scale == HEAD_WIDTH**-0.5
        assert np.array_equal(mask, np.broadcast_to(keep[:, None, None, :], (batch, 1, length, length)))


def test_check_gives_a_verdict_on_captured_inputs(encoder: Encoder, tmp_path: Path) -> None:
    """`refattn check torch` judges torch's own kernel on every layer's q, k and v, in each dtype, and it passes."""
    inputs, report = tmp_path / "captured.npz", tmp_path / "report.json"
    problems: dict[str, Any] = capture(encoder.models[torch.float32], SENTENCES)
    np.savez(inputs, **problems)
    # Captured inputs are cases of S5 among others; the other cases of that clause run along.
    status = main(["check", "torch", "--clauses", "S5", "--inputs", str(inputs), "--json", str(report)])
    records = json.loads(report.read_text())["records"]
    for layer in range(LAYERS):
        verdicts = [record["verdict"] for record in records if record["case"] == f"inputs.layer{layer}"]
        assert verdicts
        assert set(verdicts) == {"pass"}
    assert status == 0
