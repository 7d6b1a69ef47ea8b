"""The sizes that a benchmark run measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Lengths and repetitions; heads, widths and options are those of the rows themselves."""

    processes: int  # of each row, whose middle one counts
    rounds: int  # bursts per side
    prefill: int  # L of the prefill rows
    gradients: int  # L of the rows of gradients
    cached: int  # keys of the decode rows
    long: int  # L of the memory row
    golden: int  # keys of the sampled golden values
    sampled: int  # their rows
    double: int  # L of the float64 row
    curve: tuple[int, ...]  # L of the curves
    dense: int  # the largest L that the dense path is asked for
    window: int  # keys of the fixed window


FULL = Sizes(3, 5, 2048, 4096, 8192, 16384, 1_000_000, 256, 8192, (256, 512, 1024, 2048, 4096, 8192, 16384), 2048, 256)
QUICK = Sizes(1, 2, 1024, 1024, 2048, 4096, 50_000, 32, 1024, (256, 512, 1024, 2048), 1024, 128)
TINY = Sizes(1, 1, 32, 32, 32, 64, 100, 4, 32, (16, 32), 32, 8)
SIZES = {"full": FULL, "quick": QUICK, "tiny": TINY}
