"""How work and memory grow with the length, drawn from the cost model."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from visible import SEEN

from refattn import cost

LENGTHS = [2**power for power in range(8, 18)]
WIDTH = 4096
COLOURS = {"full attention": SEEN, "recurrent": "#3fb950", "convolution": "#d29922", "local attention": "#f85149"}


def squares() -> Figure:
    """The weights of one head as squares: twice the tokens, four times the area."""
    figure, axes = plt.subplots(figsize=(7.6, 2.9))
    left = 0.0
    for n in (512, 1024, 2048, 4096):
        figures = cost.attention_cost(n, n, heads=1, d_k=128)
        axes.add_patch(plt.Rectangle((left, 0), n, n, color=SEEN, alpha=0.55, linewidth=0))
        size = figures.weights_per_head_bytes / 2**20
        axes.text(left + n / 2, -160, f"{n:,}", ha="center", va="top", fontsize=9)
        axes.text(left + n / 2, n + 120, f"{size:g} MiB", ha="center", va="bottom", fontsize=9)
        left += n + 700
    axes.set(xlim=(-200, left), ylim=(-700, 4900), aspect="equal")
    axes.axis("off")
    return figure


def work() -> Figure:
    """Multiply-adds that mix tokens in one layer, and numbers kept for the next token, over the length."""
    figure, places = plt.subplots(1, 2, figsize=(8.4, 3.4))
    rows = [cost.alternatives(n, WIDTH) for n in LENGTHS]
    for axes, name in zip(places, ("work", "state"), strict=True):
        for at, one in enumerate(rows[0]):
            label = f"{one.method} {one.parameter}".strip()
            values = [getattr(row[at], name) for row in rows]
            axes.loglog(LENGTHS, values, color=COLOURS[one.method], linewidth=2, label=label)
        axes.set(xlabel="tokens n", title={"work": "multiply-adds", "state": "numbers kept"}[name])
        axes.set_xscale("log", base=2)
        axes.spines["right"].set_visible(False)
    places[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    return figure
