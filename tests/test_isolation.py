"""Targets in a worker process: whatever they do to it is a verdict, and the run goes on."""

from __future__ import annotations

import contextlib
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
from refattn.conformance.isolation import process
from refattn.conformance.isolation.channel import MalformedError, Reader, encoded
from refattn.conformance.isolation.messages import INPUTS, KEPT, inputs_of
from refattn.conformance.isolation.target import AVAILABLE, IsolatedTarget
from refattn.conformance.records import Report
from refattn.conformance.runner import run_suite
from refattn.conformance.targets import find_target, is_own

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="workers need POSIX")

CASES = {case.name: case for case in all_cases()}
# A plain call, one among calls with other data, and one of a single key.
PLAIN, AMONG, ONE_KEY = "scores.width_of_one_head", "numbers.among_other_calls", "vectors.A1.one_key.float32"


def judged(kernel: str, *names: str, seconds: float = 20.0, memory_limit: int | None = None) -> Report:
    """The report on a hostile kernel, on few cases in float32."""
    target = IsolatedTarget(f"hostile_kernels:{kernel}", seconds=seconds, memory_limit=memory_limit)
    return run_suite(target, [(CASES[name], "float32") for name in names or (PLAIN, AMONG)], 20, explained=False)


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process of a worker outlives its test; other tests may run beside it."""
    mark = f"REFATTN_WORKER_OF_{os.getpid()}"
    monkeypatch.setattr(process, "MARK", mark)
    yield
    left = []
    for one in psutil.process_iter():
        try:
            if mark in one.environ() and one.status() != psutil.STATUS_ZOMBIE:
                left.append(one)
        except (psutil.Error, OSError):
            continue
    assert left == []


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
    ("hands_back_its_input", "fail", "the call wrote to q; the output shares memory with q"),
    ("differs_on_the_second_call", "fail", "a second call with the same inputs gave other bits"),
    ("remembers_by_shape", "fail", "expected"),
    ("reuses_its_output", "fail", "expected"),
    ("hands_back_empty_memory", "fail", "is nan, expected"),
    ("fills_with_nan", "fail", "is nan, expected"),
    ("forges_a_message", "crashed", "the worker's channel, which is not the target's to write to"),
    ("forges_with_the_right_number", "crashed", "the worker's channel, which is not the target's to write to"),
    ("floods_the_channel", "crashed", "a header of more than 1 MiB, or none"),
    ("nests_its_json", "crashed", "a header that is none"),
    ("closes_every_file", "crashed", "ended its process with exit code 1"),
    ("patches_the_judge", "fail", "is 0, expected"),
    ("answers_from_a_thread_and_dies", "crashed", "SIGSEGV"),
    ("returns_far_too_much", "fail", "has shape (16384, 64)"),
    ("raises_a_strange_error", "crashed", "Strange, which cannot be printed"),
    ("raises_with_control_characters", "crashed", "ValueError: \N{REPLACEMENT CHARACTER}[2J"),
    ("leaves_a_child", "fail", "running after the target's own had ended"),
    ("leaves_a_daemon", "fail", "running after the target's own had ended"),
    ("leaves_a_daemon_without_a_name", "fail", "running after the target's own had ended"),
    ("forges_each_part", "crashed", "the worker's channel holds an answer"),
    ("forks_and_returns_twice", "crashed", "the worker's channel"),
    ("bombs", "crashed", "more than 32 processes"),
]


@pytest.mark.parametrize(("kernel", "verdict", "words"), HOSTILE, ids=[one[0] for one in HOSTILE])
def test_a_hostile_kernel(kernel: str, verdict: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, with the verdict that it deserves, on the case that it met; both cases have a verdict."""
    monkeypatch.setattr(process, "MOST_PROCESSES", 32)
    report = judged(kernel)
    assert [record.case for record in report.records] == [PLAIN, AMONG]
    assert any(record.verdict == verdict and words in record.message for record in report.records), report.records
    assert (report.complete, report.conforms, report.isolated) == (True, False, True)
    json.dumps(report.as_dict()).encode("ascii")


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang is timed out where it hangs, even if it hears no signal; memory is watched; impatience is said."""
    monkeypatch.setattr("refattn.conformance.isolation.target.PATIENCE", 1)
    monkeypatch.setattr("refattn.conformance.isolation.target.IMPATIENT_SECONDS", 0.3)
    report = judged("hangs", seconds=1.0)
    assert [(one.verdict, one.message) for one in report.records] == [
        ("timed out", "no answer within 1 s (--time-limit)"),
        ("timed out", "no answer within 0.3 s (--time-limit)"),
    ]
    assert "hostile_kernels.py" in report.records[0].place
    assert "time.sleep" not in report.records[0].trace and "hangs" in report.records[0].trace
    assert "the others had 0.3 s each" in report.notes[0]
    assert judged("stops_itself", PLAIN, seconds=0.3).records[0].verdict == "timed out"
    assert judged("hangs_deaf", PLAIN, seconds=0.3).records[0].verdict == "timed out"
    eaten = judged("eats_memory", memory_limit=2**29)
    assert [(one.verdict, one.message) for one in eaten.records] == [
        ("out of memory", "the call took more than 0.5 GiB (--memory-limit)")
    ] * 2


def test_what_is_printed_is_a_note() -> None:
    """Text on standard output, from Python and past it, is a note and not an answer."""
    (record, _) = judged("prints_garbage").records
    assert record.verdict == "pass"
    assert record.notes[0].startswith('printed: {"verdict": "pass"}')


@pytest.mark.parametrize("kernel", ["replaces_the_output_streams", "warns_about_a_device"])
def test_what_harms_nobody(kernel: str) -> None:
    """A target may close its own streams, and warn at length of what is no file."""
    assert [record.verdict for record in judged(kernel).records] == ["pass", "pass"]


def test_a_view_of_an_input_is_a_fault() -> None:
    """The right values in the memory of v are a fault where one key makes them right."""
    (record,) = judged("answers_in_its_input", ONE_KEY).records
    assert (record.verdict, record.about, record.message) == ("fail", "A7", "the output shares memory with v")


def test_a_right_kernel_has_the_same_verdicts_everywhere() -> None:
    """In a worker and in the judge's process every case ends alike, and nothing is built on refattn."""
    pairs = [(case, "float32") for case in CASES.values() if case.build and "float32" in case.dtypes]
    apart = run_suite(IsolatedTarget("hostile_kernels:right"), pairs, 20)
    here = run_suite(find_target("hostile_kernels:right"), pairs, 20)

    def told(report: Report) -> list[tuple[object, ...]]:
        return [(one.case, one.verdict, one.message, one.error_over_bound, one.place) for one in report.records]

    assert told(apart) == told(here)
    assert apart.counts["pass"] > 100
    assert (apart.built_on_refattn, here.built_on_refattn) == (False, None)
    assert (apart.isolated, here.isolated) == (True, False)


