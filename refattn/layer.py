"""The multi-head attention layer (chapter L)."""

from __future__ import annotations

from typing import Any, NamedTuple

from .arguments import check_call
from .arrays import (
    LARGEST_SIZE,
    Array,
    Library,
    as_size,
    describe,
    device_of,
    into_library,
    library_of,
    quiet,
    same_device,
    same_library,
    spelled,
)
from .cache import Cache
from .cached import cached_call
from .dtypes import compute_dtype, dtype_name, is_float
from .errors import DeviceMismatchError, HeadSplitError, LayerError, LibraryMismatchError
from .heads import check_heads, head_count, merge_heads, pool_kv_heads, split_heads
from .pipeline import attention, attention_stages, path_named
from .rotary import Rotary
from .rotary import rope as turn

#: What `multi_head_attention` takes beside its own arguments.
OPTIONS = frozenset({*(check_call.__kwdefaults__ or {}), "path"})


class AttentionWeights(NamedTuple):
    """The parameters of a layer, used as x @ w + b; w_o None leaves the heads concatenated  # L1"""

    w_q: Array  #: (width, H * d_k)
    w_k: Array  #: (context width, Hkv * d_k)
    w_v: Array  #: (context width, Hkv * d_v)
    w_o: Array | None = None  #: (H * d_v, output width)
    b_q: Array | None = None  #: (H * d_k,)
    b_k: Array | None = None  #: (Hkv * d_k,)
    b_v: Array | None = None  #: (Hkv * d_v,)
    b_o: Array | None = None  #: (output width,)

    def pooled(self, heads: int, kv_heads: int) -> AttentionWeights:
        """The layer with kv_heads key/value heads, the means over groups of its `heads` ones  # G4

        w_k, w_v and their biases are pooled, head by head, by `pool_kv_heads`; the rest is the same. Raises
        HeadSplitError (G4) for head counts that do not divide.

        >>> import numpy as np
        >>> from refattn import AttentionWeights
        >>> square = np.ones((8, 8))
        >>> AttentionWeights(square, square, square, square).pooled(heads=4, kv_heads=2).w_k.shape
        (8, 4)
        """
        heads, kv_heads = head_count(heads, "heads", "G4"), head_count(kv_heads, "kv_heads", "G4")
        if heads % kv_heads:
            raise HeadSplitError("kv_heads", f"a divisor of heads = {heads}", kv_heads, "G4")
        changed = {}
        for name in ("w_k", "w_v", "b_k", "b_v"):
            if (w := getattr(self, name)) is not None:
                library_of(w, name)
                if w.ndim not in (1, 2) or not is_float(w.dtype) or w.shape[-1] % heads:
                    raise HeadSplitError(name, f"floating columns divisible by heads = {heads}", describe(w), "G4")
                changed[name] = _pooled(w, heads, kv_heads)
        return self._replace(**changed)


class LayerResult(NamedTuple):
    """What the layer returns; weights if asked for, cache if one was given."""

    output: Array  #: (..., S, output width)
    weights: Array | None  #: (..., H, S, Lk)
    cache: Cache | None  #: holds the new tokens too


