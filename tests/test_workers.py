"""The NumPy plugin's threads, and BLAS held to one thread meanwhile: bits, errors, interrupts, forks, late calls."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import threadpoolctl

import refattn
from refattn_backends import blas, numpy_tiles, workers

pytestmark = pytest.mark.library("numpy")


@pytest.mark.parametrize("shape", [(8, 700), (8, 1), (1, 4)], ids=str)
def test_threads_change_no_bit(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread and four give the same bits, however the work is cut for them, and whatever the other heads hold."""
    rng = np.random.default_rng(3)
    heads, q_len = shape
    for least in ("SOLO", "SOLO_FEW"):
        monkeypatch.setattr(numpy_tiles, least, 0)
    q, k, v = (rng.standard_normal((heads, n, 24)).astype(np.float32) for n in (q_len, 9000, 9000))
    q[heads // 2 :] *= 30
    results = []
    for threads in (1, 4):
        monkeypatch.setattr(workers, "count", lambda threads=threads: threads)
        results.append(refattn.attention(q, k, v, causal=True, q_start=8000, path="tiled"))
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize(
    ("q_len", "k_len", "threads", "held"),
    [(100, 100, 1, False), (500, 500, 1, True), (1200, 1200, 3, True), (1, 2000, 1, False), (1, 300000, 3, True)],
)
def test_a_call_has_the_threads_that_it_is_worth(
    q_len: int, k_len: int, threads: int, held: bool, monkeypatch: Any
) -> None:
    """Short calls neither wait for a second thread nor stop to hold BLAS; long ones, and long decode steps, do both."""
    shared, holding, share = [], [], workers.share

    def counted(run: Any, jobs: Any, count: int) -> Any:
        shared.append(count)
        return share(run, jobs, count)

    def hold() -> Any:
        holding.append(True)
        return blas.one_thread()

    monkeypatch.setattr(workers, "count", lambda: 3)
    monkeypatch.setattr(workers, "share", counted)
    monkeypatch.setattr(numpy_tiles, "one_thread", hold)
    q, k = (np.zeros((4, n, 8), np.float32) for n in (q_len, k_len))
    refattn.attention(q, k, k, path="tiled")
    assert shared[-1] == threads and bool(holding) == held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_process_computes_too() -> None:
    """A process that forks off after a call has threads of its own."""
    q = np.random.default_rng(5).standard_normal((4, 600, 32)).astype(np.float32)
    assert q.size * 600 > numpy_tiles.SOLO
    expected = refattn.attention(q, q, q, path="tiled")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        there = pool.submit(refattn.attention, q, q, q, path="tiled").result(timeout=60)
    assert there.tobytes() == expected.tobytes()


LATE = """
import threading, time
import numpy as np
import refattn

def late():
    threading.main_thread().join()
    refattn.attention(x, x, x, path="tiled")
    print("computed")

x = np.ones((4, 600, 32), np.float32)
threading.Thread(target=late).start()
"""


# What Python 3.12 does then, whatever Python this is.
REFUSED = """
import threading
import numpy as np
import refattn

def start(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")

x = np.random.default_rng(5).standard_normal((4, 600, 32))
threading.Thread.start = start
assert np.allclose(refattn.attention(x, x, x, path="tiled"), refattn.attention(x, x, x))
print("computed")
"""


@pytest.mark.parametrize("program", [LATE, REFUSED], ids=["late", "refused"])
def test_a_thread_that_outlives_the_main_one_computes_too(program: str) -> None:
    """When the main thread has ended, other threads have the plugin's threads, or compute without if none may start."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("computed\n", "")


def test_a_call_waits_for_its_own_jobs_alone() -> None:
    """While other calls keep all the threads, one more call does its jobs itself."""
    open_now, busy = threading.Event(), threading.Semaphore(0)

    def wait(_: Any) -> None:
        busy.release()
        open_now.wait(60)

    others = [threading.Thread(target=workers.share, args=(wait, range(9), 9)) for _ in range(2)]
    for other in others:
        other.start()
    for _ in range(2 + min(8, workers.count())):
        assert busy.acquire(timeout=60)
    done: list[Any] = []
    last = threading.Thread(target=lambda: done.append(workers.share(lambda job: -job, range(9), 9)))
    last.start()
    last.join(10)
    in_time = bool(done)
    open_now.set()
    for thread in (*others, last):
        thread.join(60)
    assert in_time
    assert done == [[-job for job in range(9)]]


def test_no_job_runs_on_when_its_call_has_ended() -> None:
    """A call waits for each thread that has begun to help, also where others come too late for that."""
    running: list[int] = []

    def run(job: int) -> int:
        running.append(job)
        time.sleep(1e-4 * (job % 3))
        running.remove(job)
        return job

    for _ in range(300):
        assert workers.share(run, range(9), 9) == [*range(9)]
        assert not running


@pytest.mark.parametrize("of_caller", [False, True])
def test_errors_in_jobs_are_raised(of_caller: bool) -> None:
    """An error that a job raises, in whichever thread, ends the call that waits for it."""
    caller = threading.current_thread()

    def run(_: Any) -> None:
        if (threading.current_thread() is caller) == of_caller:
            raise ZeroDivisionError
        time.sleep(0.01)

    with pytest.raises(ZeroDivisionError):
        workers.share(run, range(40), 2)


def blas_threads() -> list[int]:
    return [x["num_threads"] for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"]


def test_blas_is_held_to_one_thread_and_let_go() -> None:
    """Inside, BLAS has one thread, whoever has set another limit before; afterwards it is what it was."""
    before = blas_threads()
    with blas.one_thread(), blas.one_thread():
        assert set(blas_threads()) == {1}
    assert blas_threads() == before
    with threadpoolctl.threadpool_limits(2):
        limited = blas_threads()
        with blas.one_thread():
            assert set(blas_threads()) == {1}
        assert blas_threads() == limited
    assert blas_threads() == before


def test_a_limit_that_fails_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong while BLAS is being held is raised where it was asked for, and the next call works."""

    def fails() -> Any:
        raise OSError("no such library")

    monkeypatch.setattr(blas, "_controller", fails)
    with pytest.raises(OSError, match="no such library"), blas.one_thread():
        pass
    monkeypatch.undo()
    with blas.one_thread():
        assert set(blas_threads()) == {1}


def test_an_interrupt_leaves_blas_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyboardInterrupt while BLAS is being held to one thread does not leave it there."""
    before, interrupts = blas_threads(), [KeyboardInterrupt]

    class Interrupted(SimpleQueue):  # type: ignore[type-arg]
        def get(self, *more: Any) -> Any:
            if interrupts:
                raise interrupts.pop()
            return super().get(*more)

    monkeypatch.setattr(blas, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt), blas.one_thread():
        pass
    monkeypatch.undo()
    with blas.one_thread():
        pass
    assert blas_threads() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_process_forked_during_a_call_has_all_of_blas() -> None:
    """The limit of a call that goes on in the parent ends in a process that forks off meanwhile."""
    before = blas_threads()
    with blas.one_thread(), ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        assert pool.submit(blas_threads).result(timeout=60) == before