@pytest.mark.parametrize("kernel", ["calls_refattn", "imports_refattn_late", "patches_the_judge"])
def test_built_on_refattn(kernel: str) -> None:
    """A target that runs or imports refattn is said to, however it came by it; others are not, see above."""
    report = judged(kernel, PLAIN, AMONG, "scores.worked_example", PLAIN, AMONG)
    assert report.built_on_refattn is True
    assert report.as_dict()["built_on_refattn"] is True
    assert "built on refattn" in report.notes[-1]


def test_only_inputs_cross() -> None:
    """Every field of a problem is known to cross or to stay, and what is known or proven stays."""
    names = {field.name for field in dataclasses.fields(Problem)}
    assert names == {*INPUTS, *KEPT}, "a new field crosses to the worker (INPUTS) or stays with the judge (KEPT)"
    assert {"known", "certified"} <= set(KEPT)
    case = next(case for name, case in CASES.items() if name.startswith("vectors.S"))
    problem = case.problem("float32", 20)
    plain, arrays = inputs_of(problem)
    assert problem.certified
    sent = encoded(plain, arrays)
    for values in problem.certified.values():
        assert np.ascontiguousarray(values).tobytes() not in sent


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\x02[]",
        b"\0\0\0\x02{}",
        b'\0\0\0\x0d{"arrays": 1}',
        encoded({}, {"x": np.zeros(3)})[:-1] + b"12",
        encoded({}, {"x": np.zeros(2000)}),
        encoded({}, {}).replace(b"[]", b'[["x", "object", [1]]]').replace(b"\x0e", b"\x22"),
    ],
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    """Lengths, headers, dtypes and sizes that no message has are refused before anything is made of them."""
    with pytest.raises(MalformedError):
        Reader(limit=1000).feed(data)


