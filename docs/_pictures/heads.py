"""Which query head reads which key/value head, drawn from the rule itself."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from visible import SEEN

import refattn

HEADS = 8
KINDS = (("MHA: Hkv = 8", 8), ("GQA: Hkv = 2", 2), ("MQA: Hkv = 1", 1))
STORED = "#d29922"


def sharing() -> Figure:
    """Eight query heads above 8, 2 and 1 key/value heads, with a line for each pair that belongs together."""
    figure, places = plt.subplots(1, len(KINDS), figsize=(8.4, 2.0))
    for place, (title, kv_heads) in zip(places, KINDS, strict=True):
        middle = [(HEADS / kv_heads) * (g + 0.5) - 0.5 for g in range(kv_heads)]
        for h in range(HEADS):
            g = refattn.kv_head_of(h, HEADS, kv_heads)
            place.plot([h, middle[g]], [1, 0], color="grey", linewidth=0.9, zorder=1)
            place.text(h, 1, str(h), ha="center", va="center", fontsize=8, color="white", zorder=3)
        place.scatter(range(HEADS), [1] * HEADS, s=150, color=SEEN, zorder=2)
        place.scatter(middle, [0] * kv_heads, s=150, marker="s", color=STORED, zorder=2)
        for g, x in enumerate(middle):
            place.text(x, 0, str(g), ha="center", va="center", fontsize=8, color="black", zorder=3)
        place.set(xlim=(-0.7, HEADS - 0.3), ylim=(-0.35, 1.35))
        place.set_title(title, fontsize=10)
        place.axis("off")
    figure.tight_layout()
    return figure
