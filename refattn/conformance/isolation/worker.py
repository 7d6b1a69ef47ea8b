"""The worker: it finds the target by name, calls it on inputs that it is sent, and sends back what came.

It holds inputs only. What is expected is not in any message, and nothing here computes or compares it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import resource
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from refattn.arrays import Array, library_of
from refattn.conformance.capture import C_LIBRARY, flush
from refattn.conformance.case import Unsupported
from refattn.conformance.isolation.channel import Message, encoded, receive
from refattn.conformance.isolation.messages import observed_entries, problem_of
from refattn.conformance.isolation.provenance import Provenance
from refattn.conformance.recording import crash_of
from refattn.conformance.targets import TargetError, find_target

# Seconds after which a worker ends itself whose parent did not: it is gone, then.
GRACE = 30
# Warnings of one call that are passed on, and characters of a text.
WARNINGS, CHARACTERS = 20, 10_000
# Linux: processes whose parent has ended belong to this one, so that the judge finds them; and when the thread that
# started this process ends, so does it, deep in a call or not.
_ADOPT, _FOLLOW = 36, 1


def main(channel_number: int, trace_number: int, follows: bool) -> None:
    """Answers requests until there are no more; follows says whether the judge's thread ends with its process."""
    _prepare(trace_number, follows)
    channel = socket.socket(fileno=channel_number)
    channel.set_inheritable(False)
    service = _Service()
    while (message := receive(channel)) is not None and message.header["ask"] != "leave":
        signal.alarm(math.ceil(message.header["seconds"]) + GRACE)
        answer, arrays = service.answer(message)
        signal.alarm(0)
        flush()
        try:
            channel.sendall(encoded(answer | {"number": message.header["number"]}, arrays))
        except ConnectionError:  # nobody waits for it any more
            return


class _Service:
    """One target, once it is found."""

    def __init__(self) -> None:
        self._target: Any = None
        self._provenance = Provenance()

    def answer(self, message: Message) -> tuple[dict[str, Any], dict[str, Array]]:
        """The answer's entries and arrays, whatever the target does with Python's own means."""
        asks = {"find": self._find, "can": self._can, "call": self._call, "settle": self._settle}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            entries, arrays = asks[message.header["ask"]](message)
        told = [[str(one.message)[:500], one.filename, one.lineno] for one in warned[:WARNINGS]]
        return entries | {"warned": told, "built_on": self._provenance.found}, arrays

    def _find(self, message: Message) -> tuple[dict[str, Any], dict[str, Array]]:
        self._provenance.watch()
        try:
            target = self._target = find_target(*message.header["target"])
        except TargetError as fault:
            return {"refused": str(fault)[:CHARACTERS]}, {}
        self._provenance.look_at_modules()
        about = {"name": target.name, "dtypes": list(target.dtypes), "versions": target.versions()}
        return about | {"notes": list(target.notes), "refused": ""}, {}

    def _can(self, message: Message) -> tuple[dict[str, Any], dict[str, Array]]:
        needs, dtype = tuple(message.header["needs"]), message.header["dtype"]
        reason, missing = self._target.unsupported(needs, dtype), self._target.missing(needs, dtype)
        return {"reason": reason, "missing": list(missing)}, {}

    def _call(self, message: Message) -> tuple[dict[str, Any], dict[str, Array]]:
        problem = problem_of(message)
        try:
            with self._provenance.during_a_call(), np.errstate():  # what a target sets ends with the call
                observed = self._target.observe(problem)
        except Unsupported as refusal:
            missing = list(refusal.missing)
            return {"kind": "unsupported", "message": str(refusal)[:CHARACTERS], "missing": missing}, {}
        except BaseException as fault:  # noqa: BLE001  # whatever a target raises is its verdict
            told = {name: text[:CHARACTERS] for name, text in crash_of(fault, self._target).items()}
            return {"kind": "raised", "class": type(fault).__name__, **told}, {}
        entries, arrays = observed_entries(observed, problem)
        return {"kind": "observed", **entries}, arrays

    def _settle(self, message: Message) -> tuple[dict[str, Any], dict[str, Array]]:
        """Nothing: the question is whether this answer comes, and nothing before it."""
        return {}, {}


def _prepare(trace_number: int, follows: bool) -> None:
    """A traceback where the process dies, no core dumps, prints that survive, and first in line when memory ends."""
    # What the first array makes Python load would count as time of the first call.
    library_of(np.zeros(0), "x")
    os.set_inheritable(trace_number, False)
    faulthandler.enable(file=trace_number)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux" and C_LIBRARY is not None:
        C_LIBRARY.prctl(_ADOPT, 1, 0, 0, 0)
        if follows:
            C_LIBRARY.prctl(_FOLLOW, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
