"""Tiled attention for any Array API library: the dense pipeline on one tile at a time, merged online (T1, T2, T4).

Each tile of rows and keys is a call of its own, so every option means what it means in the specification; only which
tiles are looked at, and the merging, is decided here. A tile that the mask shows no pair of is skipped, and one that
it shows all of is not masked.
"""

from __future__ import annotations

from collections.abc import Iterator

from refattn.arguments import Call
from refattn.arrays import Array, Library, quiet
from refattn.partials import Partial, merge_two, with_sinks
from refattn.pipeline import run_stages

ROWS, KEYS = 512, 512  # the largest tile; a tile of float32 scores of one head is then 1 MiB


def tiled(call: Call, rows: int | None = None, keys: int | None = None) -> Partial:
    """Output (..., H, Lq, d_v) and log-sum-exp (..., H, Lq) of a call, in the compute dtype, sinks included.

    rows and keys are the largest tile, ROWS and KEYS by default.
    """
    with quiet(call.library):
        return finished(call.library, *unfinished(call, rows, keys), call.sinks)


def unfinished(call: Call, rows: int | None = None, keys: int | None = None) -> tuple[Partial, Array]:
    """The partial of a call over its keys, which may not be all, and the rows that `over_keys` marks; no sinks."""
    parts = [over_keys(call, part, keys) for part in spans(call.tile[0], rows or ROWS)]
    return stacked(call, parts) if parts else (identity(call), nowhere(call))


def over_keys(call: Call, rows: range, width: int | None = None) -> tuple[Partial, Array]:
    """One tile of rows over its keys, `width` at a time, without sinks, and a mark on rows that P7 may be about.

    Those see keys somewhere whose logits are all -inf. They count as over no keys until `finished`, since other keys
    or a sink may make them harmless.
    """
    whole, bare = None, nowhere(call)
    for keys in shown(call, rows, call.tile[1], width or KEYS):
        answer = call.answer(rows, keys)
        if answer == "none":
            continue
        part, some = over_tile(cut(call, rows, keys, masked=answer != "all"))
        whole, bare = part if whole is None else merge_two(call.library, whole, part), bare | some
    return identity(cut(call, rows, range(0), masked=False)) if whole is None else whole, bare


def stacked(call: Call, parts: list[tuple[Partial, Array]]) -> tuple[Partial, Array]:
    """Tiles of rows below each other, and the marks on them."""
    if len(parts) == 1:
        return parts[0]
    xp = call.library.xp
    outputs, lses = zip(*(part for part, _ in parts), strict=True)
    marks = [xp.broadcast_to(some, part.lse.shape) for part, some in parts]
    return Partial(xp.concat(outputs, axis=-2), xp.concat(lses, axis=-1)), xp.concat(marks, axis=-1)


def finished(library: Library, whole: Partial, bare: Array | None, sinks: Array | None) -> Partial:
    """The partial over all keys with sinks, and NaN in marked rows that neither a logit nor a sink lifts (P7)."""
    xp, whole = library.xp, whole if sinks is None else with_sinks(library, whole, sinks)
    if bare is None:
        return whole
    broken = (whole.lse == -float("inf")) & bare
    output = xp.where(broken[..., None], float("nan"), whole.output)
    return Partial(output, xp.where(broken, float("nan"), whole.lse))


def nowhere(call: Call) -> Array:
    """A mark on no row, broadcastable to (..., H, Lq)."""
    return call.library.xp.zeros((1, 1), dtype=call.library.xp.bool, device=call.device)


def over_tile(call: Call) -> tuple[Partial, Array]:
    """What `over_keys` says of all rows and keys at once: softmax would make NaN of the rows that it marks."""
    xp = call.library.xp
    if 0 in call.scores_shape:  # of which not every library knows a maximum
        return Partial(*run_stages(call, lambda _, value: value)), nowhere(call)
    seen: dict[str, Array] = {}

    def stage(name: str, value: Array) -> Array:
        if name == "visible":
            seen["any"] = True if value is None else xp.any(value, axis=-1)
        elif name == "logits":
            void = seen["void"] = xp.max(value, axis=-1) == -float("inf")
            if not call.library.host or void.any():
                value = xp.where(void[..., None], 0.0, value)
        return value

    output, lse = run_stages(call, stage)
    void = seen["void"]
    bare = void & seen["any"]
    # What is infinite or NaN in a bare row comes of visible values (M20).
    output = xp.where(void[..., None] & ~(bare[..., None] & ~xp.isfinite(output)), 0.0, output)
    return Partial(output, xp.where(void, -float("inf"), lse)), bare


def cut(call: Call, rows: range, keys: range, *, masked: bool) -> Call:
    """The call on a tile of its rows and keys, without sinks; q, k and v are views where the library has them."""
    first_row, first_key = (whole.start for whole in call.tile)
    part = slice(keys.start - first_key, keys.stop - first_key)
    return call._replace(
        q=call.q[..., rows.start - first_row : rows.stop - first_row, :],
        k=call.k[..., part, :],
        v=call.v[..., part, :],
        scores_shape=(*call.scores_shape[:-2], len(rows), len(keys)),
        tile=(rows, keys),
        mask=call.mask if masked else None,
        sinks=None,
    )


def identity(call: Call) -> Partial:
    """The partial over no keys: output 0, log-sum-exp -inf (T2)."""
    xp, shape = call.library.xp, call.scores_shape[:-1]
    output = xp.zeros((*shape, call.v.shape[-1]), dtype=call.compute, device=call.device)
    return Partial(output, xp.full(shape, -float("inf"), dtype=call.compute, device=call.device))


def shown(call: Call, rows: range, keys: range, width: int) -> Iterator[range]:
    """The keys in pieces of at most `width`, without long stretches that the mask hides from all of the rows.

    A row of a narrow window among very many keys asks the mask a few times, not once per piece.
    """
    if call.mask is None or len(keys) <= width:
        yield from spans(keys, width)
    elif call.answer(rows, keys) != "none":
        middle = (len(keys) // width + 1) // 2 * width
        for part in (keys[:middle], keys[middle:]):
            yield from shown(call, rows, part, width)


def spans(whole: range, step: int) -> Iterator[range]:
    """The range in pieces of at most `step`."""
    return (whole[start : start + step] for start in range(0, len(whole), step))
