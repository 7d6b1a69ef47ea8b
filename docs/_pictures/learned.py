"""How the weights of an alarm come to the event that it asks for, while the projections are learned."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from newcomer import GREY, OTHER, tidy
from retrieval import LENGTH, MARKED, STEPS, draw, on_right, train, weights
from visible import SEEN

BEFORE, DURING, AFTER = 0, 92, STEPS
EACH = 4  # steps between two points of the lower picture


@cache
def course() -> Any:
    """The models and errors of one training, some of its steps, and there the weight on the right event by kind."""
    models, errors = train()
    steps = list(range(0, STEPS + 1, EACH))
    fresh = draw(np.random.default_rng(1), 200)
    by_kind = [[on_right(models[step], fresh)[fresh.asked == kind].mean() for step in steps] for kind in range(MARKED)]
    return models, errors, steps, by_kind


def weights_and_loss() -> Figure:
    """The weights of one fresh stream before, during and after training; below them the error, and weights by kind."""
    models, errors, steps, by_kind = course()
    fresh = draw(np.random.default_rng(17), 1)
    figure, axes = plt.subplots(4, 1, figsize=(5.8, 7.4), height_ratios=(1, 1, 1, 2.4))
    for place, step, word in zip(axes, (BEFORE, DURING, AFTER), ("before", "during", "after"), strict=False):
        colours = [OTHER if event == fresh.right[0] else SEEN for event in range(LENGTH)]
        place.bar(range(LENGTH), weights(models[step], fresh)[0], color=colours, width=0.8)
        place.axhline(1 / LENGTH, color=GREY, linewidth=0.8, linestyle="--")
        place.set(ylim=(0, 1.05), yticks=(0, 1), xlim=(-1, LENGTH), ylabel="weight")
        place.set_title(f"{word}: step {step}", fontsize=9, loc="left")
    axes[2].set_xlabel("event of a fresh stream")
    below, beside = axes[3], axes[3].twinx()
    below.plot(range(STEPS), errors, color=SEEN, linewidth=1)
    below.set(yscale="log", xlabel="step", xlim=(0, STEPS))
    below.set_ylabel("mean squared error", color=SEEN)
    for kind in by_kind:
        beside.plot(steps, kind, color=OTHER, linewidth=1.2)
    beside.axhline(1 / LENGTH, color=GREY, linewidth=0.8, linestyle="--")
    beside.set_ylim(0, 1.05)
    beside.set_ylabel("weight on the right event", color=OTHER)
    tidy(figure)
    beside.spines["right"].set_visible(True)
    return figure
