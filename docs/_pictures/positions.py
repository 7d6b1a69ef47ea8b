"""What ALiBi adds and how RoPE turns, drawn from what the functions give."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from visible import SEEN

import refattn
from refattn import biases

HEADS, TOKENS = 8, 16
SHOWN = (0, 2, 4, 7)


def alibi() -> Figure:
    """The summand of four of eight heads: zero queries leave nothing else among the biased scores."""
    zeros = np.zeros((HEADS, TOKENS, 1))
    added = refattn.attention_stages(zeros, zeros, zeros, bias=biases.alibi(HEADS)).biased
    slopes = -added[:, 0, 1]
    figure, places = plt.subplots(1, len(SHOWN), figsize=(8.4, 2.5))
    for place, h in zip(places, SHOWN, strict=True):
        image = place.imshow(added[h], cmap="viridis", vmin=-8, vmax=0)
        place.set_title(f"head {h}: slope {slopes[h]:.3g}", fontsize=9)
        place.set_xticks([0, TOKENS - 1])
        place.set_yticks([0, TOKENS - 1])
        place.tick_params(length=0, labelsize=7)
        for spine in place.spines.values():
            spine.set_visible(False)
    bar = figure.colorbar(image, ax=places, fraction=0.02, pad=0.02, extend="min")
    bar.ax.tick_params(labelsize=7)
    return figure


def rotation() -> Figure:
    """The four pairs of a vector of ones and zeros, turned as positions 0 to 5 turn them, base 10000."""
    width, count = 8, 6
    x = np.tile([1.0, 0.0], (count, width // 2))
    turned = refattn.rope(x, np.arange(count), style="interleaved").reshape(count, width // 2, 2)
    figure, places = plt.subplots(1, width // 2, figsize=(8.4, 2.3))
    for pair, place in enumerate(places):
        place.add_patch(plt.Circle((0, 0), 1, fill=False, color="grey", linewidth=0.6))
        for position in range(count):
            a, b = turned[position, pair]
            place.plot([0, a], [0, b], color=SEEN, linewidth=1.6, alpha=0.3 + 0.7 * position / (count - 1))
            if pair == 0 or (pair == 1 and position in (0, count - 1)):
                place.text(1.18 * a, 1.18 * b, str(position), fontsize=7, ha="center", va="center")
        if pair > 1:
            place.text(1.05, 0, f"0 to {count - 1}", fontsize=7, ha="left", va="center")
        speed = 10000.0 ** (-2 * pair / width)
        place.set_title(f"pair {pair}: {speed:g} rad each", fontsize=9)
        place.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
        place.axis("off")
    figure.tight_layout()
    return figure
