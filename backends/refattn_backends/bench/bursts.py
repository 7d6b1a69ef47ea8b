"""Times as medians of interleaved bursts, and the peak memory of a process."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TIMED = 3


def medians(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    timed: int = TIMED,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The median seconds of each function: in every round each has one untimed call and `timed` that count.

    A library's worker threads spin for a while after a call and slow the next library; the untimed call takes that.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            function()
            for _ in range(timed):
                start = clock()
                function()
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes() -> int:
    """The largest resident set of this process so far. Raises OSError where the system does not tell."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would include what the parent held before exec
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    if os.name == "nt":
        raise OSError("Windows reports no peak memory to the standard library")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
