"""How caches grow and where pages lie, drawn from the cost model and from a paged cache."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from visible import SEEN

import refattn
from refattn import cost

KINDS = (("MHA", 8, "#f85149"), ("GQA", 2, "#d29922"), ("MQA", 1, SEEN))
WIDTH, LAYERS = 128, 32
COLOURS = (SEEN, "#d29922", "#3fb950")


def growth() -> Figure:
    """Bytes of the caches of a model over the tokens they hold, for 8, 2 and 1 key/value heads."""
    lengths = np.arange(0, 32769, 1024)
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    for name, kv_heads, colour in KINDS:
        sizes = [LAYERS * cost.kv_cache_bytes(1, int(n), kv_heads, WIDTH) / 2**30 for n in lengths]
        axes.plot(lengths, sizes, color=colour, linewidth=2)
        axes.annotate(f" {name}, Hkv = {kv_heads}", (lengths[-1], sizes[-1]), color=colour, va="center", fontsize=9)
    axes.set(xlabel="tokens in the cache", ylabel="GiB", xlim=(0, lengths[-1]), ylim=(0, None))
    axes.set_xticks(range(0, 32769, 8192))
    axes.spines["right"].set_visible(False)
    return figure


def pages() -> Figure:
    """Which page of a pool holds which positions of three entries that have grown in turn."""
    cache = refattn.PagedKVCache.allocate(np.zeros(1), batch=3, kv_heads=1, pages=8, page_size=4, d_k=1)
    for counts in ([4, 2, 1], [2, 4, 1], [4, 0, 1]):
        new = np.zeros((3, 1, 4, 1))
        cache = cache.append(new, new, counts=counts)
    figure, axes = plt.subplots(figsize=(8.4, 1.6))
    size = cache.page_size
    lengths = np.broadcast_to(cache.length, 3)
    for page in range(cache.pages):
        axes.add_patch(plt.Rectangle((page * (size + 1), 0), size, 1, fill=False, edgecolor="grey"))
        axes.text(page * (size + 1) + size / 2, -0.35, f"page {page}", ha="center", va="center", fontsize=8)
    for entry, table in enumerate(cache.tables):
        for position in range(int(lengths[entry])):
            left = table[position // size] * (size + 1) + position % size
            axes.add_patch(plt.Rectangle((left, 0), 1, 1, color=COLOURS[entry], alpha=0.85, linewidth=0))
            axes.text(left + 0.5, 0.5, str(position), ha="center", va="center", fontsize=8, color="black")
    for entry in range(3):
        axes.text(
            14 * entry, 1.45, f"entry {entry}: pages {list(cache.tables[entry])}", fontsize=8, color=COLOURS[entry]
        )
    axes.set(xlim=(-0.5, cache.pages * (size + 1)), ylim=(-0.7, 1.9))
    axes.axis("off")
    return figure
