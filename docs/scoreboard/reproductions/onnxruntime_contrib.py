"""What ONNX Runtime's MultiHeadAttention and GroupQueryAttention do otherwise, in onnx and onnxruntime alone."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

ONES = np.ones((1, 2, 8), dtype=np.float32)  # (batch, tokens, heads * width), one head
V = np.array([1.0, 3.0], dtype=np.float32).reshape(1, 2, 1) * ONES
NONE = np.zeros((1, 1, 0, 8), dtype=np.float32)
HIDDEN = np.full((1, 1, 2, 2), -np.inf, dtype=np.float32)
SECOND_HIDDEN = np.array([0.0, -np.inf], dtype=np.float32) + np.zeros((1, 1, 2, 1), dtype=np.float32)


def _run(operator, inputs, outputs, **attributes):
    names = list(inputs)
    given = {name: x for name, x in inputs.items() if x is not None}
    node = helper.make_node(
        operator, [n if n in given else "" for n in names], outputs, domain="com.microsoft", **attributes
    )
    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
    infos = [helper.make_tensor_value_info(name, kinds[x.dtype], None) for name, x in given.items()]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", infos, made), opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, given)[0]


def _multi_head(q, k, v, mask=None, **attributes):
    inputs = {"query": q, "key": k, "value": v, "bias": None, "key_padding_mask": None}
    if mask is not None:
        inputs["attention_bias"] = mask
    names = list(inputs) if mask is not None else ["query", "key", "value"]
    attributes = {"num_heads": 1, **attributes}
    return _run("MultiHeadAttention", {name: inputs[name] for name in names}, ["output"], **attributes)


def _group_query(q, k, v, mask=None, **attributes):
    inputs = {
        "query": q,
        "key": k,
        "value": v,
        "past_key": NONE,
        "past_value": NONE,
        "seqlens_k": np.full(len(q), k.shape[1] - 1, dtype=np.int32),
        "total_sequence_length": np.asarray(k.shape[1], dtype=np.int32),
    }
    if mask is not None:
        inputs |= {"cos_cache": None, "sin_cache": None, "position_ids": None, "attention_bias": mask}
    outputs = ["output", "present_key", "present_value"]
    attributes = {"num_heads": 1, "kv_num_heads": 1, "causal": 0, **attributes}
    return _run("GroupQueryAttention", inputs, outputs, **attributes)


def hidden_nan() -> None:
    """A NaN in a hidden value reaches every row of the output.

    Clauses: K3, K4, K7, K8, M17, M19, M20. Implementations: onnxruntime-mha, onnxruntime-gqa.
    """
    v = ONES.copy()
    v[:, 1] = np.nan
    for attend in (_multi_head, _group_query):
        assert np.isnan(attend(ONES, ONES, v, SECOND_HIDDEN)).all()


def empty_row() -> None:
    """A row that attention_bias leaves without a key is NaN instead of 0.

    Clauses: K7, M3, M5, M9, M10, M11, M12, M13, M15, M17, M21, P2, P3, T1, T2.
    Implementations: onnxruntime-mha, onnxruntime-gqa.
    """
    for attend in (_multi_head, _group_query):
        assert np.isnan(attend(ONES, ONES, V, HIDDEN)).all()


def unidirectional_adds_a_finite_number() -> None:
    """Where unidirectional hides what attention_bias leaves, the row sees the future, which is hidden by -10000 alone.

    Clauses: M11, M13, M16. Implementations: onnxruntime-mha.
    """
    first_hidden = np.array([-np.inf, 0.0], dtype=np.float32) + np.zeros((1, 1, 2, 1), dtype=np.float32)
    assert (_multi_head(ONES, ONES, V, first_hidden, unidirectional=1)[0, 0] == 3).all()


def last_row_of_more_keys() -> None:
    """With unidirectional and more keys than queries the last query sees all keys, instead of two.

    Clauses: M5. Implementations: onnxruntime-mha.
    """
    k, v = np.concatenate([ONES, ONES], axis=1), np.concatenate([V, 5 * V], axis=1)  # 1, 3, 5, 15
    assert (_multi_head(ONES, k, v, unidirectional=1)[0, :, 0] == [1, 6]).all()


def scale_of_zero() -> None:
    """A scale of 0 stands for the default scale.

    Clauses: S2. Implementations: onnxruntime-mha, onnxruntime-gqa.
    """
    q = np.array([1.0, 2.0], dtype=np.float32).reshape(1, 2, 1) * ONES
    for attend in (_multi_head, _group_query):
        assert (attend(q, q, V, scale=0.0) == attend(q, q, V)).all()


def nan_query() -> None:
    """A NaN in a query gives 0 instead of NaN in every row but the last.

    Clauses: M20, M21. Implementations: onnxruntime-gqa.
    """
    q = np.ones((1, 4, 8), dtype=np.float32)
    v = q.copy()
    q[:, 2, 0] = np.nan
    assert (_group_query(q, v, v, causal=1)[0, 2] == 0).all()


def no_width_ends_the_process() -> None:
    """With a width of 0 an integer is divided by zero, which ends the process.

    Clauses: A6. Implementations: onnxruntime-mha.
    """
    _multi_head(ONES[..., :0], ONES[..., :0], ONES[..., :0])


def no_entries() -> None:
    """A batch of 0 entries is refused.

    Clauses: A6. Implementations: onnxruntime-gqa.
    """
    try:
        _group_query(ONES[:0], ONES[:0], ONES[:0])
    except Exception as refusal:  # the classes of its errors have no common one of its own
        assert "batch_size" in str(refusal)
        return
    raise AssertionError("accepted")
