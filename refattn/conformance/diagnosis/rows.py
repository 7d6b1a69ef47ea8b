"""Which other reading of the same arguments gives a result: the usual misunderstandings, the plainest first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from refattn.arrays import Array, library_of
from refattn.errors import RefattnError
from refattn.goldens import Golden, golden


class Call(NamedTuple):
    """The arguments of one call of attention."""

    q: Array
    k: Array
    v: Array
    options: dict[str, Any]

    def but(self, **changes: Any) -> Call:
        """The same call with other options."""
        return self._replace(options=self.options | changes)


def likeness(call: Call, rows: Any, fits: Callable[[Golden], bool]) -> str:
    """The reading whose golden value on these rows fits, in words; "" if none does."""
    for words, other in readings(call):
        with contextlib.suppress(RefattnError):  # a reading that these arguments do not allow is none
            if fits(golden(other.q, other.k, other.v, rows=rows, **other.options)):
                return words
    return ""


def readings(call: Call) -> Iterator[tuple[str, Call]]:
    """Other readings: what each one is, and the call that follows the specification and means it."""
    yield from _positions(call)
    given = call.options
    mask = given.get("mask")
    if mask is not None:
        yield "the mask inverted, True hiding its pair", call.but(mask=~mask)
        yield "no mask", call.but(mask=None)
    if given.get("scale") is not None:
        yield "the default scale 1 / sqrt(d_k)", call.but(scale=None)
    yield "a scale of 1", call.but(scale=1.0)
    for name, words in (("softcap", "no soft cap"), ("bias", "no bias"), ("sinks", "no sinks")):
        if given.get(name) is not None:
            yield words, call.but(**{name: None})
    if call.q.ndim > 2 and 1 < call.k.shape[-3] < call.q.shape[-3]:
        group = call.q.shape[-3] // call.k.shape[-3]
        xp = library_of(call.q, "q").xp
        k, v = (xp.concat([x] * group, axis=-3) for x in (call.k, call.v))
        yield "query head h reading key/value head h % Hkv instead of h // (H / Hkv)", call._replace(k=k, v=v)


def _positions(call: Call) -> Iterator[tuple[str, Call]]:
    """Other alignments of the queries, the causal rule forgotten, or applied where nobody asked for it (M4, M5)."""
    causal, start = bool(call.options.get("causal")), call.options.get("q_start")
    surplus = call.k.shape[-2] - call.q.shape[-2]
    named = {"top-left": 0, "bottom-right": surplus}
    if causal or start is not None:
        asked = 0 if start is None else start
        instead = f" instead of {asked}" if isinstance(asked, int) else ""
        for name, other in named.items():
            if not (isinstance(asked, int) and asked == other):
                rule = f"causal aligned {name}" if causal else f"positions aligned {name}"
                yield f"{rule}, q_start={other}{instead}", call.but(q_start=other)
        if causal:
            yield "a causal rule that hides each query's own position", call.but(q_start=asked - 1)
            yield "a causal rule that shows one key too many", call.but(q_start=asked + 1)
            yield "no causal rule", call.but(causal=False)
    else:
        for name, other in named.items():
            yield f"a causal rule, aligned {name}, that was not asked for", call.but(causal=True, q_start=other)
