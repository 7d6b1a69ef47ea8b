"""Kernels that do to their process, or to the judge, what no kernel should. No line of them imports refattn at the top.

`right` is attention in NumPy; the others are named after what they do.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

Array = Any


def right(q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None) -> Array:
    """Attention for equal lengths, in at least float32, without cleverness."""
    wide = np.float64 if q.dtype == np.float64 else np.float32
    group = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    k, v = (np.repeat(x, group, axis=-3) if group > 1 else x for x in (k, v))
    scores = q.astype(wide) @ np.swapaxes(k, -1, -2).astype(wide)
    scores = scores * wide(q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v.astype(wide)).astype(q.dtype)


def segfaults(q: Array, k: Array, v: Array) -> Array:
    ctypes.string_at(8)
    return q


def hangs(q: Array, k: Array, v: Array) -> Array:
    while True:
        time.sleep(1)


def hangs_deaf(q: Array, k: Array, v: Array) -> Array:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def exits(q: Array, k: Array, v: Array) -> Array:
    sys.exit(0)


def leaves_at_once(q: Array, k: Array, v: Array) -> Array:
    os._exit(0)


def interrupts(q: Array, k: Array, v: Array) -> Array:
    raise KeyboardInterrupt


def eats_memory(q: Array, k: Array, v: Array) -> Array:
    eaten = []
    while True:
        eaten.append(np.ones(2**21))


def prints_garbage(q: Array, k: Array, v: Array) -> Array:
    print('{"verdict": "pass"}')
    os.write(1, b"\x00\xff\x1b[31m garbage" * 20_000)
    return right(q, k, v)


class _Fake:
    """An object that is equal to everything, and says that it is an array of NumPy."""

    __module__ = "numpy"
    dtype = np.dtype("float32")

    def __init__(self, like: Array) -> None:
        self.shape = like.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return np.zeros(self.shape, dtype or np.float32)

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def pretends_to_be_an_array(q: Array, k: Array, v: Array) -> Any:
    return _Fake(q)


class _Liar(np.ndarray):
    dtype = np.dtype("float32")

    def __array_finalize__(self, other: Any) -> None:
        pass


_Liar.__module__ = "numpy"


def lies_about_its_dtype(q: Array, k: Array, v: Array) -> Any:
    return right(q, k, v).astype(np.float16).view(_Liar)


def mutates_its_input(q: Array, k: Array, v: Array) -> Array:
    output = right(q, k, v)
    k[...] = 0
    return output


def writes_past_the_end(q: Array, k: Array, v: Array) -> Array:
    output = right(q, k, v)
    place = v.ctypes.data + v.nbytes
    ctypes.memset(place, 0, 4)
    return output


def reads_past_the_end(q: Array, k: Array, v: Array) -> Array:
    size = q.size + 1
    raw = np.ctypeslib.as_array((ctypes.c_float * size).from_address(q.ctypes.data))
    output = right(q, k, v)
    output.flat[-1] += raw[-1] * 0
    return output


def hands_back_its_input(q: Array, k: Array, v: Array) -> Array:
    q[...] = right(q, k, v)
    return q


def answers_in_its_input(q: Array, k: Array, v: Array) -> Array:
    # One key: the output is v, so a view of it has the right values.
    return np.broadcast_to(v, (*q.shape[:-1], v.shape[-1])) if k.shape[-2] == 1 else right(q, k, v)


_calls = [0]


def differs_on_the_second_call(q: Array, k: Array, v: Array) -> Array:
    _calls[0] += 1
    return right(q, k, v) * np.float32(1 + 1e-7 * (_calls[0] % 2))


_kept: dict[Any, Array] = {}


def remembers_by_shape(q: Array, k: Array, v: Array) -> Array:
    key = q.shape, k.shape, v.shape
    if key not in _kept:
        _kept[key] = right(q, k, v)
    return _kept[key].copy()


_buffer = [np.zeros(0, np.float32)]


def reuses_its_output(q: Array, k: Array, v: Array) -> Array:
    output = right(q, k, v)
    if _buffer[0].shape != output.shape:
        _buffer[0] = np.empty_like(output)
    _buffer[0][...] = output
    return _buffer[0]


def hands_back_empty_memory(q: Array, k: Array, v: Array) -> Array:
    return np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)


def fills_with_nan(q: Array, k: Array, v: Array) -> Array:
    for one in gc.get_objects():  # the expected array too, were it here
        if isinstance(one, np.ndarray) and one.dtype == np.float64 and one.flags.writeable:
            one[...] = np.nan
    return np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)


def _channel() -> socket.socket:
    for number in range(3, 64):
        try:
            found = socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        return found
    raise OSError("no socket")


def _said(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(4, "big") + text


def forges_a_message(q: Array, k: Array, v: Array) -> Array:
    _channel().sendall(_said({"kind": "observed", "verdict": "pass", "number": "1", "arrays": []}))
    return right(q, k, v)


def forges_with_the_right_number(q: Array, k: Array, v: Array) -> Array:
    frame: Any = sys._getframe()
    while frame is not None and "channel" not in frame.f_locals:
        frame = frame.f_back
    number = frame.f_locals["message"].header["number"]
    told = {"kind": "unsupported", "message": "no", "missing": [], "number": number, "arrays": []}
    frame.f_locals["channel"].sendall(_said(told))
    return right(q, k, v)


def floods_the_channel(q: Array, k: Array, v: Array) -> Array:
    channel = _channel()
    while True:
        channel.sendall(b"\xff" * 65536)


def nests_its_json(q: Array, k: Array, v: Array) -> Array:
    text = b"[" * 500_000
    _channel().sendall(len(text).to_bytes(4, "big") + text)
    return right(q, k, v)


def closes_every_file(q: Array, k: Array, v: Array) -> Array:
    os.closerange(0, 256)
    return right(q, k, v)


def patches_the_judge(q: Array, k: Array, v: Array) -> Array:
    import refattn.conformance.judge as judge
    from refattn.conformance.targets import base

    passed = judge.Judgement(verdict="pass", error_over_bound=0.0)
    judge.judge = lambda *_: passed
    base._same_bits = lambda *_: True
    np.array_equal = lambda *_, **__: True
    return np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)


def leaves_a_child(q: Array, k: Array, v: Array) -> Array:
    subprocess.Popen(["sleep", "300"])
    return right(q, k, v)


def leaves_a_daemon(q: Array, k: Array, v: Array) -> Array:
    subprocess.Popen("setsid sleep 300 >/dev/null 2>&1 &", shell=True).wait()
    return right(q, k, v)


def forks_and_returns_twice(q: Array, k: Array, v: Array) -> Array:
    os.fork()
    return right(q, k, v)


def bombs(q: Array, k: Array, v: Array) -> Array:
    while True:
        if os.fork() == 0:
            time.sleep(300)


def answers_from_a_thread_and_dies(q: Array, k: Array, v: Array) -> Array:
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGSEGV)).start()
    time.sleep(0.5)
    return right(q, k, v)


def returns_far_too_much(q: Array, k: Array, v: Array) -> Array:
    return np.broadcast_to(np.float32(0), (2**14, 64))


def raises_a_strange_error(q: Array, k: Array, v: Array) -> Array:
    class Strange(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even printed")

    raise Strange


def raises_with_control_characters(q: Array, k: Array, v: Array) -> Array:
    raise ValueError("\x1b[2J\ud800 cleared your screen" + "x" * 10**7)


def calls_refattn(q: Array, k: Array, v: Array, **options: Any) -> Array:
    attention = sys.modules["refattn"].attention
    return attention(q, k, v, **options)


def imports_refattn_late(q: Array, k: Array, v: Array) -> Array:
    _calls[0] += 1
    if _calls[0] > 5:  # no call is looked into any more
        import refattn  # noqa: F401  # that it is imported is all there is to see
    return right(q, k, v)


def stops_itself(q: Array, k: Array, v: Array) -> Array:
    os.kill(os.getpid(), signal.SIGSTOP)
    return right(q, k, v)


def leaves_a_daemon_without_a_name(q: Array, k: Array, v: Array) -> Array:
    subprocess.Popen("env -i setsid sleep 300 >/dev/null 2>&1 &", shell=True).wait()
    return right(q, k, v)


def replaces_the_output_streams(q: Array, k: Array, v: Array) -> Array:
    if sys.stdout:
        sys.stdout.close()
    sys.stdout = sys.stderr = None
    return right(q, k, v)


def warns_about_a_device(q: Array, k: Array, v: Array) -> Array:
    import warnings

    warnings.warn_explicit("\U0001f600" * 10**6, UserWarning, "/dev/zero", 10**9)
    return right(q, k, v)


def forges_each_part(q: Array, k: Array, v: Array) -> Array:
    worker: Any = sys.modules["refattn.conformance.isolation.worker"]
    parts = [{"output": ["float32", [10**30]], "second": ["float32", ["x"]]}, [], {"output": 1}, {"bound": ["a", []]}]
    chosen = parts[_calls[0] % len(parts)]
    _calls[0] += 1
    honest = worker.observed_entries
    worker.observed_entries = lambda *a: (honest(*a)[0] | {"parts": chosen}, honest(*a)[1])
    return right(q, k, v)


def divides_by_no_width(q: Array, k: Array, v: Array) -> Array:
    if 0 in q.shape:
        os.kill(os.getpid(), signal.SIGFPE)
    return right(q, k, v)
