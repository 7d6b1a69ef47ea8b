"""`refattn probe`: conventions planted on purpose are found, right functions depart in nothing, cards are data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from libraries import EAGER, Library
from planted_conventions import CONVENTIONS, planted
from refattn import CLAUSES, cli
from refattn.conformance.faults import CONTROLS, FAULTS, Fault, named
from refattn.conformance.faults.catch import target_of
from refattn.conformance.probe import PROBES, Card, CardError, Finding, differences, probe, vocabulary
from refattn.conformance.probe.caller import Caller
from refattn.conformance.probe.card import ALWAYS
from refattn.conformance.probe.schema import PATH, as_text, schema
from refattn.conformance.profiles.meaning import MEANING, OWN
from refattn.conformance.targets import find_target
from refattn.conformance.targets.function import FunctionTarget

BY_NAME = {one.name: one for one in PROBES}
# What only faults planted into refattn's lazy masks show, and what repeatability shows.
OF_THE_CATALOGUE = {
    ("window", "one more on the left"): "window one too long",
    ("window", "one less on the left"): "window one too short",
    ("window", "one more on the right"): "window one too far ahead",
    ("window", "one less on the right"): "window one too near ahead",
    ("window", "symmetric"): "window is symmetric",
    ("many keys", "some do not count"): "only the first tiles are read",
    ("many keys", "wrong where logits grow"): "output is not rescaled",
    ("large negative bias", "NaN"): "no maximum is subtracted",
    ("log-sum-exp", "shifted by row"): "rows are shifted",
    ("strides", "ignored"): "strides are ignored",
    ("stored scores in 16 bits", "storage type"): "scores stored in the dtype of q",
    ("two calls", "other bits"): "every second call differs",
    ("two calls", "remembers"): "answers are memoised by shape",
    ("writes to inputs", "writes"): "inputs are written to",
    ("causal alignment", "ignored"): "causal is ignored",
}
# Values that no function here need give, each with the reason.
NOT_PLANTED = {
    **{
        (name, value): "as for hidden values, which share the code that tells them apart"
        for name in ("hidden keys", "hidden biases")
        for value in ("changes bits", "NaN leaks", "infinity leaks", "huge numbers leak")
    },
    ("sizes of zero", "some crash"): "nothing ends the process of the tests: see those of isolation",
    **{
        (name, value): "both are right, and the machine decides"
        for name in ("alone and in a batch", "a row alone", "chunked prefill")
        for value in ("same bits", "other bits")
    },
}


def found(target: Any, name: str) -> Finding:
    return BY_NAME[name].ask(Caller(target))


def of_catalogue(fault: Fault, name: str) -> Finding:
    """One probe on a fault; what calls wrote to is known after another one."""
    with fault.planted():
        caller = Caller(target_of(fault, "numpy"))
        if name == "writes to inputs":
            BY_NAME["softmax"].ask(caller)
        return BY_NAME[name].ask(caller)


FROM_MEANING = [
    (name, value, fault)
    for (name, value), faults in MEANING.items()
    for fault in faults
    if value not in ("NaN leaks", "infinity leaks")
]


@pytest.mark.parametrize(("name", "value", "fault"), FROM_MEANING)
def test_a_fault_is_what_its_finding_says(name: str, value: str, fault: str) -> None:
    """A fault of the catalogue, as a black box, gives the finding whose meaning it is, and its words and clause."""
    seen = of_catalogue(OWN.get(fault) or named(fault), name)
    assert (seen.found, seen.verdict) == (value, "departs")


@pytest.mark.parametrize("key", OF_THE_CATALOGUE, ids=" ".join)
def test_other_faults_are_found(key: tuple[str, str]) -> None:
    """Faults that mean no declared choice are found too."""
    seen = of_catalogue(named(OF_THE_CATALOGUE[key]), key[0])
    assert seen.found == key[1]


@pytest.mark.parametrize("key", CONVENTIONS, ids=" ".join)
def test_a_planted_convention_is_found(key: tuple[str, str]) -> None:
    """Each convention planted on purpose gives just that finding."""
    seen = found(planted(key), key[0])
    verdict = "as specified" if key[1] in BY_NAME[key[0]].specified else "departs"
    assert (seen.found, seen.verdict) == (key[1], verdict), seen.words


@pytest.mark.parametrize("control", CONTROLS, ids=lambda fault: fault.identifier)
def test_right_functions_depart_in_nothing(control: Fault) -> None:
    """Right implementations have no departure but the alignment that they choose where nobody said; and rounding."""
    card = probe(target_of(control, "numpy"))
    expected = {"causal alignment"}
    if control.name == "scores stored in the dtype of q":
        expected |= {"stored scores in 16 bits", "overflow in float16"}
    assert {finding.name for finding in card.departures} == expected
    assert card.counts["not determined"] == 0


@EAGER  # a card is some 300 shapes
def test_refattn_is_as_specified(library: Library) -> None:
    """refattn has every option, and departs in none, on every library."""
    card = probe(find_target(f"refattn-{library.name}"))
    assert [(one.name, one.words) for one in card.findings if one.verdict == "departs"] == []
    assert [one.name for one in card.findings if one.verdict == "not determined"] == []


@pytest.mark.library("torch")
def test_refattn_tiled_on_torch_is_as_specified() -> None:
    """The fast path of PyTorch departs in nothing either."""
    card = probe(find_target("refattn-torch-tiled"))
    assert [(one.name, one.words) for one in card.departures] == []


@pytest.mark.library("torch")
def test_what_is_known_of_torch() -> None:
    """scaled_dot_product_attention: top-left, zeros for empty rows, leaks of NaN, no soft cap, sinks or lse."""
    import torch

    card = probe(find_target("torch"))
    assert card.versions["torch"] == torch.__version__
    facts = {
        "causal alignment": "top-left",
        "empty row": "zeros",  # NaN before version 2.5
        "query of NaN": "zeros in its row",
        "visible infinity in k": "by its sign",
        "rank 2": "accepted",
        "window": "not offered",
        "mask": "True is visible",
        "mask of rank 3": "heads",
        "default scale": "1/sqrt(d_k)",
        "hidden values": "NaN and infinity leak",
        "soft cap": "not offered",
        "sinks": "not offered",
        "log-sum-exp": "not offered",
        "q_start": "not offered",
        "head mapping": "h // group",
        "precision of float64": "float64",
    }
    assert {name: card.finding(name).found for name in facts} == facts


@pytest.mark.library("torch")
def test_what_is_known_of_the_layer_of_torch() -> None:
    """MultiheadAttention's own mask hides where it is True; nothing else of a mask depends on that."""
    target = find_target("torch-mha")
    facts = {"mask": "True is hidden", "mask of each entry": "each its own", "causal": "not offered"}
    assert {name: found(target, name).found for name in facts} == facts
    assert "attn_mask" in found(target, "mask of rank 3").words


