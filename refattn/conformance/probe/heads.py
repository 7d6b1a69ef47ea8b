"""Probes of grouped heads (chapter G)."""

from __future__ import annotations

import numpy as np

from refattn.conformance.case import Problem
from refattn.conformance.probe.caller import WIDTH, Caller, NotOffered, Seen
from refattn.conformance.probe.probes import Probes

PROBES = Probes()
HEADS, KV_HEADS, K_LEN = 6, 3, 4
MAPPINGS = {
    "h // group": [h // (HEADS // KV_HEADS) for h in range(HEADS)],
    "h % Hkv": [h % KV_HEADS for h in range(HEADS)],
    "first for all": [0] * HEADS,
    "reversed": [KV_HEADS - 1 - h // (HEADS // KV_HEADS) for h in range(HEADS)],
}


@PROBES.add(
    "head mapping",
    "G1",
    {
        "h // group": "query head h reads key/value head h // (H / Hkv)",
        "h % Hkv": "query head h reads key/value head h % Hkv",
        "first for all": "all query heads read the first key/value head",
        "reversed": "query heads read the key/value heads in reverse",
    },
)
def mapping(call: Caller) -> Seen | str:
    """Six query heads over three key/value heads of four keys: key head g answers at key g alone, far above the rest,
    and value j of head g is 10 g + j, so that each output names the key head and the value head that it came from."""
    if reason := call.lacks("gqa"):
        raise NotOffered(reason)
    q, k = np.zeros((1, HEADS, 1, WIDTH)), np.zeros((1, KV_HEADS, K_LEN, WIDTH))
    v = np.zeros((1, KV_HEADS, K_LEN, WIDTH))
    q[..., 0] = 32.0
    for g in range(KV_HEADS):
        k[0, g, g, 0] = np.sign(call.factor()) * 32.0
        v[0, g, :, 0] = 10 * g + np.arange(K_LEN)
    output = call.output(Problem(q=q, k=k, v=v, dtype=call.dtype))[0, :, 0, 0]
    found = call.match(output, {name: [11.0 * g for g in heads] for name, heads in MAPPINGS.items()})
    if found == "other" and np.all(np.isfinite(output)):
        pairs = [divmod(round(float(one)), 10) for one in output]
        listed = ", ".join(f"{h}: k {key}, v {value}" for h, (value, key) in enumerate(pairs))
        return Seen(found, f"query heads read {listed}")
    return found
