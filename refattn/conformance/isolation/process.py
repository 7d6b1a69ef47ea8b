"""The worker process as the judge sees it: started, waited for within limits, ended together with all that it started.

Nothing that the worker does is trusted: it may write whatever it likes to its channel, print without end, hang, die,
or leave processes behind. Each of these is a `WorkerError` with the verdict that follows from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from refattn.arrays import Array
from refattn.conformance.isolation.channel import CHUNK, MalformedError, Message, Reader, encoded
from refattn.conformance.targets.base import WorkerError

# Seconds between looks at the memory of the worker, and the most processes that it may have.
LOOK, MOST_PROCESSES = 0.05, 512
# Seconds that a worker has to leave in order, and those that it started to follow it.
LEAVE, FOLLOW = 3.0, 1.0
# Characters of what a target prints during one call that are passed on.
MOST_PRINTED = 1 << 20
# The environment variable by which processes are known that belong to a worker.
MARK = "REFATTN_WORKER"
OWN_FRAMES = str(Path(__file__).parents[1])
MAIN = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from refattn.conformance.isolation.worker import main
main(*map(int, sys.argv[2:]))
"""


class Worker:
    """One worker process; memory_limit is the most bytes that it and what it started may hold resident."""

    def __init__(self, memory_limit: int) -> None:
        self._memory_limit, self._mark = memory_limit, secrets.token_hex(16)
        self._closed = False
        self._started: set[psutil.Process] = set()
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
        self._channel, theirs = socket.socketpair()
        reading, writing = os.pipe()
        self._printed, self._text = reading, bytearray()
        os.set_blocking(reading, False)
        path = json.dumps([entry or str(Path.cwd()) for entry in sys.path])
        fds, started = (theirs.fileno(), self._trace.fileno()), time.time()
        lasting = threading.current_thread() is threading.main_thread()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", MAIN, path, *map(str, (*fds, int(lasting)))],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                pass_fds=fds,
                start_new_session=True,
                # Threads that wait for work by spinning would take the judge's turns, and it theirs.
                env={"OMP_WAIT_POLICY": "passive"} | os.environ | {MARK: self._mark},
            )
        finally:
            theirs.close()
            os.close(writing)
        # psutil counts from a boot time in whole seconds, hence the difference to our own clock.
        self._clock = psutil.Process(self._process.pid).create_time() - started
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._printed, selectors.EVENT_READ)

    def ask(self, header: dict[str, Any], arrays: dict[str, Array], seconds: float, most_bytes: int = 0) -> Message:
        """The answer to one request, which must repeat its number. Raises WorkerError; the worker is then ended."""
        number = secrets.token_hex(8)
        try:
            self._send(encoded(header | {"number": number, "seconds": seconds}, arrays), time.monotonic() + seconds)
            message = self._receive(Reader(most_bytes), time.monotonic() + seconds)
            if message.header.pop("number", None) != number:
                raise MalformedError("an answer to a question that was not asked")
        except MalformedError as fault:
            self.kill()
            text = f"the worker's channel, which is not the target's to write to, holds {fault}"
            raise WorkerError("crashed", text) from fault
        except _Stopped as stopped:
            error = self._ended(stopped.verdict, stopped.message)
            raise error from None
        return message

    def printed(self) -> str:
        """What was printed since this was last asked."""
        self._drain()
        text = self._text.decode(errors="replace")
        self._text.clear()
        return text

    def leave(self) -> list[float]:
        """Ends the worker in order, and then what it leaves behind; when those processes began."""
        self._members()  # known by name while their parent lives
        with contextlib.suppress(OSError):
            self._channel.setblocking(False)
            self._channel.send(encoded({"ask": "leave"}, {}))
        deadline = time.monotonic() + LEAVE
        while self._process.poll() is None and time.monotonic() < deadline:
            self._drain()
            time.sleep(0.005)
        if self._process.poll() is None:
            self.kill()
            return []
        deadline = time.monotonic() + FOLLOW
        while (left := self._marked()) and time.monotonic() < deadline:
            time.sleep(0.02)
        began = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                began.append(process.create_time() - self._clock)
        self.kill()
        return began

    def kill(self) -> None:
        """Ends the worker and every process that it started, and closes what belongs to it."""
        if self._closed:
            return
        self._closed = True
        self._members()
        for _ in range(100):  # what is being started meanwhile is found in the next round
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
            left = self._marked()
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not left:
                break
        self._drain()
        self._selector.close()
        self._channel.close()
        self._trace.close()
        if self._printed >= 0:
            os.close(self._printed)
            self._printed = -1

    def _send(self, data: bytes, deadline: float) -> None:
        """Sends a request to a worker that must have nothing to say before it."""
        self._channel.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if self._channel.recv(1):
                raise MalformedError("an answer before there was a question")
        view = memoryview(data)
        while view:
            with contextlib.suppress(BlockingIOError):
                try:
                    view = view[self._channel.send(view) :]
                    continue
                except ConnectionError as fault:
                    raise _Stopped("crashed", "") from fault
            self._look(deadline)
            time.sleep(0.001)

    def _receive(self, reader: Reader, deadline: float) -> Message:
        look = time.monotonic() + LOOK
        while True:
            for key, _ in self._selector.select(timeout=LOOK):
                if key.fileobj != self._channel:
                    self._drain()
                    continue
                with contextlib.suppress(BlockingIOError):
                    try:
                        data = self._channel.recv(CHUNK)
                    except ConnectionError:
                        data = b""
                    if not data:
                        raise _Stopped("crashed", "")
                    if message := reader.feed(data):
                        return message
            if time.monotonic() > look:
                self._look(deadline)
                look = time.monotonic() + LOOK

    def _look(self, deadline: float) -> None:
        """Raises _Stopped for a worker that has died, takes too long, or holds too much."""
        if self._process.poll() is not None:
            raise _Stopped("crashed", "")
        if time.monotonic() > deadline:
            raise _Stopped("timed out", "")
        members = self._members()
        if len(members) > MOST_PROCESSES:
            raise _Stopped("crashed", f"the call started more than {MOST_PROCESSES} processes")
        resident = 0
        for member in members:
            with contextlib.suppress(psutil.Error):
                resident += member.memory_info().rss
        if resident > self._memory_limit:
            limit = self._memory_limit / 2**30
            raise _Stopped("out of memory", f"the call took more than {limit:.3g} GiB (--memory-limit)")

    def _ended(self, verdict: str, message: str) -> WorkerError:
        """Ends the worker; the error says how it ended, and where it was, as far as that can be known."""
        if verdict == "timed out":
            with contextlib.suppress(ProcessLookupError):  # it writes where it was
                self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5 if verdict == "timed out" else 2)
        code = self._process.poll()
        if verdict == "crashed" and not message:
            message = _end_in_words(code)
        self._trace.seek(0)
        place, trace = _read_trace(self._trace.read(100_000).decode(errors="replace"))
        self.kill()
        return WorkerError(verdict, message, place, trace)

    def _drain(self) -> None:
        """Takes what was printed out of the pipe, which would otherwise fill and block the target."""
        for _ in range(64):
            if self._printed < 0:
                return
            try:
                data = os.read(self._printed, CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(self._printed)
                os.close(self._printed)
                self._printed = -1
                return
            self._text += data[: max(0, MOST_PRINTED - len(self._text))]

    def _members(self) -> list[psutil.Process]:
        """The processes of the worker's session, and those that it started or, on Linux, inherited from them."""
        found: set[psutil.Process] = set()
        with contextlib.suppress(psutil.Error):
            found.update(psutil.Process(self._process.pid).children(recursive=True))
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(pid) == self._process.pid:
                    found.add(psutil.Process(pid))
        self._started |= found
        return [*found]

    def _marked(self) -> list[psutil.Process]:
        """The processes that the worker started, also those that left its session, for as long as they run."""
        self._members()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark:
                    self._started.add(process)
        running = []
        for process in self._started:
            with contextlib.suppress(psutil.Error):
                alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
                if alive and process.pid != self._process.pid:
                    running.append(process)
        return running


class _Stopped(Exception):
    """Why a worker must be ended, or has ended."""

    def __init__(self, verdict: str, message: str) -> None:
        super().__init__(message)
        self.verdict, self.message = verdict, message


def _end_in_words(code: int | None) -> str:
    if code is None:
        return "the target closed the channel that answers go through"
    if code >= 0:
        return f"the target ended its process with exit code {code} in the middle of the call"
    words = signal.strsignal(-code) or "a signal"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    lack = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
    return f"the target's process was ended by {name} ({words.lower()}){lack}"


def _read_trace(text: str) -> tuple[str, str]:
    """Place and traceback, most recent call first, without the frames of the worker itself."""
    lines = []
    for line in text.splitlines():
        if OWN_FRAMES in line and "faults" not in line:
            break
        lines.append(line)
    frames = [(found[1], found[2]) for line in lines if (found := re.match(r'\s+File "(.*)", line (\d+)', line))]
    if not frames:
        return "", ""
    place = next(frame for frame in frames if frame[0] == frames[-1][0])
    return ":".join(place), "\n".join(lines)