def multi_head_attention(
    x: Array,
    weights: AttentionWeights,
    *,
    heads: int,
    kv_heads: int | None = None,
    context: Array | None = None,
    causal: bool | None = None,
    mask: Any = None,
    rope: Rotary | None = None,
    positions: Any = None,
    cache: Cache | None = None,
    counts: Any = None,
    return_weights: bool = False,
    **options: Any,
) -> LayerResult:
    """Projections, attention per head, concatenation and output projection (L1; Vaswani et al., 2017).

    x (..., S, width) floating, with heads on no axis yet; the parameters share its library, device and dtype. kv_heads
    is heads by default (L2). With context (..., T, context width) keys and values come from it (L3). rope turns
    queries and keys, at `positions` (S,) or (batch..., S), by default q_start + i and k_start + j, which the masks use
    too, or from cache.length on (L4).

    With a cache, x (batch, S, width) holds the next S tokens: keys and values are appended, and causal is True by
    default, else False. Where the entries are padded on the right, counts (batch,) says how many of the S tokens are
    the entry's own: no others are appended, and their rows of the result mean nothing. Other options are those of
    `attention`. Raises LayerError, or the error of the broken clause; a cache that was given is then as it was.

    Returns output (..., S, output width), the weights (..., H, S, Lk) if return_weights (L5), and the cache.

    >>> import numpy as np
    >>> from refattn import AttentionWeights, multi_head_attention
    >>> weights = AttentionWeights(w_q=np.ones((8, 8)), w_k=np.ones((8, 4)), w_v=np.ones((8, 4)), w_o=np.ones((8, 6)))
    >>> layer = multi_head_attention(np.ones((2, 5, 8)), weights, heads=4, kv_heads=2, return_weights=True)
    >>> layer.output.shape, layer.weights.shape
    ((2, 5, 6), (2, 4, 5, 5))
    """
    library = library_of(x, "x")
    if unknown := sorted(options.keys() - OPTIONS):
        raise TypeError(f"multi_head_attention() got an unexpected keyword argument {unknown[0]!r}")
    heads = _head_count(heads, "heads")
    kv_heads = heads if kv_heads is None else _head_count(kv_heads, "kv_heads")
    _check_layer(library, x, weights, heads, kv_heads, context, rope, cache, return_weights)
    if positions is not None and rope is None:
        raise LayerError("positions", "None without a rope, which alone reads them", describe(positions))
    if counts is not None and cache is None:
        raise LayerError("counts", "None without a cache, which alone reads them", describe(counts))
    path = options.get("path", "dense")
    path_named(path)
    if return_weights:
        if path != "dense":
            raise LayerError("path", "'dense' with return_weights, since no other path has them", describe(path))
        options.pop("path", None)
    causal = cache is not None if causal is None else causal
    source = x if context is None else context
    options = {"q_start": None, "k_start": 0, **options, "causal": causal, "mask": mask}
    starts = _check_attention(library, x, source, weights, heads, kv_heads, cache, counts, options)

    q = split_heads(_project(library, x, weights.w_q, weights.b_q), heads)  # (..., H, S, d_k)
    k = split_heads(_project(library, source, weights.w_k, weights.b_k), kv_heads)  # (..., Hkv, T, d_k)
    v = split_heads(_project(library, source, weights.w_v, weights.b_v), kv_heads)  # (..., Hkv, T, d_v)
    if rope is not None:  # L4: before caching
        at = [_positions(library, tokens, start) for tokens, start in zip((x, source), starts, strict=True)]
        if positions is not None:
            at = [positions, positions if context is None else at[1]]
        q, k = turn(q, at[0], **rope._asdict()), turn(k, at[1], **rope._asdict())
    if cache is not None:
        first = None if counts is None else cache.length
        cache = cache.append(k, v, counts)
        k, v, options = cached_call(q, cache, options, first)
    if return_weights:
        stages = attention_stages(q, k, v, **options)
        heads_output, matrix = stages.output, stages.weights  # L5: the same bits
    else:
        heads_output, matrix = attention(q, k, v, **options), None
    output = merge_heads(heads_output)  # (..., S, H * d_v)
    if weights.w_o is not None:  # L6
        output = _project(library, output, weights.w_o, weights.b_o)
    return LayerResult(output, matrix, cache)


def _pooled(w: Array, heads: int, kv_heads: int) -> Array:
    """A matrix (m, heads * n) as (m, kv_heads * n), or a bias (heads * n,) as (kv_heads * n,)."""
    rows = w if w.ndim == 2 else w[None, :]
    pooled = merge_heads(pool_kv_heads(split_heads(rows, heads), kv_heads))
    return pooled if w.ndim == 2 else pooled[0, :]


