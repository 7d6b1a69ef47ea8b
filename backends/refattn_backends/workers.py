"""The threads that share a plugin's jobs with the thread that calls.

They are not of `concurrent.futures`, whose locks a KeyboardInterrupt may leave locked for good, and whose threads take
no more work once the main thread has ended.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

_orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
_threads: list[threading.Thread] = []
_lock = threading.Lock()


def count() -> int:
    """How many threads may run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(run: Callable[[Any], Any], jobs: Sequence[Any], threads: int) -> list[Any]:
    """run(job) of every job, in order; the calling thread takes part, so that a single job or thread needs no other."""
    results: list[Any] = [None] * len(jobs)
    left = deque(enumerate(jobs))
    helping: list[SimpleQueue[BaseException | None]] = []

    def work() -> None:
        while left:
            try:
                at, job = left.popleft()
            except IndexError:  # another thread took the last one
                return
            results[at] = run(job)

    def help_out() -> None:
        ended: SimpleQueue[BaseException | None] = SimpleQueue()
        helping.append(ended)
        fault = None
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised where the results are waited for
            left.clear()
            fault = error
        ended.put(fault)

    _ask(help_out, min(threads, len(jobs)) - 1)
    try:
        work()
    finally:
        left.clear()  # after an error nobody goes on
        faults = [ended.get() for ended in list(helping)]  # who has not begun by now finds nothing left
    for fault in faults:
        if fault is not None:
            raise fault
    return results


def _ask(order: Callable[[], None], times: int) -> None:
    """Has so many threads call it, or as many as there are."""
    with _lock, suppress(RuntimeError):  # the interpreter is ending
        while len(_threads) < min(times, count()):
            thread = threading.Thread(target=_serve, args=(_orders,), name="refattn", daemon=True)
            thread.start()
            _threads.append(thread)
    for _ in range(times):
        _orders.put(order)


def _serve(orders: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        orders.get()()


def _forget() -> None:
    """A child process has none of its parent's threads."""
    global _orders, _lock
    _orders, _lock = SimpleQueue(), threading.Lock()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
