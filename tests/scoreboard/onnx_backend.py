"""refattn behind ONNX's public backend interface: models of one node Attention, without a cache inside the node."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep

import refattn
from refattn import masks

# What the node can ask for that refattn has no function for.
DEBUG_OUTPUT = "qk_matmul_output, a look inside the node"


class Prepared(BackendRep):  # type: ignore[misc]  # onnx is not followed by mypy
    """One node, ready to run."""

    def __init__(self, model: Any) -> None:
        (self.node,) = model.graph.node
        self.attributes = {one.name: onnx.helper.get_attribute_value(one) for one in self.node.attribute}
        self.outputs = [one.name for one in model.graph.output]

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """Y, and the present keys and values where they are asked for."""
        names = [name for name in self.node.input if name]
        given = dict(zip(names, inputs))
        by_role = {role: given.get(name) for role, name in zip(ROLES, self.node.input)}
        found = attention(self.attributes, **by_role)
        named = dict(zip((name for name in self.node.output), found))
        return tuple(named[name] for name in self.outputs)


ROLES = ("q", "k", "v", "mask", "past_k", "past_v", "lengths")


def attention(
    attributes: dict[str, Any],
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    past_k: Any = None,
    past_v: Any = None,
    lengths: Any = None,
) -> tuple[Any, Any, Any]:
    """The node in terms of refattn: Y in the rank of Q, and keys and values with the past before them."""
    flat = q.ndim == 3
    if flat:
        q, k, v = (
            refattn.split_heads(x, attributes[f"{kind}_num_heads"]) for x, kind in ((q, "q"), (k, "kv"), (v, "kv"))
        )
    offset: Any = 0
    if past_k is not None:
        offset = past_k.shape[-2]
        k, v = np.concatenate([past_k, k], axis=-2), np.concatenate([past_v, v], axis=-2)
    elif lengths is not None:
        offset = lengths.astype(np.int64) - q.shape[-2]
    options: dict[str, Any] = {"causal": bool(attributes.get("is_causal", 0)), "q_start": offset}
    for name in ("scale", "softcap"):
        if attributes.get(name):
            options[name] = attributes[name]
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    seen = masks.window(None if left < 0 else left, None if right < 0 else right)
    if lengths is not None:
        seen = seen & masks.lengths(lengths)
    if mask is not None and mask.shape[-1] < k.shape[-2]:  # shorter than the keys: what lies beyond is padding
        missing = k.shape[-2] - mask.shape[-1]
        fill = False if mask.dtype == bool else -np.inf
        mask = np.concatenate([mask, np.full((*mask.shape[:-1], missing), fill, dtype=mask.dtype)], axis=-1)
    if mask is not None and mask.dtype == bool:
        seen = seen & masks.dense(mask)
    elif mask is not None:
        options["bias"] = mask
    output = refattn.attention(q, k, v, mask=seen, **options)
    return (refattn.merge_heads(output) if flat else output), k, v


def reason_to_skip(model: Any) -> str:
    """Why a model is beyond this backend, or an empty string."""
    if len(model.graph.node) != 1 or model.graph.node[0].op_type != "Attention":
        kinds = {node.op_type for node in model.graph.node}
        return "the node FlexAttention" if kinds == {"FlexAttention"} else "Attention spelled out in other nodes"
    if len(model.graph.node[0].output) > 3:
        return DEBUG_OUTPUT
    return ""


class RefattnBackend(Backend):  # type: ignore[misc]  # onnx is not followed by mypy
    """The backend."""

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **_: Any) -> bool:
        return not reason_to_skip(model)

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **_: Any) -> Prepared:
        return Prepared(model)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"
