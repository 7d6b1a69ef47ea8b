"""Chapter C: what attention costs, counted from the sizes alone.

Every count is exact integer arithmetic and stands beside its formula. Counts are for the full rectangle of
Lq x Lk pairs: a causal mask hides about half of them, but straightforward dense work does not shrink.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from refattn.arrays import as_int, describe, is_one_of
from refattn.errors import CostError

# Bytes of one element.
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

# One weight costs five operations: scale, subtract the row's maximum, exponential, add to the sum, divide.
SOFTMAX_FLOPS = 5


@dataclass(frozen=True)
class AttentionCost:
    """The cost of one attention over q (B, H, Lq, d_k), k (B, Hkv, Lk, d_k) and v (B, Hkv, Lk, d_v).

    weights_per_head      Lq Lk, the score elements of one head of one batch entry           C1
    weights               B H Lq Lk, those of all heads and entries; both also in bytes      C1
    score_flops           2 B H Lq Lk d_k, one multiply and one add per component            C2
    softmax_flops         5 B H Lq Lk, see SOFTMAX_FLOPS                                     C2
    value_flops           2 B H Lq Lk d_v, one multiply and one add per component            C2
    bytes_moved           (H Lq + Hkv Lk) (d_k + d_v) B elements: q, k and v read once, the
                          output written once; no kernel moves less                          C2
    bytes_materialised    bytes_moved, and scores and weights each written and read once     C2
    intensity             flops / bytes_moved, the most that a kernel can reach              C2
    kv_cache_elements     B Lk Hkv (d_k + d_v), which is 2 B S Hkv d_h for equal widths      C3
    """

    q_len: int
    k_len: int
    heads: int
    kv_heads: int
    d_k: int
    d_v: int
    batch: int
    dtype: str
    weights_per_head: int
    weights_per_head_bytes: int
    weights: int
    weights_bytes: int
    score_flops: int
    softmax_flops: int
    value_flops: int
    flops: int
    bytes_moved: int
    bytes_materialised: int
    intensity: float
    intensity_materialised: float
    kv_cache_elements: int
    kv_cache_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Alternative:
    """One way of mixing n tokens of width d (C4): its name, its parameter if it has one, and what it costs.

    work   multiply-adds that mix tokens in one layer; projections of single tokens, linear in n, are left out
    path   steps that information takes between the first and the last token: layers, or state updates;
           None means that it never gets there
    steps  operations that must follow each other in one layer when all tokens are known beforehand
    state  numbers kept for the next token when tokens arrive one by one
    """

    method: str
    parameter: str
    work_formula: str
    work: int
    path_formula: str
    path: int | None
    steps_formula: str
    steps: int
    state_formula: str
    state: int

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def attention_cost(
    q_len: int,
    k_len: int,
    *,
    heads: int,
    kv_heads: int | None = None,
    d_k: int,
    d_v: int | None = None,
    batch: int = 1,
    dtype: str = "float16",
) -> AttentionCost:
    """The cost of attention of q_len queries over k_len keys (C1, C2, C3).

    kv_heads=None is heads, d_v=None is d_k; see `AttentionCost` for the formulas. Raises CostError for a size
    that is not a whole number >= 0, for heads that are not a multiple of kv_heads, and for an unknown dtype.

    >>> from refattn import cost
    >>> one = cost.attention_cost(4096, 4096, heads=32, d_k=128)
    >>> one.weights_per_head, one.weights_bytes
    (16777216, 1073741824)
    """
    q_len, k_len, batch = _size("q_len", q_len), _size("k_len", k_len), _size("batch", batch)
    heads, kv_heads = _heads(heads, kv_heads)
    d_k = _size("d_k", d_k)
    d_v = d_k if d_v is None else _size("d_v", d_v)
    item = _item_bytes(dtype)

    per_head = q_len * k_len  # C1
    weights = batch * heads * per_head
    score_flops = 2 * weights * d_k  # C2
    softmax_flops = SOFTMAX_FLOPS * weights
    value_flops = 2 * weights * d_v
    flops = score_flops + softmax_flops + value_flops
    moved = batch * (heads * q_len + kv_heads * k_len) * (d_k + d_v) * item
    materialised = moved + 4 * weights * item  # scores and weights, each written and read
    cached = batch * k_len * kv_heads * (d_k + d_v)  # C3
    return AttentionCost(
        q_len=q_len,
        k_len=k_len,
        heads=heads,
        kv_heads=kv_heads,
        d_k=d_k,
        d_v=d_v,
        batch=batch,
        dtype=dtype,
        weights_per_head=per_head,
        weights_per_head_bytes=per_head * item,
        weights=weights,
        weights_bytes=weights * item,
        score_flops=score_flops,
        softmax_flops=softmax_flops,
        value_flops=value_flops,
        flops=flops,
        bytes_moved=moved,
        bytes_materialised=materialised,
        intensity=flops / moved if moved else 0.0,
        intensity_materialised=flops / materialised if materialised else 0.0,
        kv_cache_elements=cached,
        kv_cache_bytes=cached * item,
    )


def prefill_cost(length: int, **sizes: Any) -> AttentionCost:
    """The cost of reading a prompt: every one of its tokens attends over all of them (C1, C2, C3).

    sizes are the keywords of `attention_cost`. The work is quadratic in length.
    """
    return attention_cost(length, length, **sizes)


def decode_cost(length: int, **sizes: Any) -> AttentionCost:
    """The cost of one new token that attends over length keys, its own among them (C1, C2, C3).

    sizes are the keywords of `attention_cost`. The work is linear in length; all of the cache is read for one
    query, so the intensity grows with heads / kv_heads and with nothing else.
    """
    return attention_cost(1, length, **sizes)


def kv_cache_elements(batch: int, length: int, kv_heads: int, head_width: int) -> int:
    """Numbers in one layer's cache, keys and values: 2 B S Hkv d_h (C3). Raises CostError for bad sizes.

    >>> from refattn import cost
    >>> [cost.kv_cache_elements(1, 1000, kv_heads, 128) for kv_heads in (8, 2, 1)]
    [2048000, 512000, 256000]
    """
    sizes = {"batch": batch, "length": length, "kv_heads": kv_heads, "head_width": head_width}
    return 2 * math.prod(_size(name, value) for name, value in sizes.items())


def kv_cache_bytes(batch: int, length: int, kv_heads: int, head_width: int, dtype: str = "float16") -> int:
    """Bytes of one layer's cache (C3). Raises CostError for bad sizes or an unknown dtype."""
    return kv_cache_elements(batch, length, kv_heads, head_width) * _item_bytes(dtype)


