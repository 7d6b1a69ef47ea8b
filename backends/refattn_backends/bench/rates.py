"""What the machine itself allows: its matrix products, exponentials and memory bandwidth, and the floors they set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from refattn_backends.blas import one_thread
from refattn_backends.numpy_products import by_rows

ROWS, KEYS, WIDTH = 256, 480, 64
LARGE = 2**24  # numbers, 64 MiB: beyond most caches


@cache
def rates() -> dict[str, float]:
    """Of all cores together: flops and exponentials a second in tiles of float32, and bytes read a second."""
    with one_thread():
        product = _seconds(_product, 200)
        exponential = _seconds(_exponential, 200)
        read = _seconds(_read, 5)
    cores = os.cpu_count() or 1
    return {
        "gemm_flops": cores * 2.0 * ROWS * KEYS * WIDTH / product,
        "exponentials": cores * ROWS * KEYS / exponential,
        "bytes_read": cores * LARGE * 4 / read,
    }


def floor_of(
    heads: int, length: int, width: int, causal: bool, *, products: int, exponentials: int
) -> dict[str, float]:
    """Milliseconds of so many products and exponentials per visible pair, at the machine's rates."""
    pairs = heads * length * (length + 1) / 2 if causal else heads * length**2
    found = rates()
    return {
        "products": 1e3 * pairs * 2 * products * width / found["gemm_flops"],
        "exponentials": 1e3 * pairs * exponentials / found["exponentials"],
    }


def decode_floor(size: int) -> dict[str, float]:
    """Milliseconds to read keys and values once."""
    return {"reading keys and values once": 1e3 * size / rates()["bytes_read"]}


def _product() -> Callable[[], Any]:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((1, *shape), dtype=np.float32) for shape in ((ROWS, WIDTH), (WIDTH, KEYS)))
    out = np.empty((1, ROWS, KEYS), np.float32)
    return lambda: by_rows(a, b, out)


def _exponential() -> Callable[[], Any]:
    logits = np.random.default_rng(0).standard_normal((ROWS, KEYS), dtype=np.float32)
    out = np.empty_like(logits)
    return lambda: np.exp(logits, out=out)


def _read() -> Callable[[], Any]:
    large = np.ones(LARGE, np.float32)
    return lambda: np.dot(large, large)


def _seconds(prepare: Callable[[], Callable[[], Any]], count: int) -> float:
    """Seconds a call, with all cores at it at once, each on data of its own; the best of five."""
    threads = os.cpu_count() or 1
    works = [prepare() for _ in range(threads)]

    def run(work: Callable[[], Any]) -> None:
        for _ in range(count):
            work()

    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(run, works))
            best = min(best, (time.perf_counter() - start) / count)
    return best
