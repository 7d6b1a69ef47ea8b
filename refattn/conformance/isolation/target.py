"""A target that runs in a worker process, for the judge to call like any other."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import psutil

from refattn.arrays import Array
from refattn.conformance.case import GRADIENTS, Api, Problem, Unsupported
from refattn.conformance.isolation.channel import MalformedError, Message, text_of
from refattn.conformance.isolation.messages import inputs_of, most_bytes, observed_of
from refattn.conformance.isolation.process import Worker
from refattn.conformance.judge import Result
from refattn.conformance.plain import Draw
from refattn.conformance.targets.base import TargetError, WorkerError, result_of
from refattn.dtypes import COMPUTED

# Workers need sessions of processes, and descriptors that are passed on.
AVAILABLE = os.name == "posix"
DEFAULT_SECONDS = 60.0
# What importing a library and building a target may take, and a short answer.
START_SECONDS, SHORT_SECONDS = 300.0, 20.0
# Of the memory that is free at the start.
SHARE = 0.8
# What a problem may need, see `Problem.needs`.
FEATURES = (
    *("causal", "mask", "bias", "scale", "softcap", "sinks", "q_start", "k_start", "gqa", "lse", "weights"),
    *GRADIENTS,
)
# After so many cases that took too long, a limit for the others that lets the run end.
PATIENCE, IMPATIENT_SECONDS = 5, 1.0


def _known(missing: Any) -> tuple[str, ...]:
    """Those of the names that say what a problem needs."""
    return tuple(one for one in FEATURES if one in missing)


class IsolatedTarget:
    """The target of a name, found and called in a worker process that holds inputs only.

    seconds is the limit for the calls of one case, memory_limit the most bytes that the process and what it starts may
    hold resident, 80 % of what is free by default. Whatever the target does to its process is a `WorkerError`, after
    which the next call has a fresh process. Raises TargetError where the target cannot be found.
    """

    isolated = True

    def __init__(
        self,
        name: str,
        library: str | None = None,
        convention: str | None = None,
        gradients: str | None = None,
        *,
        seconds: float = DEFAULT_SECONDS,
        memory_limit: int | None = None,
    ) -> None:
        self._wanted, self._seconds = [name, library, convention, gradients], seconds
        self._memory_limit = memory_limit or int(SHARE * psutil.virtual_memory().available)
        self._worker: Worker | None = None
        self._can: dict[tuple[tuple[str, ...], str], tuple[str, tuple[str, ...]]] = {}
        self._late, self._built_on = 0, ""
        try:
            about = self._start()
            self.name = text_of(about["name"], 200)
            self.dtypes = tuple(one for one in COMPUTED if one in about["dtypes"])
            self._versions = {text_of(key, 50): text_of(version, 50) for key, version in about["versions"].items()}
            self._notes = tuple(text_of(note, 500) for note in about["notes"])
        except WorkerError as fault:
            self.close()
            raise TargetError(f"{name} cannot be loaded: {fault}{f', at {fault.place}' * bool(fault.place)}") from fault
        except (MalformedError, KeyError, TypeError, AttributeError) as fault:
            self.close()
            raise TargetError(f"{name} cannot be loaded: its process says what cannot be read") from fault
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the target, and what the judge noticed."""
        found = list(self._notes)
        if self._built_on:
            found.append(f"built on refattn ({self._built_on}): its answers are no second opinion on refattn's")
        if self._late > PATIENCE:
            found.append(f"after {PATIENCE} cases beyond the time limit, the others had {IMPATIENT_SECONDS:g} s each")
        return tuple(found)

    @property
    def built_on_refattn(self) -> bool:
        """Whether code of refattn was seen in its answers or its imports."""
        return bool(self._built_on)

    def versions(self) -> dict[str, str]:
        """What the target in the worker says."""
        return self._versions

    def unsupported(self, needs: tuple[str, ...], dtype: str) -> str:
        """Asks the target in the worker; "" also where the worker dies over it, which the call will show."""
        return self._support(needs, dtype)[0]

    def missing(self, needs: tuple[str, ...], dtype: str) -> tuple[str, ...]:
        """Asks the target in the worker."""
        return self._support(needs, dtype)[1]

    def hint(self, fault: BaseException) -> str:
        """Nothing: the worker's messages have theirs."""
        return ""

    def api(self, draw: Draw) -> Api | None:
        """None: only foreign implementations run in a worker."""
        return None

    def call(self, problem: Problem) -> Result:
        """The calls of one problem, made in the worker and compared here. Raises WorkerError and Unsupported."""
        plain, arrays = inputs_of(problem)
        message = self._ask({"ask": "call", **plain}, arrays, self._limit, most_bytes(problem))
        self._ask({"ask": "settle"}, {}, SHORT_SECONDS)  # or else something followed the answer
        kind = message.header.get("kind")
        try:
            if kind == "observed":
                return result_of(problem, observed_of(message, problem))
            text = text_of(message.header["message"])
            if kind == "unsupported":
                raise Unsupported(text, _known(message.header["missing"]))
            if kind == "raised":
                place, trace, raised = (text_of(message.header[key]) for key in ("place", "trace", "class"))
                raise WorkerError("crashed", text, place, trace, raised)
            raise MalformedError("an answer of no kind")
        except (MalformedError, KeyError, TypeError) as fault:
            self._drop()
            raise WorkerError("crashed", f"the worker's channel holds {fault}") from fault

    def close(self) -> list[float]:
        """Ends the worker; when the processes began that it had left running, as time.time()."""
        worker, self._worker = self._worker, None
        if worker is None:
            return []
        try:
            return worker.leave()
        finally:
            worker.kill()

    @property
    def _limit(self) -> float:
        return self._seconds if self._late < PATIENCE else min(self._seconds, IMPATIENT_SECONDS)

    def _support(self, needs: tuple[str, ...], dtype: str) -> tuple[str, tuple[str, ...]]:
        if (needs, dtype) not in self._can:
            try:
                header = self._ask({"ask": "can", "needs": needs, "dtype": dtype}, {}, SHORT_SECONDS).header
                reason, missing = text_of(header["reason"], 1000), header["missing"]
                missing = (dtype,) if missing == [dtype] else _known(missing)
            except (WorkerError, MalformedError, KeyError, TypeError):
                return "", ()
            self._can[needs, dtype] = reason, missing
        return self._can[needs, dtype]

    def _ask(self, header: dict[str, Any], arrays: dict[str, Array], seconds: float, most: int = 0) -> Message:
        """One question to a worker that is there, or is started for it; what it printed and warned of is repeated."""
        try:
            if self._worker is None:
                self._start()
            message = self._heard(header, arrays, seconds, most)
        except TargetError as fault:
            raise WorkerError("crashed", f"the target cannot be loaded once more: {fault}") from fault
        except (MalformedError, KeyError, TypeError, AttributeError) as fault:
            self._drop()
            raise WorkerError("crashed", "the worker's channel holds what is no answer") from fault
        except WorkerError as fault:
            self._late += fault.verdict == "timed out"
            if fault.verdict == "timed out" and not str(fault):
                text = f"no answer within {seconds:g} s (--time-limit)"
                raise WorkerError("timed out", text, fault.place, fault.trace) from None
            raise
        return message

    def _start(self) -> dict[str, Any]:
        self._worker = Worker(self._memory_limit)
        about = self._heard({"ask": "find", "target": self._wanted}, {}, START_SECONDS, 0).header
        if refused := text_of(about["refused"]):
            self._drop()
            raise TargetError(refused)
        return about

    def _heard(self, header: dict[str, Any], arrays: dict[str, Array], seconds: float, most: int) -> Message:
        worker = self._worker
        assert worker is not None
        try:
            message = worker.ask(header, arrays, seconds, most)
        except BaseException:
            self._worker = None
            raise
        finally:
            if text := worker.printed():
                sys.stdout.write(text)
            if self._worker is None:
                worker.kill()
        self._repeat_warnings(message)
        self._built_on = self._built_on or text_of(message.header.get("built_on", ""), 200)
        return message

    def _repeat_warnings(self, message: Message) -> None:
        warned = message.header.get("warned", [])
        for entry in warned if isinstance(warned, list) else []:
            if isinstance(entry, list) and len(entry) == 3 and type(entry[2]) is int:
                # A name in brackets is never read as a file.
                warnings.warn_explicit(text_of(entry[0]), UserWarning, f"<{text_of(entry[1], 500)}>", entry[2])

    def _drop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
