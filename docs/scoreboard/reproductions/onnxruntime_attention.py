"""What the operator Attention of ONNX does otherwise in ONNX Runtime on the CPU, in onnx and onnxruntime alone."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

ONES = np.ones((1, 1, 2, 8), dtype=np.float32)


def _attend(q, k, v, mask=None, **attributes):
    names = ["Q", "K", "V"] + ["attn_mask"] * (mask is not None)
    node = helper.make_node("Attention", names, ["Y"], **attributes)
    kinds = [TensorProto.FLOAT] * 3 + [TensorProto.BOOL]
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds)]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, (q, k, v, mask))))[0]


def _refused(*arguments, **attributes):
    try:
        _attend(*arguments, **attributes)
    except Exception as refusal:  # the classes of its errors have no common one of its own
        return "ONNXRuntimeError" in str(refusal)
    return False


def hidden_nan() -> None:
    """A NaN in a hidden value reaches every row of the output.

    Clauses: K3, K4, K7, K8, M17, M19, M20. Implementations: onnxruntime.
    """
    v = ONES.copy()
    v[..., 1, :] = np.nan
    assert np.isnan(_attend(ONES, ONES, v, np.array([[True, False]] * 2))).all()


def scale_that_is_not_positive() -> None:
    """A scale of 0 or below is refused.

    Clauses: P2, S2, S3. Implementations: onnxruntime.
    """
    assert _refused(ONES, ONES, ONES, scale=-0.5) and _refused(ONES, ONES, ONES, scale=0.0)


def sizes_of_zero() -> None:
    """No entries, heads, queries, keys or width are refused.

    Clauses: A6. Implementations: onnxruntime.
    """
    for nothing in (ONES[:0], ONES[:, :0], ONES[:, :, :0], ONES[..., :0]):
        assert _refused(nothing, nothing, nothing)
