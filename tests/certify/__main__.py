"""`python -m certify [--write] [FOLDER]`: certified vectors made anew, compared with a folder or written there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from certify.write import compare

SHIPPED = Path(__file__).parents[2] / "refattn" / "conformance" / "vectors"


def main() -> int:
    """0 if nothing differs or all is written, 1 with the names of the files that differ."""
    parser = argparse.ArgumentParser(prog="python -m certify", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=SHIPPED, help="where the vectors are (%(default)s)")
    parser.add_argument("--write", action="store_true", help="write what differs instead of complaining")
    args = parser.parse_args()
    different = compare(args.folder, args.write)
    for line in different:
        print(f"{args.folder / line}")
    if different and not args.write:
        print("The vectors are made by tests/certify and never edited: `nox -s vectors -- --write` makes them anew.")
        return 1
    print(f"{args.folder}: {'written' if different else 'nothing differs'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
