"""One measurement in a process of its own, as JSON on standard output; see `report.tasks` for the arguments."""

import json
import sys

from refattn_backends.bench import curves
from refattn_backends.bench.measures import MEASURES, versions
from refattn_backends.bench.rates import rates
from refattn_backends.bench.sizes import SIZES


def main(size: str, kind: str, *words: str) -> None:
    """Measures what the words name and prints it."""
    sizes = SIZES[size]
    found: object
    if kind == "rows":
        found = [row.as_dict() for row in MEASURES[words[0]](sizes)]
    elif kind == "times":
        found = curves.times(int(words[0]), sizes)
    elif kind == "memory":
        found = curves.memories(int(words[0]), words[1])
    else:
        found = {"versions": versions(), "rates": rates()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
