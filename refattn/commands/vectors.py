"""`refattn vectors`: list the certified vectors, or export them for other programs."""

import argparse
import json
from pathlib import Path

from refattn import vectors
from refattn.commands.check import in_dtype, in_path
from refattn.commands.clauses import labels_in
from refattn.commands.output import print_json, print_table, refused
from refattn.vectors import Vector
from refattn.whole_files import write_whole

DESCRIPTION = """\
Certified vectors are calls of attention whose outputs, log-sum-exps and weights are proven: each is the real
number of the specification, rounded once to float64. They serve implementations in any language.
"""

EPILOG = """\
Examples:
  refattn vectors list                          every vector: name, clauses, dtypes, flags
  refattn vectors list --clause M4 P            those that show clause M4 or any of chapter P
  refattn vectors list --dtype bfloat16 --json  those whose inputs bfloat16 holds, for programs
  refattn vectors export DIR                    one JSON file per vector, and the schema
  refattn vectors export DIR --format npz       NAME.npz, inputs as `refattn check --inputs` reads them, and
                                                NAME.expected.npz with output, lse and weights

Exit codes: 0 all is well, 2 no vector fits, a file is not the one that was made, or DIR cannot be written.
"""

FORMATS = ("json", "npz")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the actions of `refattn vectors` and their options."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="print what there is")
    exporting = actions.add_parser("export", help="write files for other programs")
    exporting.add_argument("folder", metavar="DIR", type=in_path, help="where the files go; made if it is not there")
    exporting.add_argument("--format", choices=FORMATS, default="json", help="of the files (%(default)s)")
    listing.add_argument("--json", action="store_true", help="print a JSON list instead")
    for action in (listing, exporting):
        action.add_argument(
            "--clause", nargs="+", type=labels_in, metavar="LABEL", default=[], help="only these clauses or chapters"
        )
        action.add_argument("--dtype", metavar="NAME", type=in_dtype, help="only those whose inputs it holds exactly")


def run(args: argparse.Namespace) -> int:
    """Lists or exports the vectors that the command line names. Raises VectorError."""
    wanted = {label for labels in args.clause for label in labels}
    found = [
        vector
        for vector in vectors.load()
        if (not wanted or wanted & set(vector.clauses)) and (args.dtype is None or args.dtype in vector.dtypes)
    ]
    if not found:
        reasons = vectors.manifest()["not_shown"]
        why = " ".join(f"{label}: {reasons[label]}" for label in sorted(wanted & set(reasons)))
        return refused("vectors", f"no vector shows that. {why or 'Another --dtype may have some.'}")
    if args.action == "list":
        _print(found, args.json)
        return 0
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        for vector in found:
            _write(vector, args.folder, args.format)
        if args.format == "json":
            write_whole(args.folder / vectors.SCHEMA, (vectors.FOLDER / vectors.SCHEMA).read_bytes())
    except OSError as fault:
        return refused("vectors", f"{fault.filename or args.folder} cannot be written: {fault.strerror or fault}")
    print(f"{len(found)} vectors written to {args.folder}")
    return 0


def _print(found: list[Vector], as_json: bool) -> None:
    keys = ("name", "clauses", "dtypes", "flags", "says")
    if as_json:
        print_json([{key: vector.raw[key] for key in keys} for vector in found])
        return
    rows = [
        (vector.name, *(" ".join(getattr(vector, key)) for key in ("clauses", "dtypes", "flags"))) for vector in found
    ]
    print_table(("name", "clauses", "dtypes", "flags"), rows)
    print(f"{len(found)} vectors")


def _write(vector: Vector, folder: Path, form: str) -> None:
    if form == "npz":
        vectors.save_npz(vector, folder)
    else:
        alone = {"chapter": vector.chapter, "format": vectors.FORMAT, "vectors": [vector.raw]}
        text = json.dumps(alone, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        write_whole(folder / f"{vector.name}.json", f"{text}\n".encode())