@pytest.mark.library("torch")
def test_what_torch_does_is_what_the_card_says() -> None:
    """The calls behind four lines of the card, made by hand."""
    import torch

    attention = torch.nn.functional.scaled_dot_product_attention
    q, k, v = torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 8, 8), torch.eye(8)[None, None]
    top_left = attention(q, k, v, is_causal=True)[0, 0]
    assert torch.equal(top_left > 0, torch.ones(3, 8, dtype=torch.bool).tril())
    empty = torch.tensor([[False] * 8, [True] * 8, [True] * 8])
    assert torch.equal(attention(q, k, v, attn_mask=empty)[0, 0, 0], torch.zeros(8))
    poisoned = v.clone()
    poisoned[..., 7, :] = torch.nan
    assert attention(q, k, poisoned, is_causal=True)[0, 0, 0].isnan().all()
    assert not attention(q, k, v, is_causal=True, scale=1.0).isnan().any()
    kept = find_target("torch")
    negative = attention(q + 1, k + 1, v, is_causal=True, scale=-1.0).isnan().any()
    assert (found(kept, "scale option").found == "NaN with causal") == bool(negative)


def test_every_value_is_planted() -> None:
    """Whatever a probe may find is found in some function: planted here, in the catalogue, or in a right one."""
    shown = {(name, value) for name, value, _ in FROM_MEANING} | set(CONVENTIONS) | set(OF_THE_CATALOGUE)
    right = {(one.name, one.found) for name in ("numpy", "refattn.conformance.faults:plain") for one in _card(name)}
    values = {(one.name, value) for one in PROBES for value in one.values}
    lacking = values - shown - right - NOT_PLANTED.keys()
    assert lacking == set(), "plant each in planted_conventions.py, or name its fault in MEANING or OF_THE_CATALOGUE"
    assert shown & NOT_PLANTED.keys() == set()


def _card(name: str) -> tuple[Finding, ...]:
    return probe(find_target(name)).findings