def alternatives(length: int, width: int, *, kernel: int = 16, window: int = 256) -> tuple[Alternative, ...]:
    """Full attention and what can stand in its place, for n = length tokens of d = width numbers each (C4).

    kernel is the number of inputs that a causal one-dimensional convolution sees, window the number of keys
    that local attention sees, the token itself included in both. Raises CostError for bad sizes.

    >>> from refattn import cost
    >>> [(one.method, one.path) for one in cost.alternatives(1000, 64)][:2]
    [('full attention', 1), ('recurrent', 999)]
    """
    n, d = _size("length", length), _size("width", width)
    k, w = _size("kernel", kernel, least=1), _size("window", window, least=1)
    seen = min(w, n)
    return (
        Alternative(
            method="full attention",
            parameter="",
            work_formula="2 n^2 d",
            work=2 * n * n * d,
            path_formula="1",
            path=min(1, max(0, n - 1)),
            steps_formula="1",
            steps=1,
            state_formula="2 n d",
            state=2 * n * d,
        ),
        Alternative(
            method="recurrent",
            parameter="",
            work_formula="n d^2",
            work=n * d * d,
            path_formula="n - 1",
            path=max(0, n - 1),
            steps_formula="n",
            steps=n,
            state_formula="d",
            state=d,
        ),
        Alternative(
            method="convolution",
            parameter=f"k = {k}",
            work_formula="n k d^2",
            work=n * k * d * d,
            path_formula="ceil((n-1)/(k-1))",
            path=_hops(n - 1, k - 1),
            steps_formula="1",
            steps=1,
            state_formula="(k - 1) d",
            state=(k - 1) * d,
        ),
        Alternative(
            method="local attention",
            parameter=f"w = {w}",
            work_formula="2 n min(w, n) d",
            work=2 * n * seen * d,
            path_formula="ceil((n-1)/(w-1))",
            path=_hops(n - 1, w - 1),
            steps_formula="1",
            steps=1,
            state_formula="2 min(w, n) d",
            state=2 * seen * d,
        ),
    )


def _hops(distance: int, reach: int) -> int | None:
    """Layers needed to carry something over a distance when each layer reaches that far back."""
    if distance <= 0:
        return 0
    return -(-distance // reach) if reach else None


def _size(name: str, value: int, least: int = 0) -> int:
    size = as_int(value)
    if size is None or size < least:
        raise CostError(name, f"a whole number of at least {least}", describe(value))
    return size


def _heads(heads: int, kv_heads: int | None) -> tuple[int, int]:
    heads = _size("heads", heads)
    kv_heads = heads if kv_heads is None else _size("kv_heads", kv_heads)
    if heads % kv_heads if kv_heads else heads:
        raise CostError("kv_heads", f"a divisor of heads = {heads}, as G1 demands", kv_heads)
    return heads, kv_heads


def _item_bytes(dtype: str) -> int:
    if not is_one_of(dtype, ITEM_BYTES):
        raise CostError("dtype", f"one of {', '.join(ITEM_BYTES)}", describe(dtype))
    return ITEM_BYTES[dtype]
