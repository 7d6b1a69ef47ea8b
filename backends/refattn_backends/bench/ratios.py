"""Error over derived bound of every implementation installed here: `python -m refattn_backends.bench.ratios`.

The data are drawn by seed, so that one machine and one set of versions give the same numbers every time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from refattn import attention, golden
from refattn.arrays import Array
from refattn.backend import has_module
from refattn.goldens import Golden
from refattn.on_host import host
from refattn_backends.bench.report import as_json

SIGNIFICAND = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}  # bits
DTYPES = tuple(SIGNIFICAND)
# What is tried in this order: a dtype whose precision results have, and a model. An implementation meets the first that
# holds for all of its calls.
LOW = ("fused", "unfused", "prescaled", "float16-sums", "bfloat16-sums")
CLAIMS = {
    "bfloat16": [("bfloat16", model) for model in LOW],
    "float16": [("float16", model) for model in LOW],
    "float32": [("float32", model) for model in ("fused", "worst-case", "truncating", "tf32")],
    "float64": [("float64", "fused"), ("float64", "worst-case"), ("float32", "fused")],
}
# Edges of the histogram, in powers of ten; what lies outside counts in the first and the last bin.
EDGES = [-4.0 + step / 4 for step in range(29)]
SEED, HEADS = 20, 2
# What stands before and after the table on a page.
MARKS = ("<!-- ratios -->", "<!-- end of ratios -->")


class Call(NamedTuple):
    """One call: host float64 data that every dtype is rounded from, and whether the causal rule applies."""

    q: Array
    k: Array
    v: Array
    causal: bool
    coherent: bool


Compute = Callable[[Array, Array, Array, bool], Array]


class Implementation(NamedTuple):
    """A name, and for each dtype that it has how host data become its arrays; `compute` takes and gives these."""

    name: str
    arrays: dict[str, Callable[[Array], Array]]
    compute: Compute


def calls(lengths: tuple[int, ...]) -> Iterator[Call]:
    """Small and large logits, square and not, narrow and wide heads, and equal weights."""
    rng = np.random.default_rng(SEED)
    for length in lengths:
        for width in (16, 64, 128):
            for spread in (1.0, 3.0):
                for q_len in (length, 7):
                    q, k = (spread * rng.standard_normal((1, HEADS, n, width)) for n in (q_len, length))
                    yield Call(q, k, rng.standard_normal((1, HEADS, length, width)), q_len == length, False)
        v = rng.standard_normal((1, HEADS, length, 16))
        yield Call(np.zeros_like(v), np.zeros_like(v), 1 + v / 16, False, True)


def implementations() -> Iterator[Implementation]:
    """Those that are installed."""
    numpy_dtypes: dict[str, Callable[[Array], Array]] = {name: _to_numpy(name) for name in DTYPES[1:]}
    both = dict(numpy_dtypes)
    if has_module("ml_dtypes"):
        both = {"bfloat16": _to_numpy(importlib.import_module("ml_dtypes").bfloat16), **both}
    yield Implementation("refattn dense", both, lambda q, k, v, causal: attention(q, k, v, causal=causal))
    yield Implementation("refattn tiled", both, lambda q, k, v, causal: attention(q, k, v, causal=causal, path="tiled"))
    yield Implementation("NumPy, in the dtype of q", numpy_dtypes, _plainly)
    if has_module("torch"):
        yield from _of_torch()
    if has_module("jax"):
        yield _of_jax()


def rounded(x: Array, dtype: str) -> Array:
    """x as the dtype holds it, float64: libraries that went by way of float32 would round it twice."""
    bits = SIGNIFICAND[dtype]
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 2.0**bits), exponent - bits)


def _to_numpy(dtype: Any) -> Callable[[Array], Array]:
    return lambda x: x.astype(dtype)


def _plainly(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """The textbook's lines, everything in the dtype of q."""
    scores = q @ np.swapaxes(k, -1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, q.dtype.type(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def _of_torch() -> Iterator[Implementation]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def to(name: str) -> Callable[[Array], Array]:
        return lambda x: torch.from_numpy(x).to(getattr(torch, name))

    def by(kernel: Any) -> Compute:
        def compute(q: Array, k: Array, v: Array, causal: bool) -> Array:
            with sdpa_kernel([kernel]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return compute

    def eager(q: Array, k: Array, v: Array, causal: bool) -> Array:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return scores.softmax(-1) @ v

    arrays = {name: to(name) for name in DTYPES}
    yield Implementation("PyTorch math", arrays, by(SDPBackend.MATH))
    yield Implementation("PyTorch fused", arrays, by(SDPBackend.FLASH_ATTENTION))
    yield Implementation("PyTorch eager", arrays, eager)


def _of_jax() -> Implementation:
    import jax

    jax.config.update("jax_enable_x64", True)

    def to(name: str) -> Callable[[Array], Array]:
        return lambda x: jax.numpy.asarray(x, dtype=name)

    def compute(q: Array, k: Array, v: Array, causal: bool) -> Array:
        tokens_first = (jax.numpy.swapaxes(x, 1, 2) for x in (q, k, v))  # (batch, tokens, heads, width)
        return jax.numpy.swapaxes(jax.nn.dot_product_attention(*tokens_first, is_causal=causal), 1, 2)

    return Implementation("jax.nn.dot_product_attention", {name: to(name) for name in DTYPES}, compute)


def measured(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """For each implementation and dtype: counts of the ratios under "fused", the largest, and the model it meets.

    Calls of equal weights are judged in the worst case, whatever the model.
    """
    drawn, found = list(calls(lengths)), list(implementations())
    return [row for dtype in DTYPES for row in _of_dtype(dtype, drawn, found)]


def _of_dtype(dtype: str, drawn: list[Call], found: list[Implementation]) -> Iterator[dict[str, Any]]:
    exact: dict[int, Golden] = {}
    bounds: dict[tuple[int, tuple[str, str]], Array] = {}

    def ratios(number: int, output: Array, claim: tuple[str, str]) -> Array:
        if (number, claim) not in bounds:
            bounds[number, claim] = exact[number].bound(*claim, drawn[number].coherent)
        return np.abs(output - exact[number].output) / bounds[number, claim]

    for one in (one for one in found if dtype in one.arrays):
        outputs = []
        for number, call in enumerate(drawn):
            q, k, v = (one.arrays[dtype](rounded(x, dtype)) for x in (call.q, call.k, call.v))
            if number not in exact:
                exact[number] = golden(q, k, v, causal=call.causal)
            outputs.append(host(one.compute(q, k, v, call.causal)).astype(np.float64))
        fused = np.concatenate([ratios(i, x, (dtype, "fused")).ravel() for i, x in enumerate(outputs)])
        met = (c for c in CLAIMS[dtype] if all(np.all(ratios(i, x, c) <= 1) for i, x in enumerate(outputs)))
        meets = _named(next(met, None), dtype)
        yield {"implementation": one.name, "dtype": dtype, "meets": meets} | _summed_up(fused)


def _named(claim: tuple[str, str] | None, dtype: str) -> str:
    if claim is None:
        return "none of them"
    return claim[1] if claim[0] == dtype else f"{claim[1]}, in {claim[0]}"


def _summed_up(ratios: Array) -> dict[str, Any]:
    logarithms = np.log10(np.clip(ratios, 10.0 ** EDGES[0], 0.999 * 10.0 ** EDGES[-1]))
    return {
        "elements": int(ratios.size),
        "median": float(np.median(ratios)),
        "largest": float(np.max(ratios)),
        "counts": [int(count) for count in np.histogram(logarithms, EDGES)[0]],
    }


def versions() -> dict[str, str]:
    """Of the libraries that were measured."""
    names = [name for name in ("numpy", "torch", "jax") if has_module(name)]
    return {name: str(importlib.import_module(name).__version__) for name in names}


def draw(rows: list[dict[str, Any]], where: Path) -> None:
    """The histograms as an SVG file, one panel per dtype."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["implementation"] for row in rows))
    with mpl.rc_context({"svg.hashsalt": "refattn", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 8), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
        entries: dict[str, Any] = {}  # of the legend
        for axes, dtype in zip(panels, DTYPES, strict=True):
            for row in (row for row in rows if row["dtype"] == dtype):
                share = 100 * np.asarray(row["counts"]) / row["elements"]
                style = {"color": f"C{names.index(row['implementation'])}", "label": row["implementation"]}
                axes.stairs(share, 10.0 ** np.asarray(EDGES), linewidth=1.5, **style)
            axes.axvline(1.0, color="black", linestyle="dashed", linewidth=1)
            axes.set(title=dtype, xscale="log", yscale="log", ylim=(1e-3, 130))  # tails of few elements are the point
            axes.set(xlabel='error / bound of "fused"', ylabel="% of elements")
            axes.grid(visible=True, alpha=0.3)
            entries |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4)
        figure.savefig(where, format="svg", metadata={"Date": None})


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table of Markdown."""
    head = "| implementation | dtype | median | largest | meets |\n|---|---|---|---|---|\n"
    cells = "| {implementation} | {dtype} | {median:.2g} | {largest:.3g} | {meets} |\n"
    return head + "".join(cells.format(**row) for row in rows)


def with_table(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{table(rows)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the table and writes the files: 0 whatever comes out, which is no test."""
    parser = argparse.ArgumentParser(prog="python -m refattn_backends.bench.ratios", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures to FILE")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw the histograms in FILE")
    parser.add_argument(
        "--page", metavar="FILE", type=Path, help=f"put the table into FILE, between {' and '.join(MARKS)}"
    )
    parser.add_argument("--lengths", metavar="N", type=int, nargs="+", default=(33, 257), help="keys")
    chosen = parser.parse_args(arguments)
    if chosen.svg and not has_module("matplotlib"):
        parser.error("--svg needs matplotlib, which is not installed")
    lengths = list(chosen.lengths)
    text = as_json(
        {"seed": SEED, "lengths": lengths, "versions": versions(), "edges": EDGES, "rows": measured(tuple(lengths))}
    )
    rows = json.loads(text)["rows"]  # the figures as they are stored, so that page and picture show these
    print(table(rows), end="")
    for where in filter(None, (chosen.json, chosen.svg)):
        where.parent.mkdir(parents=True, exist_ok=True)
    if chosen.json:
        chosen.json.write_text(text, encoding="utf-8")
    if chosen.page:
        chosen.page.write_text(with_table(chosen.page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    if chosen.svg:
        draw(rows, chosen.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
