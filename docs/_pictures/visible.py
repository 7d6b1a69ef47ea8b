"""Which query sees which key, drawn from the masks themselves."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from refattn import masks
from refattn.masks import Mask

SEEN = "#2f81f7"


def grid(axes: Any, visible: Any, title: str, q_start: int = 0, k_start: int = 0) -> None:
    """One mask as squares: rows are queries, columns keys, filled where the query sees the key."""
    rows, columns = visible.shape
    axes.imshow(visible, cmap=ListedColormap(["none", SEEN]), vmin=0, vmax=1, aspect="equal")
    axes.set_xticks(range(columns), [str(k_start + key) for key in range(columns)])
    axes.set_yticks(range(rows), [str(q_start + row) for row in range(rows)])
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", linewidth=0.6, alpha=0.5)
    axes.tick_params(which="both", length=0, labelsize=7)
    axes.set_title(title, fontsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)


def drawn(shown: list[tuple[str, Mask, int]], q_len: int, k_len: int, columns: int = 4) -> Figure:
    """Masks side by side, each with its title and the position of its first query."""
    columns = min(columns, len(shown))
    lines = -(-len(shown) // columns)
    size = (2.1 * columns, 2.2 * lines * max(0.6, q_len / k_len))
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for place in axes.flat[len(shown) :]:
        place.axis("off")
    for place, (title, mask, q_start) in zip(axes.flat, shown, strict=False):
        visible = mask.to_array(q_len, k_len, q_start=q_start, like=np.zeros(1))
        grid(place, np.broadcast_to(visible, (q_len, k_len)), title, q_start)
    figure.tight_layout()
    return figure


def alignment() -> Figure:
    """The two ways to align a causal mask where there are fewer queries than keys."""
    readings = [("q_start = 0: top-left", masks.causal(), 0), ("q_start = 3: bottom-right", masks.causal(), 3)]
    return drawn(readings, 2, 5, columns=2)
