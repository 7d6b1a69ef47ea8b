"""Profiles: `refattn check --profile` lists what a card declares as declared, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn import cli
from refattn.conformance.cases import all_cases
from refattn.conformance.diagnosis import Evidence
from refattn.conformance.diagnosis.hypotheses import together
from refattn.conformance.faults import CONTROLS, Fault, named
from refattn.conformance.faults.catch import cases_of, target_of
from refattn.conformance.judge import Result, judge
from refattn.conformance.probe import differences, probe
from refattn.conformance.probe.schema import as_text
from refattn.conformance.profiles import Declared, Profile, ProfileError, load, names
from refattn.conformance.profiles.meaning import MEANING, OWN
from refattn.conformance.runner import chosen_pairs, run_case, run_suite
from refattn.conformance.targets import find_target
from refattn.conformance.targets.function import FunctionTarget

DTYPES = ("float32", "float16")
# Cases of each clause that are judged, the rest being alike.
FEW = 12
# Cases that show a departure that are looked at for each shipped profile.
SOME = 1
# Departures that show in a case of their clause, on ordinary functions.
DECLARED = (
    "empty row is NaN",
    "empty row is the mean",
    "poison leaks from v",
    "poison leaks from k",
    "heads are interleaved",
    "log-sum-exp in base 2",
    "mask polarity",
    "sinks are scaled",
    "cap before scale",
    "bias is scaled",
    "no scale",
    "float64 in float32",
)


def profile_of(fault: Fault) -> Profile:
    return Profile("own", probe(target_of(fault, "numpy")))


@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_choice_is_no_fault(name: str) -> None:
    """What the catalogue's fault does is declared by the profile made of its own card, and a fault by a plain one's."""
    fault = named(name)
    declared, plain = Declared(profile_of(fault)), Declared(profile_of(CONTROLS[0]))
    target = target_of(fault, "numpy")
    dtypes = [dtype for dtype in (*DTYPES, "float64") if dtype in fault.dtypes][:2]
    pairs = [(c, dtype) for dtype in dtypes for c in cases_of(fault.clause, dtype)[:FEW] if c.build is not None]
    failed = [(c, d) for c, d in pairs if run_case(c, target, d, 20).verdict == "fail"]
    assert failed
    for case, dtype in failed:
        record = run_case(case, target, dtype, 20, declared=declared)
        assert (record.verdict, name in record.declared) == ("declared", True), (case.name, dtype, record.declared)
        assert run_case(case, target, dtype, 20, declared=plain).verdict == "fail"


def test_a_fault_beside_a_declared_choice_is_a_fault() -> None:
    """A kernel that differs as its profile says, and in one thing more, fails by that alone."""
    choice, other = named("empty row is NaN"), named("causal shows the next")
    both = Fault(name="both", clause="M4", kind="", steps={**choice.steps, **other.steps})
    declared = Declared(profile_of(choice))
    pairs = chosen_pairs(all_cases(), frozenset({"P2", "M4"}), ("float32",))
    alone = run_suite(target_of(choice, "numpy"), pairs, 20, declared=declared)
    assert alone.conforms
    assert alone.declared["empty row is NaN"] == alone.counts["declared"] > 0
    report = run_suite(target_of(both, "numpy"), pairs, 20, declared=declared)
    assert not report.conforms
    assert {"masks.causal"} <= {record.case for record in report.broken}
    assert report.counts["declared"] > 0


def test_side_effects_are_never_declared() -> None:
    """Writes, shared memory, and other bits the second time, stay faults whatever the numbers are."""
    choice = named("empty row is NaN")
    declared = Declared(profile_of(choice))
    (case,) = [case for case in all_cases() if case.name == "empty_rows.behind_a_mask"] or [
        next(case for case in cases_of("P2", "float32") if case.build is not None)
    ]
    problem = case.problem("float32", 20)
    result = target_of(choice, "numpy").call(problem)

    def explained(came: Result) -> tuple[str, ...]:
        return declared.explains(Evidence(problem, came, judge(problem, came)))

    assert explained(result) == ("empty row is NaN",)
    assert explained(replace(result, changed=("q",))) == ()
    assert explained(replace(result, repeated=False)) == ()
    assert explained(replace(result, beside=("v",))) == ()
    assert explained(replace(result, shared=("v",))) == ()
    assert explained(replace(result, undisturbed=False)) == ()
    assert explained(replace(result, output=result.output[..., :1])) == ()
    assert explained(replace(result, dtype="float64")) == ()
    assert explained(replace(result, output=np.full_like(result.output, np.nan))) == ()


def test_declared_choices_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From probe to check on the command line: exit code 0, "conforms to profile", and each choice with its number."""
    fault, path = "refattn.conformance.faults:empty_row_is_NaN", tmp_path / "mine.json"
    assert cli.main(["probe", fault, "--save-profile", str(path)]) == 0
    capsys.readouterr()
    arguments = ["check", fault, "--quick", "--clauses", "P2,S1"]
    assert cli.main(arguments) == 1
    capsys.readouterr()
    assert cli.main([*arguments, "--profile", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "conforms to profile mine (1 declared departure)" in out
    assert "Declared by profile mine, so no fault: empty row is NaN (" in out
    assert cli.main([*arguments, "--profile", str(path), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["profile"] == "mine"
    assert report["declared"] == {"empty row is NaN": report["counts"]["declared"]}
    other = "refattn.conformance.faults:no_scale"
    assert cli.main(["check", other, "--quick", "--clauses", "S1", "--profile", str(path)]) == 1
    assert "does not conform to profile mine (0 declared departures)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", names())
def test_a_right_kernel_with_the_declared_departures_conforms(name: str) -> None:
    """What each declared departure changes is declared, planted into a right kernel; with one fault more it is not."""
    profile, more = load(name), named("causal shows the next")
    declared, shown = Declared(profile), set()
    for choice in profile.faults:
        dtype = next(one for one in (*DTYPES, "float64") if one in choice.dtypes)
        chosen = [case for case in cases_of(choice.clause, dtype) if case.build is not None]
        target = FunctionTarget(choice.name, "numpy", replace(choice, lse=choice.clause == "P4").attention())
        failing = islice((case for case in chosen if run_case(case, target, dtype, 20).verdict == "fail"), SOME)
        records = [run_case(case, target, dtype, 20, declared=declared) for case in failing]
        assert [(one.case, one.verdict) for one in records if one.verdict != "declared"] == [], choice.name
        shown |= {one for record in records for one in record.declared}
    assert shown
    (case,) = [case for case in all_cases() if case.name == "masks.causal"]
    both = FunctionTarget("both", "numpy", together(profile.faults[-1], more).attention())
    assert run_case(case, both, "float32", 20, declared=declared).verdict == "fail"


@pytest.mark.parametrize("name", names())
def test_shipped_profiles_can_be_read(name: str) -> None:
    """Each is a card in the form in which cards are written; half of what it declares has a meaning at least."""
    profile = load(name)
    text = (Path(__import__("refattn").conformance.profiles.__file__).parent / f"{name}.json").read_text("utf-8")
    assert text == as_text(profile.card.as_dict())
    assert profile.card.departures
    known = [one for one in profile.card.departures if (one.name, one.found) in MEANING]
    assert 2 * len(known) >= len(profile.card.departures)
    assert profile.faults


@pytest.mark.library("torch")
def test_torch_conforms_to_its_profile() -> None:
    """The stored card is what a fresh one says, and all that torch fails is declared by it."""
    import torch

    profile, target = load("torch"), find_target("torch")
    if profile.card.versions["torch"].partition("+")[0] != torch.__version__.partition("+")[0]:
        pytest.skip(f"the profile is of torch {profile.card.versions['torch']}, here is {torch.__version__}")
    differing = [one for one in differences(profile.card, probe(target)) if one.clause != "N4"]
    assert differing == []
    labels = frozenset({"S2", "M19", "M20", "M21", "P2", "M4"})
    report = run_suite(target, chosen_pairs(all_cases(), labels, DTYPES), 20, declared=Declared(profile))
    assert [(record.case, record.message) for record in report.broken] == []
    assert set(report.declared) == {
        "poison leaks from v",
        "poison leaks from k",
        "scale of 0 or less gives NaN with causal",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "the card: expected an object; got list"),
        ('{"format": 1, "surprise": 2}', "'surprise' is unknown"),
        ("\xff", "is no JSON"),
        ('{"format": ' + "1" * 5000 + "}", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        (" " * 2_000_000, "expected a card of at most"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_profiles(text: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is none is refused in one sentence that names it, with exit code 2."""
    path = tmp_path / "odd.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ProfileError, match=r"odd\.json"):
        load(str(path))
    assert cli.main(["check", "numpy", "--profile", str(path)]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_unknown_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name lists what there is, and the nearest."""
    assert cli.main(["check", "numpy", "--profile", "torhc"]) == 2
    assert "no profile 'torhc'; did you mean torch? there are" in capsys.readouterr().err


def test_own_choices_are_no_faults_of_the_catalogue() -> None:
    """Imitations of one's own have names that the catalogue lacks, and are used."""
    for name in OWN:
        with pytest.raises(KeyError):
            named(name)
        assert any(name in faults for faults in MEANING.values())