def test_a_target_that_crashes_goes_on(tmp_path: Path) -> None:
    """A function that raises, exits, lies about shapes or returns no array gives a whole card, and no exception."""
    path = tmp_path / "odd_kernels.py"
    path.write_text(
        "import numpy as np\n"
        "def raises(q, k, v, *, causal=False, mask=None):\n    raise RuntimeError('no kernel\\nimage')\n"
        "def exits(q, k, v):\n    raise SystemExit(3)\n"
        "def short(q, k, v):\n    return q[..., :1]\n"
        "def text(q, k, v):\n    return 'attention'\n"
        "def some(q, k, v, *, causal=False):\n"
        "    if causal:\n        raise ValueError('causal is not implemented')\n"
        "    return q\n"
    )
    for name in ("raises", "exits", "short", "text", "some"):
        card = probe(find_target(f"{path}:{name}"))
        assert [one.name for one in card.findings] == [one.name for one in PROBES]
        assert Card.from_dict(card.as_dict()) == card
    assert found(find_target(f"{path}:raises"), "mask").words == "raises RuntimeError: no kernel image"
    assert found(find_target(f"{path}:exits"), "softmax").words == "raises SystemExit: 3"
    assert found(find_target(f"{path}:raises"), "bias").verdict == "not offered"
    assert found(find_target(f"{path}:text"), "softmax").words == "the output is a str, expected an array of NumPy"
    assert found(find_target(f"{path}:some"), "causal").words == "raises ValueError: causal is not implemented"


