"""The cards of public implementations: whole, looked at by hand in their versions, drawn as the page that is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from refattn.conformance import cards as command
from refattn.conformance.cards import Verified, cards_in, main
from refattn.conformance.cards_page import page_of
from refattn.conformance.faults import named
from refattn.conformance.faults.catch import target_of
from refattn.conformance.probe import PROBES, Card, probe
from refattn.conformance.probe.schema import as_text, schema
from refattn.conformance.profiles import Profile, load, names

FOLDER = Path(__file__).parents[1] / "docs" / "cards"
CARDS = cards_in(FOLDER)
# Those that the page must have, one at least of each library that a CPU runs.
EXPECTED = {
    *("torch", "torch-flash", "torch-mha", "torch-mha-weights", "jax", "onnx-reference", "onnxruntime"),
    *("onnxruntime-mha", "onnxruntime-gqa", "mlx", "keras-torch", "keras-jax", "transformers-sdpa"),
    *("transformers-eager", "tinygrad"),
}


def test_the_page_is_what_the_cards_draw() -> None:
    """README.md is drawn from the cards and verified.toml beside it, and from nothing else."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert page_of(CARDS, Verified.read(FOLDER)) == page, "draw it anew: python -m refattn.conformance.cards --draw"
    assert CARDS.keys() >= EXPECTED
    assert {path.stem for path in FOLDER.glob("*.json")} == CARDS.keys()


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_whole(name: str) -> None:
    """Every question has its line, in the form in which cards are written; its words say what it found."""
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    card = CARDS[name]
    assert (text, card.target) == (as_text(card.as_dict()), name)
    jsonschema.validate(json.loads(text), schema())
    asked, probes = ([(one.name, one.evidence) for one in some] for some in (card.findings, PROBES))
    assert asked == probes, f"ask anew: nox -s cards -- {name}"
    assert all(one.words for one in card.findings)


def test_each_line_was_looked_at_by_hand() -> None:
    """There is a sentence for each question, and a date for each card, of the versions that it is about."""
    looked = Verified.read(FOLDER)
    assert list(looked.lines) == [one.name for one in PROBES], "say in verified.toml how each line is looked at"
    assert looked.cards.keys() == CARDS.keys(), "say in verified.toml when and how each card was looked at"
    for name, card in CARDS.items():
        assert looked.cards[name]["versions"] == card.versions, f"look at {name} in these versions"
        assert set(looked.cards[name]) <= {"date", "versions", "how", "rest"}


def test_a_profile_is_a_card() -> None:
    """Each shipped profile is the card of its name, and each card that can excuse a result is shipped."""
    assert set(names()) == {name for name, card in CARDS.items() if Profile(name, card).faults}
    assert all(load(name).card == CARDS[name] for name in names())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A probed card is written, as a profile too where it declares what a result can show, and the page is drawn; one
    that declares nothing any more leaves no old profile."""
    (tmp_path / "verified.toml").write_text('[lines]\n"empty row" = "two queries: NaN."\n[cards]\n', encoding="utf-8")
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "jax.json").write_text("an old one", encoding="utf-8")
    made = {"torch": named("empty row is NaN"), "torch-mha": named("causal is ignored")}
    made_cards = {name: probe(target_of(fault, "numpy")) for name, fault in made.items()}
    made_cards["jax"] = replace(made_cards["torch"], findings=())
    monkeypatch.setattr(command, "probed", made_cards.__getitem__)
    arguments = ["--folder", str(tmp_path), "--profiles", str(tmp_path / "profiles")]
    assert main(["torch", "torch-mha", "jax", *arguments]) == 0
    assert not (tmp_path / "profiles" / "jax.json").exists()
    assert "torch: " in capsys.readouterr().out
    assert Card.from_dict(json.loads((tmp_path / "torch.json").read_text(encoding="utf-8"))) == made_cards["torch"]
    assert load(str(tmp_path / "profiles" / "torch.json")).card == made_cards["torch"]
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| P2 | empty row | **NaN** | zeros |" in page
    assert "- **empty row** (P2): two queries: NaN." in page
    assert "- P2 empty row: a row that sees no key is NaN." in page
    with pytest.raises(SystemExit):
        main(["magic", *arguments])
