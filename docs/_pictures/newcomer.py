"""What the pages for newcomers draw: the lookup, the worked example, and what grows with the number of tokens."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from visible import SEEN

import refattn
from refattn import cost, three_tokens

OTHER, THIRD, GREY = "#d9822b", "#2e9e6b", "#8b949e"
COLOURS = {"full attention": SEEN, "recurrent": OTHER, "convolution": THIRD, "local attention": GREY}
WIDTH = 1024
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def recalled(events: int, width: int = 64, seed: int = 0) -> tuple[float, float]:
    """How alike (1 is the same) what is recalled of the oldest event is to what was stored: by a state, by a lookup."""
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, events, width))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    query = keys[0]  # the alarm asks for the oldest event

    state = np.zeros((width, width))
    for key, value in zip(keys, values):
        state += np.outer(value, key)  # its size stays, whatever is added
    from_state = state @ query

    from_lookup = refattn.attention(query[None], keys, values, scale=24.0)[0]
    return alike(from_state, values[0]), alike(from_lookup, values[0])


def alike(a: Any, b: Any) -> float:
    """The cosine of the angle between two vectors."""
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def recall() -> Figure:
    """Recall of the oldest of so many events, the mean of eight draws."""
    counts = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    draws = [[recalled(count, seed=seed) for seed in range(8)] for count in counts]
    by_state, by_lookup = np.mean(draws, axis=1).T
    figure, axes = plt.subplots(figsize=(5.6, 3))
    axes.plot(counts, by_lookup, color=SEEN, marker="o", label="lookup among all keys")
    axes.plot(counts, by_state, color=OTHER, marker="o", label="state of 64 x 64 numbers")
    in_tokens(axes, counts[::3], "events")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("likeness to what was stored")
    axes.legend(frameon=False, loc="center right")
    return tidy(figure)


def lookup() -> Figure:
    """The first query of the worked example: its keys, the weights that follow, and the mixture of values."""
    q, k, v = three_tokens.inputs()
    found = refattn.attention_stages(q, k, v)
    places = [["keys", "values"], ["weights", "weights"]]
    figure, axes = plt.subplot_mosaic(places, figsize=(5.6, 4.4), height_ratios=(2, 1))
    left, middle, right = (axes[name] for name in ("keys", "weights", "values"))

    left.annotate("", q[0], (0, 0), arrowprops={"arrowstyle": "-|>", "color": OTHER, "lw": 7, "alpha": 0.6})
    left.text(0.5, -0.22, "query", color=OTHER, ha="center")
    for key, name, score in zip(k, three_tokens.TOKENS, found.scores[0]):
        left.annotate("", key, (0, 0), arrowprops={"arrowstyle": "-|>", "color": SEEN, "lw": 1.5})
        left.text(key[0] + 0.04, key[1] + 0.06, f"{name}\n{score:g}", ha="center", va="bottom")
    left.set(xlim=(-0.35, 1.5), ylim=(-0.35, 1.6), aspect="equal", title="keys, and their scores")

    places = range(len(three_tokens.TOKENS))
    middle.barh(places, found.weights[0], color=SEEN, height=0.6)
    for place, weight in zip(places, found.weights[0]):
        middle.text(weight + 0.01, place, f"{weight:.3f}", va="center")
    middle.set_yticks(places, three_tokens.TOKENS)
    middle.invert_yaxis()
    middle.set(xlim=(0, 0.55), xticks=(0, 0.2, 0.4), title="weights")

    right.scatter(*v.T, s=900 * found.weights[0], color=SEEN, alpha=0.6, linewidth=0)
    for value, name in zip(v, three_tokens.TOKENS):
        right.text(value[0] + 0.7, value[1] + 0.7, name)
    right.scatter(*found.output[0], color=OTHER, marker="D", zorder=3)
    right.annotate(
        "output",
        found.output[0],
        found.output[0] - (3.4, 3.4),
        color=OTHER,
        ha="center",
        arrowprops={"arrowstyle": "-", "color": OTHER},
    )
    right.set(xlim=(-1.5, 15), ylim=(-1.5, 13.5), xticks=(0, 5, 10), yticks=(0, 5, 10), aspect="equal")
    right.set_title("values, and their mixture")
    return tidy(figure)


def weights() -> Figure:
    """The weights of the worked example, without a mask and causal, as squares with their numbers."""
    inputs = three_tokens.inputs()
    figure, places = plt.subplots(1, 2, figsize=(5.6, 3))
    shades = LinearSegmentedColormap.from_list("seen", [(*to_rgb(SEEN), 0), (*to_rgb(SEEN), 0.9)])
    for axes, causal in zip(places, (False, True)):
        found = refattn.attention_stages(*inputs, causal=causal)
        axes.imshow(np.where(found.visible, found.weights, np.nan), cmap=shades, vmin=0, vmax=1)
        for (row, key), weight in np.ndenumerate(found.weights):
            axes.text(key, row, f"{weight:.3f}" if found.visible[row, key] else "hidden", ha="center", va="center")
        axes.set_xticks(range(3), three_tokens.TOKENS)
        axes.set_yticks(range(3), three_tokens.TOKENS if axes is places[0] else [""] * 3)
        axes.tick_params(length=0)
        axes.set(xlabel="keys", title="causal" if causal else "all visible")
        for spine in axes.spines.values():
            spine.set_visible(False)
    places[0].set_ylabel("queries")
    return tidy(figure)


def growth() -> Figure:
    """What n tokens cost: weights of one head, and the work of attention and its alternatives."""
    figure, (left, right) = plt.subplots(2, 1, figsize=(5.6, 6))
    some = np.arange(0, 16385, 512)
    matrix = [cost.attention_cost(int(n), int(n), heads=1, d_k=128).weights_per_head_bytes / 2**20 for n in some]
    cached = [cost.kv_cache_bytes(1, int(n), 1, 128) / 2**20 for n in some]
    left.plot(some, matrix, color=SEEN)
    left.plot(some, cached, color=OTHER)
    left.text(some[-10], matrix[-10], "weights, n² ", ha="right", va="bottom")
    left.text(some[-1], cached[-1] + 20, "keys and values, n", ha="right", va="bottom")
    left.set_xticks((0, 4096, 8192, 12288, 16384), ("0", "4k", "8k", "12k", "16k"))
    left.set(xlabel="tokens", ylabel="MiB", title="one head, in 16 bits")
    each(right, "work")
    right.set_yscale("log")
    right.set(ylabel="multiply-adds", title=f"one layer, width {WIDTH}")
    right.legend(frameon=False, fontsize=8)
    return tidy(figure)


def paths() -> Figure:
    """Steps between the first and the last of n tokens."""
    figure, axes = plt.subplots(figsize=(5.6, 3))
    each(axes, "path")
    axes.set_yscale("log")
    axes.set_ylim(0.6, 2e6)  # room for the legend
    axes.set_ylabel("steps from first to last")
    axes.legend(frameon=False, fontsize=8)
    return tidy(figure)


def each(axes: Any, field: str) -> None:
    """One field of attention and its alternatives, against the number of tokens."""
    for rows in zip(*(cost.alternatives(length, WIDTH) for length in LENGTHS)):
        name, parameter = rows[0].method, rows[0].parameter
        counts = [getattr(row, field) for row in rows]
        axes.plot(LENGTHS, counts, color=COLOURS[name], label=f"{name} {parameter and f'({parameter})'}".strip())
    in_tokens(axes, LENGTHS[::2])


def in_tokens(axes: Any, ticks: Any, word: str = "tokens") -> None:
    """A logarithmic axis of lengths, powers of two written out."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(lambda count, _: f"{count:g}" if count < 1024 else f"{count / 1024:g}k")
    axes.set_xlabel(word)


def tidy(figure: Figure) -> Figure:
    """No frame on the right, and nothing that overlaps."""
    for axes in figure.axes:
        axes.spines["right"].set_visible(False)
    figure.tight_layout()
    return figure
