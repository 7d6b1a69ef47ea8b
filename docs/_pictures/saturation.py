"""What the scale and the soft cap do to scores, computed by attention itself."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from visible import SEEN

import refattn

WIDTHS = (4, 16, 64, 256)
COLOURS = ("#3fb950", SEEN, "#d29922", "#f85149")
KEYS = 16


def stages_of(d_k: int, scale: float | None, queries: int = 2000) -> Any:
    """The stages over queries and keys whose components are independent, of mean 0 and variance 1."""
    rng = np.random.default_rng(d_k)
    q, k = rng.standard_normal((queries, 1, d_k)), rng.standard_normal((queries, KEYS, d_k))
    q, k = q[:, None], k[:, None]  # (batch, 1 head, tokens, d_k)
    return refattn.attention_stages(q, k, np.zeros((queries, 1, KEYS, 1)), scale=scale)


def softmax() -> Figure:
    """The mean weights of a row, sorted, for several widths, with and without the scale."""
    figure, axes = plt.subplots(1, 2, figsize=(5.8, 2.8), sharey=True)
    for place, scale, title in ((axes[0], 1.0, "scale 1"), (axes[1], None, "scale 1/sqrt(d_k)")):
        for d_k, colour in zip(WIDTHS, COLOURS, strict=True):
            weights = np.sort(stages_of(d_k, scale).weights[:, 0, 0], axis=-1)[:, ::-1].mean(axis=0)
            place.plot(range(1, KEYS + 1), weights, marker="o", markersize=3, color=colour, label=f"d_k = {d_k}")
        place.set_title(title, fontsize=10)
        place.set_xlabel("keys, largest weight first")
        place.set_xticks((1, 4, 8, 12, 16))
        place.spines["right"].set_visible(False)
    axes[0].set_ylabel("mean weight")
    axes[0].set_ylim(0, 1)
    axes[1].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    return figure


def cap() -> Figure:
    """Capped over scaled scores, for several caps."""
    figure, axes = plt.subplots(figsize=(4.8, 3.2))
    scaled = np.linspace(-100, 100, 401)
    for softcap, colour in zip((None, 50.0, 30.0, 10.0), ("#888888", *COLOURS), strict=False):
        key = np.ones((1, 1))
        stages = refattn.attention_stages(scaled[:, None], key, key, scale=1.0, softcap=softcap)
        axes.plot(scaled, stages.capped[:, 0], color=colour, label=f"softcap={softcap}")
    axes.set_xlabel("scaled score")
    axes.set_ylabel("capped score")
    axes.legend(frameon=False, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines["right"].set_visible(False)
    return figure
