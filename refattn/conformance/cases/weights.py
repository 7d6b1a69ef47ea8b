"""Chapter X: what weights do not show."""

from __future__ import annotations

import numpy as np

from refattn import attention_stages
from refattn.conformance.case import Api, Chapter, Problem
from refattn.conformance.expect import expect, expect_within
from refattn.conformance.judge import golden_of

CASES = Chapter("weights")


@CASES.check("X1")
def different_weights_one_output(api: Api) -> None:
    """Two queries prefer different keys whose values are equal: different weights, the same output."""
    q = np.asarray([[[4.0, 0.0]], [[0.0, 4.0]]])
    k = np.broadcast_to([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]], (2, 3, 2))
    v = np.broadcast_to([[1.0, -1.0], [1.0, -1.0], [1.0, -1.0]], (2, 3, 2))
    problem = Problem(dtype=api.dtype, q=q, k=k, v=v)
    stages = attention_stages(*(api.array(x) for x in (q, k, v)))
    weights, output = api.host(stages.weights), api.host(stages.output)
    apart = float(np.max(np.abs(weights[0] - weights[1])))
    expect(apart > 0.9, f"the two weight rows differ by {apart:.3g} only, expected nearly 1")
    bound = golden_of(problem).bound(api.dtype, coherent=True)
    expect_within("output of the second query", output[1], output[0], 2 * bound[0])


@CASES.check("X2")
def one_weight_matrix_different_outputs(api: Api) -> None:
    """The same queries and keys with other values: equal weights, different outputs."""
    data = api.draw.qkv(4, 6)
    q, k = api.array(data["q"]), api.array(data["k"])
    first, second = (attention_stages(q, k, api.array(v)) for v in (data["v"], -data["v"]))
    same = np.array_equal(api.host(first.weights), api.host(second.weights))
    expect(same, "the weights must not depend on the values")
    expect_within("output for negated values", api.host(second.output), -api.host(first.output), np.zeros(1))
    apart = float(np.max(np.abs(api.host(first.output) - api.host(second.output))))
    expect(apart > 0.5, f"the outputs differ by {apart:.3g} only")
