"""`refattn probe` on what ends, blocks or fills its process: a line of the card, and the next question is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refattn import cli
from refattn.conformance import probe as probes
from refattn.conformance.isolation.target import AVAILABLE, IsolatedTarget
from refattn.conformance.probe import PROBES, Card, Finding
from refattn.conformance.probe.caller import Caller
from refattn.conformance.probe.card import CRASHES, DEPARTS, NOT_DETERMINED, RAISES

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="workers need POSIX")

BY_NAME = {one.name: one for one in PROBES}


def found(kernel: str, *names: str, seconds: float = 20.0, memory_limit: int | None = None) -> list[Finding]:
    """Some findings on a hostile kernel, one after the other in whatever process is left."""
    target = IsolatedTarget(f"hostile_kernels:{kernel}", seconds=seconds, memory_limit=memory_limit)
    try:
        caller = Caller(target)
        return [BY_NAME[name].ask(caller) for name in names]
    finally:
        target.close()


def test_a_kernel_that_ends_its_process() -> None:
    """Each question that it met is answered by how the process ended, and the card goes on."""
    for one in found("segfaults", "default scale", "many keys"):
        assert (one.found, one.verdict) == (CRASHES, DEPARTS)
        assert one.words == "the target's process was ended by SIGSEGV (segmentation fault)"
    (left,) = found("leaves_at_once", "default scale")
    assert (left.found, "exit code 0" in left.words) == (CRASHES, True)


def test_what_ends_the_process_on_some_calls_alone() -> None:
    """The calls that it survives are read as ever, the others are named."""
    scale, sizes, keys = found("divides_by_no_width", "default scale", "sizes of zero", "keys of zeros")
    assert (scale.found, keys.found) == ("1/sqrt(d_k)", "ordinary")
    assert (sizes.found, sizes.verdict) == ("some crash", DEPARTS)
    assert "d_k = 0 (the target's process was ended by SIGFPE" in sizes.words
    assert "d_v = 0 (the" not in sizes.words.replace("d_k = d_v = 0", "")


def test_what_is_raised_in_the_worker() -> None:
    """An error crosses with its class and message, and is no crash."""
    (one,) = found("exits", "softmax")
    assert (one.found, one.words) == (RAISES, "raises SystemExit: 0")


def test_a_kernel_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow is not wrong: no line is decided, and the limit gets shorter."""
    monkeypatch.setattr("refattn.conformance.isolation.target.PATIENCE", 1)
    monkeypatch.setattr("refattn.conformance.isolation.target.IMPATIENT_SECONDS", 0.3)
    one, other = found("hangs", "default scale", "keys of zeros", seconds=0.5)
    assert (one.found, one.words) == (NOT_DETERMINED, "no answer within 0.5 s (--time-limit)")
    assert (other.found, other.words) == (NOT_DETERMINED, "no answer within 0.3 s (--time-limit)")


def test_a_kernel_that_eats_memory() -> None:
    """Its process is ended, and the line says why."""
    (one,) = found("eats_memory", "default scale", memory_limit=2**29)
    assert (one.found, one.words) == (CRASHES, "the call took more than 0.5 GiB (--memory-limit)")


def test_a_card_is_the_same_in_a_worker() -> None:
    """Every question can be asked across processes: no line of a right kernel differs from the one found here."""
    name = "refattn.conformance.faults:plain"
    target = IsolatedTarget(name)
    try:
        apart = probes.probe(target)
    finally:
        target.close()
    here = probes.probe(probes_target(name))
    assert probes.differences(here, apart) == ()
    assert [(one.name, one.words) for one in apart.findings if one.clause != "N4"] == [
        (one.name, one.words) for one in here.findings if one.clause != "N4"
    ]
    assert any("built on refattn" in note for note in apart.notes)


def probes_target(name: str) -> object:
    """The same target in this process."""
    from refattn.conformance.targets import find_target

    return find_target(name)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with a whole card and exit code 0; a target that cannot be loaded is refused."""
    path = tmp_path / "card.json"
    monkeypatch.setattr("refattn.conformance.probe.run.PROBES", (BY_NAME["default scale"], BY_NAME["sinks"]))
    assert cli.main(["probe", "hostile_kernels:segfaults", "--json", str(path)]) == 0
    card = Card.from_dict(json.loads(path.read_text(encoding="utf-8")))
    assert {one.found for one in card.findings} == {CRASHES, "not offered"}
    assert cli.main(["probe", "hostile_kernels:nothing"]) == 2
    assert cli.main(["probe", "hostile_kernels:segfaults", "--time-limit", "0"]) == 2
