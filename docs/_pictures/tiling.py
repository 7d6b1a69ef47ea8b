"""What online softmax keeps while it goes over the keys, tile by tile, on real data."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from visible import SEEN

import refattn

KEYS, TILE = 96, 8
MARK = "#d29922"


def row() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The logits of one query over 96 keys, and after each tile the maximum, the denominator and its log-sum-exp."""
    rng = np.random.default_rng(3)
    q, k = 2.0 * rng.standard_normal((1, 1, 16)), rng.standard_normal((1, KEYS, 16))
    k = k + np.linspace(0, 0.6, KEYS)[None, :, None] * np.sign(q)
    logits = refattn.attention_stages(q, k, k).logits[0, 0]
    peaks, totals = [], []
    peak, total = -np.inf, 0.0
    for tile in logits.reshape(-1, TILE):
        raised = max(peak, tile.max())
        total = total * np.exp(peak - raised) + np.exp(tile - raised).sum()
        peak = raised
        peaks.append(peak)
        totals.append(total)
    return logits, np.asarray(peaks), np.asarray(totals), np.asarray(peaks) + np.log(totals)


def running() -> Figure:
    """Logits with their running maximum above, the running denominator below: it shrinks where the maximum rises."""
    logits, peaks, totals, lse = row()
    edges = np.arange(0, KEYS + 1, TILE)
    figure, (above, below) = plt.subplots(2, 1, figsize=(7.6, 4.0), sharex=True, height_ratios=(3, 2))
    above.vlines(np.arange(KEYS) + 0.5, logits.min() - 0.5, logits, color="grey", linewidth=1, alpha=0.6)
    above.plot(np.arange(KEYS) + 0.5, logits, ".", color="grey", markersize=3)
    above.stairs(peaks, edges, color=SEEN, linewidth=2, label="running maximum m", baseline=None)
    above.stairs(lse, edges, color=MARK, linewidth=2, label="m + log(denominator)", baseline=None)
    above.set(ylabel="logit", ylim=(logits.min() - 0.5, lse.max() + 1))
    above.legend(fontsize=8, loc="lower right", frameon=False)
    below.stairs(totals, edges, color=SEEN, fill=True, alpha=0.5)
    below.set(xlabel=f"key, in tiles of {TILE}", ylabel="denominator", xlim=(0, KEYS))
    below.set_xticks(edges[::2])
    for axes in (above, below):
        axes.spines["right"].set_visible(False)
    figure.tight_layout()
    return figure
