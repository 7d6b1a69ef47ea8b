"""What a probe is: a name, the clause it is about, what it may find, what of that the specification says, how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from refattn.conformance.probe.caller import Caller, Crashed, Look, NotOffered, Raised, Seen, Unclear
from refattn.conformance.probe.card import (
    ALWAYS,
    AS_SPECIFIED,
    CRASHES,
    DEPARTS,
    NOT_DETERMINED,
    NOT_OFFERED,
    OTHER,
    RAISES,
    Finding,
)

# What is said of what any probe may find, unless it says more.
WORDS = {OTHER: "something that none of the usual readings explains"}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One question; `values` maps what may be found to words, `specified` are those that the specification allows."""

    name: str
    clause: str
    values: Mapping[str, str]
    specified: tuple[str, ...]
    evidence: str
    look: Look

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All that may be found."""
        return (*self.values, *ALWAYS)

    def ask(self, caller: Caller) -> Finding:
        """The finding; what the target refuses or raises is one too."""
        try:
            seen = self.look(caller)
        except NotOffered as refusal:
            return self._finding(NOT_OFFERED, str(refusal), NOT_OFFERED)
        except Unclear as reason:
            return self._finding(NOT_DETERMINED, str(reason), NOT_DETERMINED)
        except Crashed as fault:
            return self._finding(CRASHES, str(fault), DEPARTS)
        except Raised as fault:
            return self._finding(RAISES, f"raises {fault}", AS_SPECIFIED if RAISES in self.specified else DEPARTS)
        found, words = seen if isinstance(seen, Seen) else (seen, "")
        if found not in self.vocabulary:
            raise ValueError(f"{self.name}: {found!r} is not in the vocabulary")
        verdict = AS_SPECIFIED if found in self.specified else DEPARTS
        return self._finding(found, words or self.values.get(found) or WORDS.get(found, found), verdict)

    def _finding(self, found: str, words: str, verdict: str) -> Finding:
        return Finding(
            name=self.name, clause=self.clause, found=found, words=words, verdict=verdict, evidence=self.evidence
        )


class Probes:
    """The probes of one module, in order; `add` is its decorator."""

    def __init__(self) -> None:
        self.all: list[Probe] = []

    def add(
        self, name: str, clause: str, values: Mapping[str, str], specified: tuple[str, ...] = ()
    ) -> Callable[[Look], Look]:
        """Adds a function from a caller to what it saw; its docstring is the evidence. The first value is specified,
        unless others are named."""

        def add(look: Look) -> Look:
            evidence = " ".join((look.__doc__ or "").split())
            specified_values = specified or (next(iter(values)),)
            self.all.append(
                Probe(name=name, clause=clause, values=values, specified=specified_values, evidence=evidence, look=look)
            )
            return look

        return add
