"""How the derived bound behaves with the number of keys, and what to compare it with, computed from ordinary data."""

from __future__ import annotations

from functools import cache
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from refattn import golden
from refattn.goldens import Golden

LENGTHS, D_K, ROWS = (128, 256, 512, 1024, 2048, 4096), 64, 8
DTYPES = {"bfloat16": "#e8590c", "float16": "#2f81f7", "float32": "#2f9e44", "float64": "#ae3ec9"}


def data(length: int, seed: int = 0) -> tuple[Any, ...]:
    """q, k and v (1, 1, L, 64), standard normal."""
    rng = np.random.default_rng([seed, length])
    return tuple(rng.standard_normal((1, 1, length, D_K), dtype=np.float32) for _ in range(3))


@cache
def exact(length: int) -> Golden:
    """The golden value of some rows, spread over the queries; every row sees every key."""
    return golden(*data(length), rows=range(0, length, length // ROWS))


@cache
def bound(length: int, dtype: str, model: str) -> Any:
    """The bound of each element of those rows."""
    return exact(length).bound(dtype, model)


def bounds() -> Figure:
    """Median bound and median size of the output, over the number of keys."""
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.6), width_ratios=(3, 2))
    sizes = [float(np.median(np.abs(exact(length).output))) for length in LENGTHS]
    panels[0].plot(LENGTHS, sizes, color="#868e96", linewidth=3, alpha=0.7)
    panels[0].annotate("size of the output", (LENGTHS[0], sizes[0]), xytext=(8, 2), textcoords="offset points")
    for dtype, colour in DTYPES.items():
        low = dtype in ("bfloat16", "float16")
        for model, line in (("fused", "-"), ("unfused", "--"))[: 1 + low]:
            medians = [float(np.median(bound(length, dtype, model))) for length in LENGTHS]
            panels[0 if low else 1].plot(LENGTHS, medians, line, color=colour, marker="o", markersize=3)
            words = dtype if line == "-" else f"{dtype}, unfused"
            place = {"xytext": (0, -13), "textcoords": "offset points", "color": colour}
            panels[0 if low else 1].annotate(words, (LENGTHS[0], medians[0]), **place)
    for axes in panels:
        axes.set(xscale="log", yscale="log", xlabel="keys")
        axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS], fontsize=8)
        axes.minorticks_off()
        axes.spines["right"].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("median over elements")
    panels[0].set_ylim(bottom=2e-4)
    panels[1].set_ylim(bottom=3e-15)
    figure.tight_layout()
    return figure
