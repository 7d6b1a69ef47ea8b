"""Time and memory against the length, and their plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from refattn import attention, masks
from refattn_backends.bench.bursts import TIMED, medians
from refattn_backends.bench.measures import (
    HEADS,
    MIB,
    TORCH,
    WIDTH,
    decode_times,
    extra_memory,
    normal,
    torch_or_reason,
)
from refattn_backends.bench.sizes import Sizes

Curves = dict[str, dict[str, dict[str, float]]]  # plot -> line -> length -> value

LONG = 4096  # beyond it one timed call says enough
PLOTS = {
    "prefill": f"Prefill, {HEADS} heads, d {WIDTH}: seconds",
    "memory": "Memory beyond inputs and output: MiB",
    "window": "A window of fixed width: seconds",
    "decode": "Decode, 32/8 heads, d 128: milliseconds",
}


def times(length: int, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Seconds of prefill, full and windowed, and milliseconds of decode at one length, by plot and line."""
    q, k, v = (normal(HEADS, length, WIDTH) for _ in range(3))
    torch, _ = torch_or_reason()
    sides: dict[str, Callable[[], Any]] = {"tiled NumPy": lambda: attention(q, k, v, path="tiled")}
    if torch:
        tensors = [torch.from_numpy(x)[None] for x in (q, k, v)]
        sides[TORCH] = lambda: torch.nn.functional.scaled_dot_product_attention(*tensors)
    if length <= sizes.dense:
        sides["dense NumPy"] = lambda: attention(q, k, v)
    window = masks.window(sizes.window - 1, 0)
    took = medians(sides, 1, timed=1 if length > LONG else TIMED)
    windowed = medians({f"{sizes.window} keys": lambda: attention(q, k, v, mask=window, path="tiled")}, 1)
    query, *cached = normal(1, 32, 1, 128), normal(1, 8, length, 128), normal(1, 8, length, 128)
    decoded = {name: 1e3 * seconds for name, seconds in decode_times(query, cached[0], cached[1], 2)[0].items()}
    return {"prefill": took, "window": windowed, "decode": decoded}


def memories(length: int, path: str) -> dict[str, dict[str, float]]:
    """MiB at one length; what is below the noise of a page counts as that."""
    return {"memory": {f"{path} NumPy": max(extra_memory(length, path), 4096 / MIB)}}


def joined(curves: Curves, length: int, values: dict[str, dict[str, float]]) -> None:
    """Enters the values of one length into the curves."""
    for plot, lines in values.items():
        for line, value in lines.items():
            curves.setdefault(plot, {}).setdefault(line, {})[str(length)] = value


def draw(curves: Curves, where: Path) -> None:
    """The curves as an SVG file."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "refattn", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 8), layout="constrained")
        FigureCanvasSVG(figure)
        for axes, (plot, title) in zip(figure.subplots(2, 2).flat, PLOTS.items(), strict=True):
            for line, points in curves.get(plot, {}).items():
                axes.plot([int(length) for length in points], list(points.values()), marker="o", label=line)
            axes.set(title=title, xlabel="keys" if plot == "decode" else "L", xscale="log", yscale="log")
            axes.set_xscale("log", base=2)
            axes.grid(visible=True, alpha=0.3)
            if plot in curves:
                axes.legend()
        figure.savefig(where, format="svg", metadata={"Date": None})
