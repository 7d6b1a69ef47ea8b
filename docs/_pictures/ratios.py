"""Measured error over the derived bound, from the figures that docs/bounds.md tabulates."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from visible import SEEN

DATA = Path(__file__).parents[1] / "bounds" / "ratios.json"
COLOURS = {"bfloat16": "#f85149", "float16": "#d29922", "float32": SEEN, "float64": "#3fb950"}


def spread() -> Figure:
    """For each implementation and dtype a line from the median to the largest ratio; 1 is the bound."""
    rows = json.loads(DATA.read_bytes())["rows"]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    dtypes = [dtype for dtype in COLOURS if any(row["dtype"] == dtype for row in rows)]
    figure, axes = plt.subplots(figsize=(5.4, 0.66 * len(names) + 1))
    for row in rows:
        y = -names.index(row["implementation"]) - (dtypes.index(row["dtype"]) - 1.2) * 0.15
        colour = COLOURS[row["dtype"]]
        axes.plot([row["median"], row["largest"]], [y, y], color=colour, linewidth=1.5)
        axes.plot(row["median"], y, marker="|", color=colour, markersize=6)
        axes.plot(row["largest"], y, marker="o", color=colour, markersize=4)
    for dtype in dtypes:
        axes.plot([], [], color=COLOURS[dtype], marker="o", markersize=4, label=dtype)
    axes.spines["right"].set_visible(False)
    axes.axvline(1, color="#888888", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks([])
    for index, name in enumerate(names):
        axes.text(0.02, -index + 0.25, name, transform=axes.get_yaxis_transform(), va="bottom", fontsize=9)
    axes.set_ylim(-len(names) + 0.5, 0.75)
    axes.set_xlabel("error / bound of the model fused: median to largest")
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    return figure
