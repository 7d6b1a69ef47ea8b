"""Where models of transformers depart from the specification: each is still so, and refattn does otherwise there."""

import importlib.util
from pathlib import Path

import pytest
import torch

from models.decoders import DECODERS, batch, build
from models.judged import AT_ONCE, LENGTH, inputs, judged, run
from refattn.conformance.reproductions import read_all
from refattn_backends.transformers import register as register_refattn

FILE = Path(__file__).parents[2] / "docs/scoreboard/reproductions/transformers_models.py"
REPRODUCTIONS = {one.function: one for one in read_all(FILE.parent) if one.path.name == FILE.name}
SPECIFICATION = importlib.util.spec_from_file_location(FILE.stem, FILE)


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_each_departure_of_a_model_is_still_there(name: str) -> None:
    """The reproduction that stands on the scoreboard shows what it says; where it fails, transformers has changed."""
    assert SPECIFICATION is not None and SPECIFICATION.loader is not None
    module = importlib.util.module_from_spec(SPECIFICATION)
    SPECIFICATION.loader.exec_module(module)
    getattr(module, name)()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_padding_makes_nothing_wrong_on_refattn(name: str, padding: str, dtype: torch.dtype) -> None:
    """With padding on either side, behind windows too, all logits are finite, and rows of padding weigh nothing."""
    register_refattn()
    model, given = build(DECODERS[name], dtype), batch(padding, LENGTH)
    model.set_attn_implementation("refattn")
    with torch.no_grad():
        result = model(**inputs(given), output_attentions=True)
    assert bool(result.logits.isfinite().all())
    if padding == "left":
        assert all(bool((weights.transpose(1, 2)[given.keep == 0] == 0).all()) for weights in result.attentions)


@pytest.mark.parametrize("name", DECODERS)
def test_models_in_float64_compute_in_float32(name: str) -> None:
    """Eager logits of a float64 model leave the bound of float64 unless its conversions to float32 are kept off."""
    given = judged(name, "")
    model = given.models[torch.float64]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        converted = model(**inputs(given.batch)).logits
    assert given.ratio(converted, given.exact) > 1e3
    assert given.ratio(run(model, given.batch, "eager", AT_ONCE), given.exact) <= 2