def _project(library: Library, x: Array, w: Array, b: Array | None) -> Array:
    """x @ w + b in at least float32, rounded once to x's dtype (N1)."""
    xp = library.xp
    dtype = compute_dtype(xp, x.dtype)
    with quiet(library, device_of(library, x)):
        y = xp.matmul(xp.astype(x, dtype, copy=False), xp.astype(w, dtype, copy=False))
        if b is not None:
            y = y + xp.astype(b, dtype, copy=False)
        return xp.astype(y, x.dtype, copy=False)


def _positions(library: Library, x: Array, start: Any) -> Array:
    """start + i for the tokens of x: (S,), or (batch..., S) if the entries differ."""
    xp, device = library.xp, device_of(library, x)
    index = xp.arange(x.shape[-2], device=device)
    if isinstance(start, int):
        return index + start
    start = into_library(start, library, device, "q_start")
    return index + xp.astype(xp.reshape(start, (*start.shape, 1)), index.dtype)


def _check_attention(
    library: Library,
    x: Array,
    source: Array,
    weights: AttentionWeights,
    heads: int,
    kv_heads: int,
    cache: Cache | None,
    counts: Any,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """Checks the call of attention that will follow, before anything is computed or appended (E3).

    Returns the positions of the first query and key, which the masks and RoPE share.
    """
    k_len = source.shape[-2] if cache is None else cache.after(x.shape[-2], counts)
    widths = (weights.w_q.shape[1] // heads, weights.w_k.shape[1] // kv_heads, weights.w_v.shape[1] // kv_heads)
    shapes = ((*x.shape[:-2], heads, x.shape[-2]), *2 * ((*source.shape[:-2], kv_heads, k_len),))
    one = library.xp.zeros((1, 1), dtype=x.dtype, device=device_of(library, x))
    stand_ins = [library.xp.broadcast_to(one, (*shape, width)) for shape, width in zip(shapes, widths, strict=True)]
    checked = {name: option for name, option in options.items() if name != "path"}
    if cache is not None:
        if options["q_start"] is not None:
            expected = "None beside a cache, whose length gives the positions"
            raise LayerError("q_start", expected, describe(options["q_start"]))
        checked["q_start"] = cache.position(cache.length, options["k_start"])
    call = check_call(*stand_ins, **checked)
    return (call.q_start, call.k_start) if cache is None else (call.q_start, call.q_start)


def _head_count(heads: Any, argument: str) -> int:
    number = as_size(heads, 1)
    if number is None:
        raise LayerError(argument, f"an int >= 1, at most {LARGEST_SIZE}", describe(heads))
    return number


def _check_layer(
    library: Library,
    x: Array,
    weights: AttentionWeights,
    heads: int,
    kv_heads: int,
    context: Array | None,
    rope: Any,
    cache: Any,
    return_weights: Any,
) -> None:
    device = device_of(library, x)
    check_heads(heads, kv_heads)
    if not isinstance(weights, AttentionWeights):
        raise LayerError("weights", "AttentionWeights", describe(weights))
    if x.ndim < 2 or not is_float(x.dtype):
        raise LayerError("x", "a floating array (..., S, width)", describe(x))
    arrays = {"context": context, **weights._asdict()}
    _check_fed(library, device, x, weights)
    for argument, array in arrays.items():
        if array is None and argument not in ("w_q", "w_k", "w_v"):
            continue
        same_library(library, array, argument)
        same_device(library, device, array, argument)
        if dtype_name(array.dtype) != dtype_name(x.dtype):
            raise LayerError(argument, f"the dtype of x, {dtype_name(x.dtype)}", describe(array))
    if context is not None and (context.ndim != x.ndim or cache is not None):
        raise LayerError("context", f"rank {x.ndim}, as x has, and no cache beside it", describe(context))
    if cache is not None and not (isinstance(cache, Cache) and x.ndim == 3):
        expected = "a cache, such as a KVCache, with x (batch, S, width)"
        raise LayerError("cache", expected, f"{describe(cache)} with x {describe(x)}")
    if rope is not None and not isinstance(rope, Rotary):
        raise LayerError("rope", "a Rotary(style, base, width)", describe(rope))
    if not isinstance(return_weights, bool):
        raise LayerError("return_weights", "Python's True or False", describe(return_weights))
    _check_widths(x, context, *weights[:3])
    _check_parameters(weights, x.shape[-1], (x if context is None else context).shape[-1], heads, kv_heads)


def _check_fed(library: Library, device: Any, x: Array, weights: AttentionWeights) -> None:
    """Blames x for its library, device or dtype where the matrices agree with each other and not with it."""
    others = [library_of(w, name) for name, w in zip(("w_q", "w_k", "w_v"), weights[:3], strict=True)]
    if others[0].xp is not library.xp and all(other.xp is others[0].xp for other in others):
        expected = f"an array of {spelled(others[0])}, as the weights are"
        raise LibraryMismatchError("x", expected, f"an array of {spelled(library)}")
    on = device_of(library, weights.w_q)
    if device is not None and on not in (None, device) and all(device_of(library, w) == on for w in weights[:3]):
        raise DeviceMismatchError("x", f"an array on {on}, as the weights are", f"an array on {device}")
    names = {dtype_name(w.dtype) for w in weights[:3]}
    if len(names) == 1 and dtype_name(x.dtype) not in names:
        raise LayerError("x", f"the dtype of the weights, {names.pop()}", describe(x))


def _check_widths(x: Array, context: Any, w_q: Array, w_k: Array, w_v: Array) -> None:
    """Blames x or the context for its width where the matrices that it meets have the same number of rows."""
    rows = [w.shape[0] if w.ndim == 2 else None for w in (w_q, w_k, w_v)]
    for argument, array, met in (
        ("x", x, rows if context is None else rows[:1]),
        ("context", context, rows[1:]),
    ):
        if met[0] is None or met != met[:1] * len(met):
            continue
        if array is not None and array.shape[-1] != met[0]:
            raise LayerError(argument, f"a last axis of {met[0]}, the rows of its matrices", describe(array))
        if array is None and rows[0] == x.shape[-1] != met[0]:
            raise LayerError(argument, f"an array (..., T, {met[0]}), as w_k and w_v have {met[0]} rows", "None")


def _check_parameters(weights: AttentionWeights, width: int, source_width: int, heads: int, kv_heads: int) -> None:
    """Each parameter's shape, in the order in which the widths follow from each other."""
    w_q, w_k, w_v, w_o = weights[:4]
    for argument, w, rows, count in (
        ("w_q", w_q, width, heads),
        ("w_k", w_k, source_width, kv_heads),
        ("w_v", w_v, source_width, kv_heads),
    ):
        if w.ndim != 2 or w.shape[0] != rows or w.shape[1] % count:
            raise LayerError(argument, f"a matrix with {rows} rows and columns divisible by {count}", describe(w))
    if w_q.shape[1] // heads != w_k.shape[1] // kv_heads:
        d_k = w_q.shape[1] // heads
        raise LayerError("w_k", f"kv_heads * d_k = {kv_heads} * {d_k} columns, d_k as w_q has", describe(w_k))
    joined = heads * (w_v.shape[1] // kv_heads)
    if w_o is not None and (w_o.ndim != 2 or w_o.shape[0] != joined):
        raise LayerError("w_o", f"a matrix with heads * d_v = {joined} rows", describe(w_o))
    if w_o is None and weights.b_o is not None:
        raise LayerError("b_o", "None, since there is no w_o", describe(weights.b_o))
    for argument, b, w in zip(("b_q", "b_k", "b_v", "b_o"), weights[4:], weights[:4], strict=True):
        if b is not None and tuple(b.shape) != (w.shape[1],):
            raise LayerError(argument, f"shape ({w.shape[1]},)", describe(b))
