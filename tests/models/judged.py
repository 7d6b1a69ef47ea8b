"""Small decoders with exact logits and their bounds, and runs of them: what the tests of logits and caches share."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.attention_functions import Attention, register
from models.decoder_bound import Watched, exact_run, propagate
from models.decoders import DECODERS, Batch, batch, build
from models.error_bound import UNIT_ROUNDOFF

LENGTH, PROMPT, WORDS = 11, 7, 4
# How the tokens of a sequence are handed over: all at once, or a prompt and then one by one, from a cache.
AT_ONCE = (LENGTH,)
STEPS = (PROMPT, *range(PROMPT + 1, LENGTH + 1))
CHUNKS = (2, PROMPT - 1, LENGTH)
PADDINGS = ("", "left", "right")


class Judged(NamedTuple):
    """A decoder in two precisions, a batch, its exact logits at drawn words of all kept tokens, and their bounds."""

    models: dict[torch.dtype, Any]
    batch: Batch
    exact: Tensor
    places: list[tuple[int, int, int]]
    bounds: dict[torch.dtype, Tensor]

    def ratio(self, logits: Tensor, expected: Tensor) -> float:
        """The largest |logit - expected| over the bound of one run; a NaN is infinitely far off."""
        pick = tuple(torch.tensor(self.places).T)
        error = (logits.double() - expected.double())[pick].abs()
        return float((error / self.bounds[logits.dtype]).nan_to_num(nan=torch.inf).max())


@cache
def judged(name: str, padding: str) -> Judged:
    """The exact run and its analysis."""
    models = {dtype: build(DECODERS[name], dtype) for dtype in UNIT_ROUNDOFF}
    given = batch(padding, LENGTH)
    exact, steps = exact_run(models[torch.float64], inputs(given))
    words = torch.randperm(exact.shape[-1], generator=torch.Generator().manual_seed(2))[:WORDS].tolist()
    places = [(*place, word) for place in given.keep.nonzero().tolist() for word in words]
    return Judged(models, given, exact.detach(), places, propagate(exact, places, steps))


def inputs(given: Batch) -> dict[str, Tensor]:
    """The batch as the arguments of a model."""
    return {"input_ids": given.ids, "attention_mask": given.keep, "position_ids": given.positions}


def run(
    model: Any, given: Batch, attention: str | Attention, stops: Sequence[int] = AT_ONCE, memory: Any = None
) -> Tensor:
    """Logits of all tokens, handed over up to each of the stops; by default the model chooses the cache itself."""
    watched = Watched()
    if not isinstance(attention, str):
        register("judged", watched.unseen(attention))
        attention = "judged"
    model.set_attn_implementation(attention)
    logits = []
    with torch.no_grad(), watched:
        for start, stop in zip((0, *stops), stops, strict=False):
            here = Batch(given.ids[:, start:stop], given.keep[:, :stop], given.positions[:, start:stop])
            result = model(**inputs(here), cache=memory, use_cache=True)
            memory = result.cache
            logits.append(result.logits)
    return torch.cat(logits, 1)
