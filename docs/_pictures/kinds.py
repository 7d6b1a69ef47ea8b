"""Every kind of mask, and the combinations with names of their own."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from visible import drawn

from refattn import masks

LENGTH = 6
DOCUMENTS = [0, 0, 0, 1, 1, 2]
KEEP = [False, False, True, True, True, True]
BLOCKS = np.array([[True, False, True], [False, True, False], [True, True, False]])


def checkered() -> np.ndarray:
    """A dense mask that no other kind gives."""
    rows, keys = np.indices((LENGTH, LENGTH))
    return (rows + keys) % 3 != 1


def resized(figure: Figure, width: float, height: float) -> Figure:
    """The figure in other inches, so that its letters are large enough on a narrow screen."""
    figure.set_size_inches(width, height)
    figure.tight_layout()
    return figure


def all_kinds() -> Figure:
    """Each constructor once."""
    shown = [
        ("causal()", masks.causal(), 0),
        ("window(2, 0)", masks.window(2, 0), 0),
        ("window(1, 2)", masks.window(1, 2), 0),
        ("window(None, 1)", masks.window(None, 1), 0),
        ("chunks(2)", masks.chunks(2), 0),
        ("prefix(2)", masks.prefix(2), 0),
        ("documents(ids)", masks.documents(DOCUMENTS), 0),
        ("lengths(4)", masks.lengths(4), 0),
        ("padding(keep)", masks.padding(KEEP), 0),
        ("dense(array)", masks.dense(checkered()), 0),
        ("blocks(array, 2)", masks.blocks(BLOCKS, 2), 0),
        ("~causal()", ~masks.causal(), 0),
    ]
    return resized(drawn(shown, LENGTH, LENGTH, columns=3), 5.0, 7.2)


def combinations() -> Figure:
    """Masks of models, each made of kinds."""
    shown = [
        ("window(2, 2)\n& causal()", masks.window(2, 2) & masks.causal(), 0),
        ("causal()\n| prefix(3)", masks.causal() | masks.prefix(3), 0),
        ("(window(1, 0)\n| prefix(1)) & causal()", (masks.window(1, 0) | masks.prefix(1)) & masks.causal(), 0),
        ("documents(ids)\n& causal()", masks.documents(DOCUMENTS) & masks.causal(), 0),
        ("chunks(3)\n& causal()", masks.chunks(3) & masks.causal(), 0),
        ("causal()\n& padding(keep)", masks.causal() & masks.padding(KEEP), 0),
    ]
    return resized(drawn(shown, LENGTH, LENGTH, columns=3), 5.0, 4.4)


def shifted() -> Figure:
    """Positional masks for two queries at positions 4 and 5, over six keys."""
    shown = [
        ("causal()", masks.causal(), 4),
        ("window(2, 0)", masks.window(2, 0), 4),
        ("chunks(3)", masks.chunks(3), 4),
    ]
    return resized(drawn(shown, 2, LENGTH, columns=3), 5.0, 1.2)