def choosy(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> Any:
    """A right function that takes fewer queries than keys, widths alike in multiples of 8, and packed arrays alone."""
    widths = {q.shape[-1], k.shape[-1], v.shape[-1]}
    if q.shape[-2] > k.shape[-2] or len(widths) > 1 or max(widths) % 8 or not q.flags.c_contiguous or not q.size:
        raise NotImplementedError("not for these arrays")
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    if causal:
        options |= {"causal": True, "q_start": k.shape[-2] - q.shape[-2]}
    return named("rows are shifted").base(q, k, v, **options).run()[0]


def test_what_is_not_offered_departs_in_nothing() -> None:
    """A call that nobody offers decides no line: what is offered is asked about, and the words say what is not."""
    card = probe(FunctionTarget("choosy", "numpy", choosy))
    assert [(one.name, one.found) for one in card.departures] == [("causal alignment", "bottom-right")]
    words = {
        "default scale": "scores are multiplied by 1/sqrt(d_k)",
        "scale option": "scale is what scores are multiplied by, negative and zero too",
        "causal alignment": "bottom-right with Lq < Lk; Lq > Lk is not offered",
        "sizes of zero": "it cannot be asked for sizes of zero",
        "strides": "views give what copies give, but for arrays that are permuted",
        "window": "choosy cannot express mask",
    }
    assert [
        (name, card.finding(name).words) for name, text in words.items() if text not in card.finding(name).words
    ] == []


def test_an_alignment_that_is_none_is_described() -> None:
    """What no reading explains is told by the number of keys that each query sees."""
    seen = of_catalogue(named("last row sees all keys"), "causal alignment")
    assert (seen.found, seen.words) == (
        "other",
        "with Lq != Lk and no q_start, queries see 1, 2, 8 of 8 keys; and 1, 2, 3, 3, 3, 3, 3, 3 of 3 keys",
    )


def test_evidence_can_be_repeated() -> None:
    """Each probe describes its calls, its clause exists, and what it finds has words; names are unique."""
    labels = {clause.label for clause in CLAUSES}
    assert len(BY_NAME) == len(PROBES)
    for one in PROBES:
        assert one.clause in labels
        assert one.evidence.endswith(".") and len(one.evidence) > 30, one.name
        assert all(one.values.values())
        assert set(one.specified) <= set(one.vocabulary)


def test_evidence_repeated_by_hand() -> None:
    """The evidence of "causal alignment", followed by hand on NumPy, gives what the card says."""
    seen = of_catalogue(named("causal from the bottom right"), "causal alignment")
    assert "Lq = 3 and Lk = 8" in seen.evidence
    attention = named("causal from the bottom right").attention()
    q, k, v = np.zeros((1, 1, 3, 8)), np.zeros((1, 1, 8, 8)), np.eye(8)[None, None]
    weights = attention(q, k, v, causal=True)[0, 0]
    assert np.array_equal(weights > 0, np.tri(3, 8, 5) > 0)


def test_cards_are_data() -> None:
    """A card survives JSON, matches the schema beside the code, and two cards differ where their targets do."""
    plain, fault = probe(target_of(CONTROLS[0], "numpy")), probe(target_of(named("heads are interleaved"), "numpy"))
    data = json.loads(as_text(plain.as_dict()))
    assert Card.from_dict(data) == plain
    anew = "python -m refattn.conformance.probe.schema > refattn/conformance/probe/schema.json"
    assert PATH.read_text(encoding="utf-8") == as_text(schema()), f"write it anew: {anew}"
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(data, schema())
    assert differences(plain, Card.from_dict(data)) == ()
    (difference,) = [one for one in differences(plain, fault) if one.clause == "G1"]
    assert difference == ("head mapping", "G1", "h // group", "h % Hkv")
    fewer = replace(plain, findings=plain.findings[1:])
    assert differences(plain, fewer) == (
        (plain.findings[0].name, plain.findings[0].clause, plain.findings[0].found, ""),
    )
    with pytest.raises(KeyError, match="no finding"):
        fewer.finding(plain.findings[0].name)


BREAKS: list[tuple[str, Any]] = [
    ("'extra' is unknown", lambda card: card.update(extra=1)),
    ("'notes' is missing", lambda card: card.pop("notes")),
    ("format: expected 1", lambda card: card.update(format=2)),
    ("target: expected a string", lambda card: card.update(target=None)),
    ("versions: expected an object", lambda card: card.update(versions=[])),
    ("versions.numpy: expected a string", lambda card: card["versions"].update(numpy=2)),
    ("findings: expected a list", lambda card: card.update(findings={})),
    ("'extra' is unknown", lambda card: card["findings"][0].update(extra=1)),
    ("findings[0].name: expected the name of a probe", lambda card: card["findings"][0].update(name="colour")),
    ("findings[0].clause: expected 'S1'", lambda card: card["findings"][0].update(clause="M4")),
    ("findings[0].found: expected '1/sqrt(d_k)'", lambda card: card["findings"][0].update(found="blue")),
    ("findings[0].verdict: expected 'as specified'", lambda card: card["findings"][0].update(verdict="fine")),
    ("findings[0].words: expected a string", lambda card: card["findings"][0].update(words=1)),
    ("findings[1]: expected an object; got list", lambda card: card["findings"].__setitem__(1, [])),
    ("expected each name once", lambda card: card["findings"].append(card["findings"][0])),
]


@pytest.mark.parametrize(("words", "broken"), BREAKS, ids=[words for words, _ in BREAKS])
def test_what_is_no_card_is_refused(words: str, broken: Any) -> None:
    """A wrong key, type or word is refused in one sentence that says where; the schema refuses it too."""
    card = json.loads(as_text(_CARD.as_dict()))
    broken(card)
    with pytest.raises(CardError) as refusal:
        Card.from_dict(card)
    assert words in str(refusal.value)
    if "once" not in words:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(card, schema())


_CARD = Card(
    target="some",
    versions={"numpy": "2"},
    dtype="float32",
    findings=tuple(
        Finding(name=one.name, clause=one.clause, found=ALWAYS[-1], words="", verdict=ALWAYS[-1], evidence="")
        for one in PROBES[:3]
    ),
)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`refattn probe` prints a table and a summary, writes JSON, compares, and exits with 0 whatever it found."""
    path, fault = tmp_path / "card.json", "refattn.conformance.faults:mask_polarity"
    assert cli.main(["probe", fault, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "True is hidden: a boolean mask selects before softmax" in out
    assert "as specified" in out and "it departs in" in out
    card = Card.from_dict(json.loads(path.read_text(encoding="utf-8")))
    assert card.finding("mask").found == "True is hidden"
    assert cli.main(["probe", fault, "--json", "-", "--dtype", "float64"]) == 0
    assert Card.from_dict(json.loads(capsys.readouterr().out)).dtype == "float64"
    assert cli.main(["probe", "refattn.conformance.faults:plain", "--against", str(path)]) == 0
    out = capsys.readouterr().out
    assert "True is visible" in out and "True is hidden" in out
    assert cli.main(["probe", fault, "--against", fault]) == 0
    assert "0 findings differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("magic",), "no target 'magic'"),
        (("numpy", "--against", "magic"), "no target 'magic'"),
        (("numpy", "--against", "missing.json"), "missing.json"),
        (("numpy", "--json", "no/such/folder/card.json"), "no/such/folder/card.json"),
        (("numpy", "--dtype", "int8"), "no dtype int8"),
    ],
)
def test_what_cannot_be_probed(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that cannot be carried out gives exit code 2 and the reason."""
    assert cli.main(["probe", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_meanings_are_words_of_the_probes() -> None:
    """What a departure means is kept for words that probes use, none of them as specified; faults are functions."""
    for (name, value), faults in MEANING.items():
        assert value in vocabulary()[name][1]
        assert value not in BY_NAME[name].specified
        assert all(fault in OWN or not named(fault).patches for fault in faults)
    assert {fault for faults in MEANING.values() for fault in faults} - OWN.keys() <= {fault.name for fault in FAULTS}
