"""The JSON schema of a card, made from the probes; schema.json beside this file is what `python -m` prints of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from refattn.conformance.probe.card import FORMAT, VERDICTS
from refattn.conformance.probe.run import PROBES

PATH = Path(__file__).with_name("schema.json")


def schema() -> dict[str, Any]:
    """What `Card.as_dict` gives and `Card.from_dict` takes: no other key, and no word that no probe uses."""
    text = {"type": "string"}
    finding = {
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "clause", "found", "words", "verdict", "evidence"],
        "properties": {
            "name": {"enum": [probe.name for probe in PROBES]},
            "clause": text,
            "found": text | {"description": "a word of the vocabulary below"},
            "words": text | {"description": "the same in full"},
            "verdict": {"enum": list(VERDICTS)},
            "evidence": text | {"description": "the constructed calls, so that they can be repeated"},
        },
        "oneOf": [
            {
                "properties": {
                    "name": {"const": probe.name},
                    "clause": {"const": probe.clause},
                    "found": {"enum": list(probe.vocabulary)},
                }
            }
            for probe in PROBES
        ],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A convention card: what an implementation of attention was found to do",
        "type": "object",
        "additionalProperties": False,
        "required": ["format", "target", "versions", "dtype", "notes", "findings"],
        "properties": {
            "format": {"const": FORMAT},
            "target": text,
            "versions": {"type": "object", "additionalProperties": text},
            "dtype": text,
            "notes": {"type": "array", "items": text},
            "findings": {"type": "array", "items": finding},
        },
    }


def as_text(data: Any) -> str:
    """JSON as it is written to files: a schema or a card."""
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


if __name__ == "__main__":
    print(as_text(schema()), end="")
