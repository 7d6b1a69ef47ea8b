"""BLAS on one thread while the plugins' own threads are at work."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from queue import SimpleQueue
from typing import Any

from threadpoolctl import OpenBLASController, ThreadpoolController

_lock = threading.Lock()
_limit: Any = None  # what is in force, and knows what was before


@contextmanager
def one_thread() -> Iterator[None]:
    """BLAS runs on one thread inside, in the whole process; the last of several calls at once undoes it.

    Each undoing its own would leave the limit in force: what the second finds is what the first has set. And since
    threadpoolctl lets only the thread that set a limit change it, one thread does both for all. It is also one that
    no KeyboardInterrupt reaches: what has been asked of it gets done.
    """
    orders: SimpleQueue[Any] | None = None
    with _lock, suppress(RuntimeError):
        orders = _orders()
    if orders is None:  # the interpreter is ending and starts no more threads, the plugin's own neither
        yield
        return
    user, answer = object(), SimpleQueue[BaseException | None]()
    try:
        orders.put((user, answer, True))
        _raise(answer.get())
        yield
    finally:
        orders.put((user, answer, False))
        _raise(answer.get())


def _raise(fault: BaseException | None) -> None:
    if fault is not None:
        raise fault


@cache
def _orders() -> SimpleQueue[Any]:
    orders: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_serve, args=(orders,), name="refattn-blas", daemon=True).start()
    return orders


def _serve(orders: SimpleQueue[Any]) -> None:
    global _limit
    users: set[object] = set()
    while True:
        user, answer, begin = orders.get()
        fault = None
        try:
            (users.add if begin else users.discard)(user)
            if users and _limit is None:
                _take_over()
                _limit = _controller().limit(limits=1, user_api="blas").__enter__()
            elif not users and _limit is not None:
                _take_over()
                _limit.__exit__(None, None, None)
                _limit = None
        except BaseException as error:  # noqa: BLE001  # it is the caller's
            fault = error
        answer.put(fault)


def _take_over() -> None:
    """Lets this thread set limits even inside a `threadpool_limits` of another, which then silently would not."""
    with suppress(AttributeError):  # versions of threadpoolctl that let any thread
        OpenBLASController.clear_controlling_thread(force=True)


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def _forget() -> None:
    """A child process has none of its parent's threads, and its parent's calls do not end in it."""
    global _lock, _limit
    _lock = threading.Lock()
    _orders.cache_clear()
    if _limit is not None:
        _take_over()
        _limit.restore_original_limits()
        _take_over()
        _limit = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
