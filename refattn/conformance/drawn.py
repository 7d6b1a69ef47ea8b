"""Random problems for the judge: sizes, options and data are all drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.conformance.case import LAYOUTS, Problem
from refattn.conformance.plain import Draw

BATCHES: tuple[tuple[int, ...], ...] = ((), (1,), (2,), (2, 1))
HEADS = ((1, 1), (2, 2), (3, 1), (4, 2), (6, 3))


def drawn_problem(dtype: str, seed: int) -> Problem:
    """One call of attention with finite normal data; about half of the options are in use."""
    rng = np.random.default_rng(seed)
    draw = Draw(dtype, rng)
    (heads, kv_heads), batch = HEADS[rng.integers(len(HEADS))], BATCHES[rng.integers(len(BATCHES))]
    q_len, k_len, d_k, d_v = (int(size) for size in rng.integers(1, (20, 80, 40, 20)))
    spread = float(rng.choice([0.25, 0.5, 1.0, 1.5]))
    data = draw.qkv(q_len, k_len, batch=batch, heads=heads, kv_heads=kv_heads, d_k=d_k, d_v=d_v, spread=spread)

    def chance() -> bool:
        return bool(rng.random() < 0.4)

    layouts = [name for name in LAYOUTS if name != "expanded"]  # which is for equal heads
    options: dict[str, Any] = {"layout": str(rng.choice(layouts))}
    if chance():
        options |= {"causal": True, "q_start": int(rng.integers(-2, k_len + 1))}
    if chance():
        lead = (heads,) if chance() else ()
        options["shown"] = rng.random((*lead, q_len, k_len)) < rng.choice([0.3, 0.7, 0.95])
    if chance():
        options["bias"] = draw.normal(heads if chance() else 1, q_len, k_len, spread=2.0)
    if chance():
        options["scale"] = float(rng.choice([0.125, 0.3, -0.2, 1.0 / d_k]))
    if chance():
        options["softcap"] = float(rng.choice([1.0, 5.0, 30.0]))
    if chance():
        options["sinks"] = draw.normal(heads, spread=2.0)
    return Problem(**data, **options)
