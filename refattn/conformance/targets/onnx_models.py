"""Models of one ONNX node, and how ONNX's reference evaluator and ONNX Runtime run them on host arrays."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import numpy as np

from refattn.arrays import Array

# The opset of most calls, and the newest file format that both evaluators know.
OPSET, IR_VERSION = 24, 11
MICROSOFT = "com.microsoft"


class HostArrays:
    """NumPy arrays as tensors of ONNX, for a target of one distribution and its dtypes."""

    def __init__(self, distribution: str, dtypes: tuple[str, ...]) -> None:
        self.name, self.dtypes = distribution, dtypes
        self.capabilities = frozenset({*dtypes, "mutable"})

    def version(self) -> str:
        """The distribution's version."""
        return importlib.metadata.version(self.name)

    def array(self, host: Array, dtype: str | None = None, device: str | None = None) -> Array:
        """A copy of a host array."""
        if dtype == "bfloat16":
            import ml_dtypes

            return np.asarray(host).astype(ml_dtypes.bfloat16)
        return np.array(host, dtype=dtype)

    def host(self, x: Array) -> Array:
        """The values as float64."""
        return np.asarray(x).astype(np.float64)


def _tensor_type(dtype: Any) -> int:
    import onnx

    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype))


@functools.lru_cache(maxsize=256)
def _model(
    operator: str,
    domain: str,
    inputs: tuple[tuple[str, Any], ...],
    outputs: tuple[tuple[str, Any], ...],
    attributes: tuple[tuple[str, Any], ...],
    opset: int,
) -> Any:
    from onnx import helper

    node = helper.make_node(
        operator, [n for n, _ in inputs], [n for n, _ in outputs], domain=domain, **dict(attributes)
    )
    given, made = (
        [helper.make_tensor_value_info(name, _tensor_type(dtype), None) for name, dtype in values if name]
        for values in (inputs, outputs)
    )
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    graph = helper.make_graph([node], "attention", given, made)
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


@functools.lru_cache(maxsize=256)
def _session(*key: Any) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it refuses it also raises
    serialized = _model(*key).SerializeToString()
    return onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


@functools.lru_cache(maxsize=256)
def _evaluator(*key: Any) -> Any:
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(_model(*key))


def run_node(
    evaluator: str,
    operator: str,
    inputs: dict[str, Array | None],
    outputs: tuple[str, ...],
    *,
    domain: str = "",
    opset: int = OPSET,
    **attributes: Any,
) -> list[Array]:
    """The results of one node; inputs in the operator's order, None for one left out; evaluator: reference, runtime."""
    given = {name: x for name, x in inputs.items() if x is not None}
    while inputs and next(reversed(inputs.values())) is None:
        inputs = dict(list(inputs.items())[:-1])
    dtype = next(iter(given.values())).dtype
    key = (
        operator,
        domain,
        tuple((name, x.dtype) if x is not None else ("", None) for name, x in inputs.items()),
        tuple((name, dtype) for name in outputs),
        tuple(attributes.items()),
        opset,
    )
    run = {"reference": _evaluator, "runtime": _session}[evaluator]
    found: list[Array] = run(*key).run(None, given)
    return found
