"""BLAS on one thread while the plugins' own threads are at work."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController

_lock = threading.Lock()
_users: list[Any] = []  # the limit that is in force, once per call inside


@contextmanager
def one_thread() -> Iterator[None]:
    """BLAS runs on one thread inside, in the whole process; the last of several calls at once undoes it.

    Each undoing its own would leave the limit in force: what the second finds is what the first has set. And since
    threadpoolctl lets only the thread that set a limit change it, one thread does both for all.
    """
    with _lock:
        _users.append(_users[0] if _users else _setter().submit(_enter).result())
    try:
        yield
    finally:
        with _lock:
            limit = _users.pop()
            if not _users:
                _setter().submit(limit.__exit__, None, None, None).result()


def _enter() -> Any:
    return _controller().limit(limits=1, user_api="blas").__enter__()


@cache
def _setter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="refattn-blas")


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def _forget() -> None:
    """A child process has none of its parent's threads, and its parent's calls do not end in it."""
    global _lock
    _lock = threading.Lock()
    _users.clear()
    _setter.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
