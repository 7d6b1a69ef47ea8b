"""Targets in a worker process: whatever they do to it is a verdict, and the run goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from refattn import cli
from refattn.conformance.case import Problem
from refattn.conformance.cases import all_cases
from refattn.conformance.isolation.channel import MalformedError, Reader, encoded
from refattn.conformance.isolation.messages import INPUTS, KEPT, inputs_of
from refattn.conformance.isolation.process import MARK
from refattn.conformance.isolation.target import AVAILABLE, IsolatedTarget
from refattn.conformance.runner import Report, run_suite
from refattn.conformance.targets import find_target

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="workers need POSIX")

CASES = {case.name: case for case in all_cases()}
# A plain call, one among calls with other data, and one of a single key.
PLAIN, AMONG, ONE_KEY = "numbers.the_same_twice", "numbers.among_other_calls", "empty_rows.many_queries_and_one_key"


def judged(kernel: str, *names: str, seconds: float = 20.0, memory_limit: int | None = None) -> Report:
    """The report on a hostile kernel, on few cases in float32."""
    target = IsolatedTarget(f"hostile_kernels:{kernel}", seconds=seconds, memory_limit=memory_limit)
    return run_suite(target, [(CASES[name], "float32") for name in names or (PLAIN, AMONG)], 20)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """No process of a worker outlives its test."""
    yield
    left = []
    for process in psutil.process_iter():
        try:
            if MARK in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
        except (psutil.Error, OSError):
            continue
    assert [p for p in left if p.ppid() == os.getpid() or p.ppid() == 1] == []


HOSTILE = [
    ("segfaults", "crashed", "SIGSEGV (segmentation fault)"),
    ("exits", "crashed", "SystemExit: 0"),
    ("leaves_at_once", "crashed", "ended its process with exit code 0"),
    ("interrupts", "crashed", "KeyboardInterrupt"),
    ("pretends_to_be_an_array", "fail", "a _Fake that is no class of numpy"),
    ("lies_about_its_dtype", "fail", "a _Liar that is no class of numpy"),
    ("mutates_its_input", "fail", "the call wrote to k"),
    ("writes_past_the_end", "fail", "the call wrote outside of v"),
    ("reads_past_the_end", "fail", "is nan, expected"),
    ("hands_back_its_input", "fail", "the output shares memory with v"),
    ("differs_on_the_second_call", "fail", "a second call with the same inputs gave other bits"),
    ("remembers_by_shape", "fail", "expected"),
    ("reuses_its_output", "fail", "expected"),
    ("hands_back_empty_memory", "fail", "is nan, expected"),
    ("fills_with_nan", "fail", "is nan, expected"),
    ("forges_a_message", "crashed", "an answer to a question that was not asked"),
    ("forges_with_the_right_number", "crashed", "an answer to a question that was not asked"),
    ("floods_the_channel", "crashed", "a header of more than 1 MiB, or none"),
    ("nests_its_json", "crashed", "a header that is none"),
    ("closes_every_file", "crashed", "closed the channel"),
    ("patches_the_judge", "fail", "is 0, expected"),
    ("answers_from_a_thread_and_dies", "crashed", "SIGSEGV"),
    ("returns_far_too_much", "fail", "has shape (1048576, 64)"),
    ("raises_a_strange_error", "crashed", "Strange, which cannot be printed"),
    ("raises_with_control_characters", "crashed", "ValueError: \N{REPLACEMENT CHARACTER}[2J"),
    ("leaves_a_child", "fail", "left 2 processes running"),
    ("leaves_a_daemon", "fail", "left 2 processes running"),
    ("forks_and_returns_twice", "crashed", "an answer to a question that was not asked"),
    ("bombs", "crashed", "more than 512 processes"),
]


@pytest.mark.parametrize(("kernel", "verdict", "words"), HOSTILE, ids=[one[0] for one in HOSTILE])
def test_a_hostile_kernel(kernel: str, verdict: str, words: str) -> None:
    """It is named, with the verdict that it deserves, on the case that it met; both cases have a verdict."""
    report = judged(kernel)
    assert [record.case for record in report.records] == [PLAIN, AMONG]
    assert any(record.verdict == verdict and words in record.message for record in report.records), report.records
    assert (report.complete, report.conforms, report.isolated) == (True, False, True)
    json.dumps(report.as_dict()).encode("ascii")
