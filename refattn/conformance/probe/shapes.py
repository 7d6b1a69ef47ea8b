"""Probes of chapter A: axes, ranks, widths, sizes of zero, memory layouts, the dtype of the result."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import LAYOUTS, Problem
from refattn.conformance.plain import Draw
from refattn.conformance.probe.caller import HEADS, WIDTH, Caller, Crashed, NotOffered, Raised, Seen, blank, planted
from refattn.conformance.probe.probes import Probes

PROBES = Probes()


@PROBES.add(
    "axes of the output",
    "A1",
    {
        "(..., heads, tokens, width)": "as q and v have them",
        "(..., tokens, heads, width)": "heads and tokens are exchanged",
        "scrambled": "the memory of (tokens, heads) is read as (heads, tokens)",
    },
)
def axes(call: Caller) -> Seen | str:
    """Two batch entries, two heads, three queries, one-hot scores over three keys; v is 100 b + 10 h + j: the output
    names the batch entry, the head and the query."""
    f = call.likely_factor()
    raw = np.eye(3) * math.copysign(2.0 ** round(math.log2(64 / abs(f))), f)
    data = planted(raw, call.dtype, batch=2)
    entry, head, key = np.ogrid[0:2, 0:HEADS, 0:3]
    marks = np.broadcast_to(100.0 * entry + 10.0 * head + key, (2, HEADS, 3))
    data["v"] = np.broadcast_to(marks[..., None], (2, HEADS, 3, WIDTH)).copy()
    output = call.result(Problem(**data)).output
    turned = np.swapaxes(marks, 1, 2)
    readings: dict[str, Array] = {
        "(..., heads, tokens, width)": marks,
        "(..., tokens, heads, width)": turned,
        "scrambled": turned.reshape(marks.shape),
    }
    for name, expected in readings.items():
        if output.shape == (*expected.shape, WIDTH) and call.close(output, expected[..., None]):
            return name
    return Seen("other", f"the output has shape {output.shape}, and does not hold what v marks")


@PROBES.add(
    "values of another width",
    "A1",
    {"accepted": "d_v may differ from d_k", "as wide as q": "the output is as wide as q, not as v"},
)
def width_of_values(call: Caller) -> Seen | str:
    """All scores 0, three queries and keys, d_k = 16, v of ones with d_v = 4: the output."""
    data = blank(3, 3, call.dtype)
    data["v"] = np.ones((1, HEADS, 3, 4))
    output = call.result(Problem(**data)).output
    if output.shape == (1, HEADS, 3, WIDTH):
        return "as wide as q"
    right = output.shape == (1, HEADS, 3, 4) and call.close(output, 1.0)
    return "accepted" if right else Seen("other", f"the output has shape {output.shape}")


@PROBES.add("rank 2", "A2", {"accepted": "rank 2 is one head"})
def rank_two(call: Caller) -> Seen | str:
    """q = k = 0 of shape (3, 16), v of ones: the output."""
    data = {name: x[0, 0] if name != "dtype" else x for name, x in blank(3, 3, call.dtype).items()}
    output = call.result(Problem(**data)).output
    right = output.shape == data["v"].shape and call.close(output[..., :3], 1 / 3)
    return "accepted" if right else Seen("other", f"the output has shape {output.shape}")


@PROBES.add(
    "sizes of zero",
    "A6",
    {
        "all accepted": "no queries, keys, batch entries, widths: all give what they must",
        "some refused": "some sizes of zero are refused",
        "some wrong": "some sizes of zero give something wrong",
        "some crash": "some sizes of zero end the process",
    },
)
def sizes_of_zero(call: Caller) -> Seen:
    """v of ones, and in turn no queries, no keys, no batch entries, d_k = 0, d_v = 0 and both: the output, of the shape
    that q and v give, 0 for rows over no keys and 1 otherwise."""
    found: dict[str, list[str]] = {"some crash": [], "some wrong": [], "some refused": []}
    asked, not_asked = [], []
    for name, (batch, q_len, k_len, d_k, d_v) in {
        "Lq = 0": (1, 0, 3, WIDTH, WIDTH),
        "Lk = 0": (1, 3, 0, WIDTH, WIDTH),
        "batch = 0": (0, 3, 3, WIDTH, WIDTH),
        "d_k = 0": (1, 3, 3, 0, WIDTH),
        "d_v = 0": (1, 3, 3, WIDTH, 0),
        "d_k = d_v = 0": (1, 3, 3, 0, 0),
    }.items():
        q, k = np.zeros((batch, HEADS, q_len, d_k)), np.zeros((batch, HEADS, k_len, d_k))
        problem = Problem(q=q, k=k, v=np.ones((batch, HEADS, k_len, d_v)), dtype=call.dtype)
        try:
            output = call.result(problem).output
        except NotOffered:
            not_asked.append(name)
            continue
        except Crashed as fault:
            found["some crash"].append(f"{name} ({fault})")
        except Raised as refusal:
            found["some refused"].append(f"{name} ({refusal})")
        else:
            if output.shape != (batch, HEADS, q_len, d_v):
                found["some wrong"].append(f"{name} gives shape {output.shape}")
            elif not call.close(output, float(k_len > 0)):
                found["some wrong"].append(f"{name} gives {output.ravel()[0]:.6g}")
        asked.append(name)
    if not asked:
        raise NotOffered("it cannot be asked for sizes of zero")
    words = "; ".join(f"{kind.partition(' ')[2]}: {', '.join(ones)}" for kind, ones in found.items() if ones)
    words = words or f"{', '.join(asked)} give what they must; it cannot be asked for {', '.join(not_asked)}" * bool(
        not_asked
    )
    return Seen(next((kind for kind, ones in found.items() if ones), "all accepted"), words)


@PROBES.add(
    "strides",
    "A7",
    {
        "honoured": "views of any strides give what copies give",
        "ignored": "some views give something else than copies",
        "some refused": "some views are refused",
    },
)
def strides(call: Caller) -> Seen | str:
    """Normal q, k and v, contiguous, permuted, transposed, sliced out of a buffer of NaN, expanded over the heads, and
    reversed: the outputs."""
    draw = Draw(call.dtype, np.random.default_rng(7))
    problem = Problem(**draw.qkv(5, 6, batch=(1,), d_k=WIDTH))
    expected, alike = call.output(problem), _one_head(problem)
    expanded, refused, wrong, not_taken = call.output(alike), [], [], []
    for layout in LAYOUTS[1:]:
        same_heads = layout == "expanded"
        try:
            output = call.output(replace(alike if same_heads else problem, layout=layout))
        except NotOffered:
            not_taken.append(layout)
            continue
        except Raised as refusal:
            refused.append(f"{layout} ({refusal})")
            continue
        if not call.close(output, expanded if same_heads else expected):
            wrong.append(layout)
    if wrong:
        return Seen("ignored", f"wrong where arrays are {', '.join(wrong)}")
    if refused:
        return Seen("some refused", f"refused: {'; '.join(refused)}")
    words = f"views give what copies give, but for arrays that are {' or '.join(not_taken)}, which it does not take"
    return Seen("honoured", words if not_taken else "")


def _one_head(problem: Problem) -> Problem:
    """The same with the first head for all."""
    first = {name: np.repeat(getattr(problem, name)[..., :1, :, :], HEADS, axis=-3) for name in "qkv"}
    return replace(problem, **first)  # type: ignore[arg-type]  # three arrays


@PROBES.add(
    "dtype of the result",
    "A4",
    {
        "that of q": "the output has the dtype of q",
        "float32": "the output is always float32",
        "float64": "always float64",
        "float32 for float64": "the output is float32 for float64, and has the dtype of q otherwise",
    },
)
def dtype_of_result(call: Caller) -> Seen | str:
    """One query over two keys in every dtype that the target has: the dtype of the output."""
    found = {dtype: call.result(Problem(**blank(1, 2, dtype))).dtype for dtype in call.dtypes}
    if all(asked == got for asked, got in found.items()):
        return "that of q"
    other = {asked: got for asked, got in found.items() if got != asked}
    if other == {"float64": "float32"} and len(found) > 2:
        return "float32 for float64"
    words = ", ".join(f"{got} for {asked}" for asked, got in other.items())
    kinds = set(found.values())
    return Seen(kinds.pop() if kinds in ({"float32"}, {"float64"}) else "other", f"it is {words}")