def test_messages_cross_unchanged() -> None:
    """Values come back in every bit, however the bytes arrive."""
    values = {"x": np.array([[np.nan, -0.0, np.inf]]), "y": np.array(True), "z": np.zeros((2, 0), dtype=np.int64)}
    reader, data = Reader(limit=1000), encoded({"a": [1, None]}, values)
    assert all(reader.feed(data[place : place + 1]) is None for place in range(len(data) - 1))
    message = reader.feed(data[-1:])
    assert message is not None and message.header == {"a": [1, None]}
    assert {name: x.tobytes() for name, x in message.arrays.items()} == {n: x.tobytes() for n, x in values.items()}


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that dies gives exit code 1 and a complete report; one that dies at import gives 2 and a sentence."""
    path = tmp_path / "out.json"
    arguments = ["check", "hostile_kernels:segfaults", "--quick", "--clauses", "A4", "--json", str(path)]
    assert cli.main(arguments) == 1
    assert "segmentation fault" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert (report["complete"], report["isolated"], report["conforms"]) == (True, True, False)
    assert {record["verdict"] for record in report["records"]} <= {"crashed", "unsupported"}
    (tmp_path / "dies.py").write_text("import ctypes\nctypes.string_at(8)\n")
    assert cli.main(["check", f"{tmp_path / 'dies.py'}:attention"]) == 2
    err = capsys.readouterr().err
    assert "cannot be loaded" in err and "SIGSEGV" in err and err.count("\n") == 1
    assert cli.main(["check", "hostile_kernels:right", "--time-limit", "0"]) == 2
    assert "expected a number above 0" in capsys.readouterr().err


DEAF = """\
import pathlib, signal

def attention(q, k, v):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pathlib.Path(__file__).with_name("called").touch()
    while True:
        pass
"""


@contextlib.contextmanager
def judging_the_deaf(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A process that judges a kernel which has begun to hang, and the kernel's own."""
    (folder / "deaf.py").write_text(DEAF)
    # Where these tests run in the background, what they start would ignore the signal.
    code = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom refattn import cli\n"
    code += "sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "check", f"{folder / 'deaf.py'}:attention", "--quick", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as running:
        deadline = time.monotonic() + 60
        while not (folder / "called").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        (worker,) = psutil.Process(running.pid).children()
        yield running, worker


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, or a request to end, during a hang leaves a valid partial report, no process, and its exit code."""
    path = tmp_path / "out.json"
    with judging_the_deaf(tmp_path, "--json", str(path)) as (running, worker):
        running.send_signal(number)
        assert running.wait(30) == 128 + number
    assert not worker.is_running()
    assert json.loads(path.read_text())["complete"] is False


def test_a_judge_that_is_killed_leaves_no_worker(tmp_path: Path) -> None:
    """A worker ends when its judge is gone, on Linux even one that is deep in a call."""
    if sys.platform != "linux":
        pytest.skip("elsewhere a worker that is deep in a call ends with its time limit")
    with judging_the_deaf(tmp_path) as (running, worker):
        running.kill()
    deadline = time.monotonic() + 10
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


@pytest.mark.library("torch")
def test_another_convention_and_library() -> None:
    """A function of torch's convention ends alike in a worker and here, and torch's own name runs in a worker."""
    names = [name for name in CASES if name.startswith(("masks.", "heads.", "biases.alibi"))]
    pairs = [(CASES[name], "bfloat16") for name in names if "bfloat16" in CASES[name].dtypes]
    wanted = ("torch.nn.functional:scaled_dot_product_attention", None, "torch")
    apart, here = run_suite(IsolatedTarget(*wanted), pairs, 20), run_suite(find_target(*wanted), pairs, 20)
    assert [(one.verdict, one.message) for one in apart.records] == [(one.verdict, one.message) for one in here.records]
    assert apart.counts["pass"] > 10
    assert not apart.built_on_refattn
    plain = [(CASES[name], "float32") for name in ("scores.width_of_one_head", "masks.causal", "heads.grouped_query")]
    assert run_suite(IsolatedTarget("torch"), plain, 20).built_on_refattn is False
    assert not is_own("torch")
    assert is_own("numpy") and is_own("refattn-torch-tiled") and not is_own("numpy:dot")
