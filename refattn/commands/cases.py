"""`refattn cases`: list the conformance suite's cases, or write their inputs for programs that Python cannot call."""

import argparse

from refattn.commands.check import at_least, in_dtypes, in_path
from refattn.commands.clauses import labels_in
from refattn.commands.output import print_json, print_table, refused
from refattn.conformance.records import DEFAULT_SEED

FORMATS = ("raw", "npz", "safetensors")

DESCRIPTION = """\
Lists the conformance suite's cases, or writes their inputs into a folder: one folder per case, with its tensors and, in
case.json, shapes and options. Run your program on each, in any language and on any machine, let it put its output
beside the inputs, and ask `refattn compare DIR` for the verdict. manifest.json says what every file holds.
"""

EPILOG = """\
Examples:
  refattn cases list                                            every case: name, clauses, what must hold
  refattn cases list 'masks.window*' --clauses M6               as refattn check --case takes them; --json for programs
  refattn cases export DIR --dtype float32                      every case in float32, tensors as q.bin, k.bin, ...
  refattn cases export DIR --features causal,q_start --limit 50  no option but these, the 50 plainest cases
  refattn cases export DIR --format safetensors --dtype bfloat16
  refattn cases export DIR --clauses M,P1                       the chapter of masks, and clause P1
  refattn cases export DIR --gradients --dtype float32          for a backward pass: grad_output comes with the inputs

Formats: raw is little-endian bytes in C order, npz is NumPy's (bfloat16 as its bit patterns in uint16), and
safetensors holds bfloat16 as it is. The output goes into output.bin, or as output into outputs.npz or
outputs.safetensors; lse, the natural log-sum-exp in float32 (of float64 in float64), may lie beside it. With
--gradients it is grad_q, grad_k and grad_v that go beside the inputs, and grad_bias and grad_sinks where these are.

Exit codes: 0 all is well, 2 the command line cannot be carried out.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the action of `refattn cases` and its options."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="print names of cases and what must hold")
    listing.add_argument("names", metavar="NAME", nargs="*", help="only these: masks.causal, or 'masks.*'")
    listing.add_argument("--json", action="store_true", help="print a JSON list instead")
    export = actions.add_parser("export", help="write inputs for other programs")
    export.add_argument("folder", metavar="DIR", type=in_path, help="where the files go; must be new or empty")
    export.add_argument("--format", choices=FORMATS, default="raw", help="of the tensors (%(default)s)")
    for action in (listing, export):
        action.add_argument(
            "--clauses",
            metavar="LABEL",
            nargs="+",
            type=labels_in,
            default=[],
            help="only these or chapters: S1,M",
        )
    export.add_argument("--dtype", metavar="float32,...", type=in_dtypes, help="only these dtypes; bf16 will do")
    export.add_argument(
        "--features",
        metavar="causal,...",
        help="only cases that need no more than these: causal, mask, bias, scale, softcap, sinks, q_start, k_start, "
        "gqa (grouped heads), rank (others than 4), batch (axes that broadcast), lse, weights; none for q, k, v alone",
    )
    export.add_argument(
        "--gradients", action="store_true", help="the cases about gradients, with grad_output, instead of all others"
    )
    export.add_argument("--seed", metavar="N", type=at_least(0), default=DEFAULT_SEED, help="data (%(default)s)")
    export.add_argument("--limit", metavar="N", type=at_least(1), help="only the first N, which are the plainest")


def run(args: argparse.Namespace) -> int:
    """Lists or exports what the command line names."""
    return _list(args) if args.action == "list" else _export(args)


def _list(args: argparse.Namespace) -> int:
    """The cases of those names and clauses, calls of attention and checks of refattn's own functions alike."""
    from refattn.conformance.cases import all_cases
    from refattn.conformance.picked import NoSuchCase, picked

    labels = {label for labels in args.clauses for label in labels}
    found = [case for case in all_cases() if not labels or labels & set(case.clauses)]
    try:
        names = picked(" ".join(args.names) or "*", (case.name for case in found))
    except NoSuchCase as fault:
        return refused("cases", str(fault))
    found = [case for case in found if case.name in names]
    if args.json:
        print_json([{name: getattr(case, name) for name in ("name", "clauses", "says", "dtypes")} for case in found])
    else:
        print_table(("case", "clauses", "must hold"), [(one.name, ",".join(one.clauses), one.says) for one in found])
    return 0


def _export(args: argparse.Namespace) -> int:
    from refattn.conformance.exchange.export import FEATURES, Selection, export
    from refattn.conformance.exchange.files import TensorFileError
    from refattn.dtypes import COMPUTED

    features = None
    if args.features is not None:
        words = [word for word in args.features.replace(",", " ").split() if word != "none"]
        if unknown := [word for word in words if word not in FEATURES]:
            return refused("cases", f"--features: no feature {', '.join(unknown)}; there are {', '.join(FEATURES)}")
        features = tuple(word for word in FEATURES if word in words)
    labels = sorted({label for labels in args.clauses for label in labels})
    selection = Selection(
        format=args.format,
        dtypes=args.dtype or COMPUTED,
        clauses=tuple(labels) or None,
        features=features,
        limit=args.limit,
        seed=args.seed,
        gradients=args.gradients,
    )
    try:
        found = export(args.folder, selection)
    except TensorFileError as fault:
        return refused("cases", str(fault))
    except OSError as fault:
        return refused("cases", f"{fault.filename or args.folder} cannot be written: {fault.strerror or fault}")
    if not found:
        return refused("cases", "no case is of these clauses and dtypes, and needs no more than these features")
    names = "grad_q, grad_k, grad_v" if args.gradients else "output"
    outputs = names.replace(",", ".bin,") + ".bin" if args.format == "raw" else f"outputs.{args.format} with {names}"
    print(f"{len(found)} cases written to {args.folder}; put {outputs} into each folder, then:")
    print(f"refattn compare {args.folder}")
    return 0
