"""Functions of other calling conventions and their backward functions, built from refattn, right and wrong.

They say nothing about refattn: they show what a target hands over, and what it makes of the gradients that come back.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

import refattn
from refattn.arrays import library_of

Array = Any

# Tokens before heads, positions, a bias beside the mask, sinks and a log-sum-exp in base 2.
BSHD = """
says = "tokens before heads, everything by a name of its own"
layout = "BSHD"
aligns = "q_start"
names = { scale = "softmax_scale", softcap = "cap", sinks = "s_aux", q_start = "offset", k_start = "k_offset" }
causal = { name = "is_causal", with_mask = true }
mask = { name = "hidden", means = "hidden" }
bias = { name = "attn_bias" }
lse = { axes = "BSH", base = "2" }
"""

# One call for each entry of the batch, and one tensor for mask and bias.
HSD = """
says = "one entry of a batch, mask and bias in one tensor of heads, queries and keys"
layout = "HSD"
names = { scale = "scale", softcap = "softcap" }
mask = { name = "added", means = "added", axes = "HQK", broadcasts = false }
bias = { name = "added", axes = "HQK", broadcasts = false }
"""

# The tokens of all entries one after the other.
THD = """
says = "packed tokens, aligned bottom-right"
layout = "THD"
aligns = "bottom-right"
names = { scale = "scale", softcap = "softcap", sinks = "sinks" }
causal = { name = "causal" }
packed = { cu_q = "cu_q", cu_k = "cu_k" }
"""

CONVENTIONS = {"bshd": BSHD, "hsd": HSD, "thd": THD}


def _turned(*arrays: Array) -> list[Array]:
    """Tokens and heads in the other order."""
    return [library_of(x, "x").xp.moveaxis(x, -2, -3) for x in arrays]


def _options(
    softmax_scale: Any = None,
    cap: Any = None,
    s_aux: Any = None,
    offset: Any = None,
    k_offset: Any = 0,
    is_causal: bool = False,
    hidden: Any = None,
    attn_bias: Any = None,
) -> dict[str, Any]:
    found = {"scale": softmax_scale, "softcap": cap, "sinks": s_aux, "causal": is_causal, "bias": attn_bias}
    found |= {} if hidden is None else {"mask": ~hidden}
    return found | ({"q_start": offset, "k_start": k_offset} if is_causal else {})


def bshd(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Output and log-sum-exp in base 2, tokens before heads."""
    output, lse = refattn.attention_with_lse(*_turned(q, k, v), **_options(**options))
    return _turned(output)[0], library_of(lse, "lse").xp.moveaxis(lse, -1, -2) / np.log(2)


def bshd_backward(q: Array, k: Array, v: Array, grad_output: Array, **options: Any) -> dict[str, Array]:
    """The gradients by the names of the parameters."""
    found = refattn.attention_vjp(*_turned(q, k, v, grad_output), **_options(**options))
    named = dict(zip(("q", "k", "v"), _turned(*found[:3])))
    return named | {"attn_bias": found.bias, "s_aux": found.sinks}


def bshd_by_output(
    q: Array, k: Array, v: Array, grad_output: Array, output: Array, lse: Array, **options: Any
) -> dict[str, Array]:
    """The same where output and log-sum-exp are those of the function, and nothing where they are not."""
    again, sums = bshd(q, k, v, **options)
    right = np.array_equal(output, again) and np.array_equal(lse, sums)
    return bshd_backward(q, k, v, grad_output, **options) if right else {}


def bshd_wrong_bias(q: Array, k: Array, v: Array, grad_output: Array, **options: Any) -> dict[str, Array]:
    """The gradient of the bias is half of what it should be."""
    found = bshd_backward(q, k, v, grad_output, **options)
    return found if found["attn_bias"] is None else found | {"attn_bias": found["attn_bias"] / 2}


def bshd_wrong_sinks(q: Array, k: Array, v: Array, grad_output: Array, **options: Any) -> dict[str, Array]:
    """The gradient of the sinks has the other sign."""
    found = bshd_backward(q, k, v, grad_output, **options)
    return found if found["s_aux"] is None else found | {"s_aux": -found["s_aux"]}


def bshd_heads_first(q: Array, k: Array, v: Array, grad_output: Array, **options: Any) -> dict[str, Array]:
    """The gradients of q, k and v have heads before tokens."""
    found = bshd_backward(q, k, v, grad_output, **options)
    return found | dict(zip(("q", "k", "v"), _turned(*(found[name] for name in "qkv"))))


def hsd(q: Array, k: Array, v: Array, *, scale: Any = None, softcap: Any = None, added: Array | None = None) -> Array:
    """The output of one entry."""
    return refattn.attention(q, k, v, scale=scale, softcap=softcap, bias=added)


def hsd_backward(
    q: Array, k: Array, v: Array, grad_output: Array, *, scale: Any = None, softcap: Any = None, added: Any = None
) -> tuple[Array, ...]:
    """The gradients in order; that of the tensor that is added is the bias'."""
    found = refattn.attention_vjp(q, k, v, grad_output, scale=scale, softcap=softcap, bias=added)
    return (found.q, found.k, found.v, *(() if added is None else (found.bias,)))


def _entries(cu_q: Array, cu_k: Array) -> list[tuple[slice, slice]]:
    rows, keys = (pairwise(int(end) for end in x) for x in (cu_q, cu_k))
    return [(slice(*some), slice(*others)) for some, others in zip(rows, keys)]


def thd(q: Array, k: Array, v: Array, *, cu_q: Array, cu_k: Array, causal: bool = False, **options: Any) -> Array:
    """The outputs of all entries, packed."""
    xp, outputs = library_of(q, "q").xp, []
    for rows, keys in _entries(cu_q, cu_k):
        start = (keys.stop - keys.start) - (rows.stop - rows.start)
        outputs += _turned(
            refattn.attention(*_turned(q[rows], k[keys], v[keys]), causal=causal, q_start=start, **options)
        )
    return xp.concat(outputs, axis=0)


def thd_backward(
    q: Array, k: Array, v: Array, grad_output: Array, *, cu_q: Array, cu_k: Array, causal: bool = False, **options: Any
) -> tuple[Array, ...]:
    """The gradients of all entries, packed; those of the sinks summed over the entries."""
    several: list[Any] = []
    for rows, keys in _entries(cu_q, cu_k):
        start = (keys.stop - keys.start) - (rows.stop - rows.start)
        given = _turned(q[rows], k[keys], v[keys], grad_output[rows])
        several.append(refattn.attention_vjp(*given, causal=causal, q_start=start, **options))
    packed = [library_of(q, "q").xp.concat([_turned(x)[0] for x in xs], axis=0) for xs in list(zip(*several))[:3]]
    if "sinks" not in options:
        return tuple(packed)
    sinks = np.sum([one.sinks for one in several], axis=0, dtype=np.float64)
    return (*packed, sinks.astype(q.dtype))
