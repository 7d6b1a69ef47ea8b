"""How a function without q_start reads causal where Lq != Lk: a note, because the specification asks for q_start there.

Two kernels that contradict each other can both conform otherwise: no case gives them Lq != Lk with causal (M5).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from refattn.conformance.capture import captured
from refattn.conformance.case import Problem
from refattn.conformance.judge import judge
from refattn.conformance.plain import Draw

Q_LEN, K_LEN = 3, 5
READINGS = {"top-left": 0, "bottom-right": K_LEN - Q_LEN}


def reading_of(target: Any, seed: int) -> str:
    """top-left, bottom-right, neither, or refuses (with the error's class); "" if the answer has not even a shape."""
    dtype = "float32" if "float32" in target.dtypes else target.dtypes[0]
    draw = Draw(dtype, np.random.default_rng(seed))
    problem = Problem(**draw.ramp(Q_LEN, K_LEN), causal=True)
    try:
        with captured([]):
            result = target.call(problem)
    except (Exception, SystemExit) as refusal:  # noqa: BLE001  # a refusal is an answer here, whatever its class
        return f"refuses ({getattr(refusal, 'kind', '') or type(refusal).__name__})"
    for reading, start in READINGS.items():
        judged = judge(replace(problem, q_start=start), result)
        if judged.fault:
            return ""
        if judged.verdict == "pass":
            return reading
    return "neither"


def note_on(reading: str) -> str:
    """The line of the summary."""
    reads = {"neither": "reads neither top-left nor bottom-right"}.get(reading, reading)
    reads = f"reads {reading}" if reading in READINGS else reads
    return f"causal with Lq != Lk and no q_start: {reads}; the specification asks for q_start there (M5)"
