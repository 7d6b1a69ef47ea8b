"""What is wrong with an answer: the fault that would give it, the numbers that it was given with, and where.

words.py        what each fault of the catalogue means for the one who wrote the kernel
hypotheses.py   the catalogue, alone and in pairs, as functions from a problem to an answer
readings.py     other calls that may have been answered; fitting.py takes numbers from the answer
tiles.py        the catalogue's faults of tiles, for tiles of other sizes
evidence.py     the one place where an answer is compared with a prediction
where.py        rows, heads, keys and tiles that are wrong
gradients.py    the faults of gradients, each compared with what came; gradient_where.py says which are wrong, and where
single.py       one failure explained
summary.py      all failures of a report explained by one fault, or two
"""

from __future__ import annotations

from refattn.conformance.diagnosis.evidence import Evidence
from refattn.conformance.diagnosis.single import Diagnosis, Match, diagnose, explain, ratio_against
from refattn.conformance.diagnosis.summary import Summary, summarise

__all__ = ["Diagnosis", "Evidence", "Match", "Summary", "diagnose", "explain", "ratio_against", "summarise"]
