"""The stages of attention, drawn from the names that `attention_stages` gives them."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from visible import SEEN

from refattn import Stages

# Stage -> what it computes, what it takes from outside, and its place: column and line.
DRAWN = {
    "scores": (r"$q_i \cdot k_j$", "q, k", 0, 0),
    "scaled": (r"$s_{ij} = \sigma\, q_i \cdot k_j$", "scale", 0, 1),
    "capped": (r"$c_{ij} = \kappa \tanh(s_{ij} / \kappa)$", "softcap", 0, 2),
    "biased": (r"$c_{ij} + b_{ij}$", "bias", 0, 3),
    "visible": (r"$j \in V_i$", "mask, causal,\nstarts, bias = -inf", 1, 3),
    "logits": (r"$x_{ij}$, or $-\infty$ if $j \notin V_i$", "", 0, 4),
    "lse": (r"$\ell_i = \log(e^{z} + \sum{}_j\, e^{x_{ij}})$", "sinks", 1, 5),
    "weights": (r"$p_{ij} = e^{x_{ij} - \ell_i}$", "", 0, 6),
    "output": (r"$o_i = \sum{}_j\, p_{ij}\, v_j$", "v", 0, 7),
}
LEADS = (
    *(("scores", "scaled"), ("scaled", "capped"), ("capped", "biased"), ("biased", "logits"), ("visible", "logits")),
    *(("logits", "lse"), ("logits", "weights"), ("lse", "weights"), ("weights", "output")),
)
WIDTH, HEIGHT, COLUMN, LINE = 1.9, 0.66, 2.2, 1.0


def stages() -> Figure:
    """A box for each stage, in order, with what enters it from outside."""
    figure, axes = plt.subplots(figsize=(5.0, 7.2))
    centre = {name: (COLUMN * DRAWN[name][2], -LINE * DRAWN[name][3]) for name in Stages._fields}
    for first, second in LEADS:
        lead(axes, centre[first], centre[second])
    for name, (x, y) in centre.items():
        formula, given, column, _ = DRAWN[name]
        box = plt.Rectangle((x - WIDTH / 2, y - HEIGHT / 2), WIDTH, HEIGHT, fill=False, edgecolor=SEEN, linewidth=1.5)
        axes.add_patch(box)
        axes.text(x, y + 0.15, name, ha="center", va="center", fontsize=10, fontweight="bold")
        axes.text(x, y - 0.15, formula, ha="center", va="center", fontsize=10)
        edge, start = ((x, y + HEIGHT / 2), (x, y + 0.6)) if column else ((x - WIDTH / 2, y), (x - WIDTH / 2 - 0.25, y))
        if given:
            axes.annotate("", edge, start, arrowprops={"arrowstyle": "->", "color": "#888888"})
            place = ("center", "bottom") if column else ("right", "center")
            axes.text(start[0] - (0 if column else 0.04), start[1], given, ha=place[0], va=place[1], fontsize=9)
    axes.set_xlim(-1.8, 3.2)
    axes.set_ylim(-7.5, 0.5)
    axes.axis("off")
    return figure


def lead(axes: Any, first: tuple[float, float], second: tuple[float, float]) -> None:
    """An arrow from the edge of one box to the edge of another."""
    (x, y), (to_x, to_y) = first, second
    start = (x, y - HEIGHT / 2)
    end = (to_x, to_y + HEIGHT / 2)
    if to_x > x:
        start, end = (x + WIDTH / 2, y), (to_x - WIDTH / 2, to_y + HEIGHT / 4)
    elif to_x < x:
        start, end = (x - WIDTH / 2, y - HEIGHT / 4), (to_x + WIDTH / 2, to_y)
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#888888", "linewidth": 1.2})
