"""What the operator Attention of ONNX does otherwise in its own reference evaluator, in onnx alone."""

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

ONES = np.ones((1, 1, 2, 8), dtype=np.float32)


def _attend(q, k, v, mask=None, **attributes):
    names = ["Q", "K", "V"] + ["attn_mask"] * (mask is not None)
    node = helper.make_node("Attention", names, ["Y"], **attributes)
    kind = helper.np_dtype_to_tensor_dtype(q.dtype)
    kinds = [kind] * 3 + [TensorProto.BOOL]
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds)]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("Y", kind, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    return ReferenceEvaluator(model).run(None, dict(zip(names, (q, k, v, mask))))[0]


def hidden_nan() -> None:
    """A NaN in a hidden value reaches every row of the output.

    Clauses: K3, K4, K7, K8, M17, M19, M20. Implementations: onnx-reference.
    """
    v = ONES.copy()
    v[..., 1, :] = np.nan
    assert np.isnan(_attend(ONES, ONES, v, np.array([[True, False]] * 2))).all()


def negative_scale() -> None:
    """A negative scale gives NaN, since its square root multiplies queries and keys.

    Clauses: P2, S2, S3. Implementations: onnx-reference.
    """
    assert np.isnan(_attend(ONES, ONES, ONES, scale=-0.5)).all()


def no_keys() -> None:
    """Without keys it raises an error.

    Clauses: A6. Implementations: onnx-reference.
    """
    try:
        _attend(ONES, ONES[:, :, :0], ONES[:, :, :0])
    except ValueError:
        return
    raise AssertionError("accepted")


def sums_in_16_bits() -> None:
    """Everything is computed in the dtype of the inputs: in bfloat16 a row of 1024 equal weights sums to far from 1.

    Clauses: G1, N1, N6, P1, P2, S2, T1. Implementations: onnx-reference.
    """
    zeros, ones = (np.full((1, 1, 1024, 8), x, dtype=ml_dtypes.bfloat16) for x in (0, 1))
    assert abs(float(_attend(zeros[:, :, :1], zeros, ones)[0, 0, 0, 0]) - 1) > 0.1


def scale_in_32_bits() -> None:
    """Scale and soft cap are attributes, and so float32, also where everything else is float64.

    Clauses: N1. Implementations: onnx-reference.
    """
    q = np.eye(2, 8, dtype=np.float64)[None, None]
    weight = np.exp(0.1) / (np.exp(0.1) + 1)
    error = abs(_attend(q, q, q, scale=0.1)[0, 0, 0, 0] - weight)
    assert 1e-11 < error < 1e-7
