"""The threads that share a plugin's jobs with the thread that calls."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any


def count() -> int:
    """How many threads may run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(run: Callable[[Any], Any], jobs: Sequence[Any], threads: int) -> list[Any]:
    """run(job) of every job, in order; the calling thread takes part, so that a single job or thread needs no other."""
    results: list[Any] = [None] * len(jobs)
    left = deque(enumerate(jobs))

    def work() -> None:
        while left:
            try:
                at, job = left.popleft()
            except IndexError:  # another thread took the last one
                return
            results[at] = run(job)

    others = [_pool().submit(work) for _ in range(min(threads, len(jobs)) - 1)]
    try:
        work()
    finally:
        left.clear()  # after an error nobody goes on
        for other in others:
            other.result()
    return results


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count(), thread_name_prefix="refattn")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
