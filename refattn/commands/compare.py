"""`refattn compare`: judge results that another program wrote, beside exported cases or dumped with its inputs."""

import argparse
import shlex
from typing import Any

from refattn.commands.check import add_reports, at_least, in_path, places_of
from refattn.commands.output import UsageError, refused
from refattn.dtypes import dtype_in

DESCRIPTION = """\
Judges results that came from anywhere: of a folder that `refattn cases export` made, after your program put its
outputs beside the inputs, or of one .npz or .safetensors file that holds q, k, v and output.
"""

EPILOG = """\
Examples:
  refattn compare DIR                          the verdict on each case, a table by clause, the first failure
  refattn compare DIR --case masks.causal      one case, in full
  refattn compare dump.npz --causal            q, k, v (batch, heads, tokens, width) and output, as they were dumped
  refattn compare dump.safetensors --layout BSHD --scale 0.125 --lse-layout BSH --lse-base 2
  refattn compare dump.npz --dtype bfloat16    raw bytes or uint16 are its bit patterns; float32 holds what it held

A file may hold mask (boolean, True = visible), bias, scale, softcap, sinks, causal, q_start, k_start and dtype too, and
lse and weights to be judged; several problems are layer0.q, layer0.k, ... With grad_output, the gradient of the output,
grad_q, grad_k and grad_v are judged, and grad_bias and grad_sinks if they are there. No pickle is ever loaded.

Exit codes: 0 it conforms, 1 it does not (a result that is missing included), 2 the command line cannot be carried out,
or inputs are not those that were exported, 130 it was interrupted.
"""

# Options that say how a file is to be read; a folder says so itself.
OF_FILES = (
    *("causal", "scale", "softcap", "q_start", "k_start"),
    *("dtype", "layout", "lse_layout", "lse_base", "model", "largest"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `refattn compare`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("path", metavar="DIR|FILE", type=in_path, help="a folder of cases, or a file of tensors")
    add_reports(parser)
    parser.add_argument("--case", metavar="NAME,...", help="only these cases of DIR, each shown in full; * is any")
    files = parser.add_argument_group("of files, where they do not say it themselves")
    files.add_argument("--causal", action="store_const", const=True, help="key positions <= query positions alone")
    files.add_argument("--scale", metavar="X", type=float, help="of scores; 1 / sqrt(d_k) if left out")
    files.add_argument("--softcap", metavar="X", type=float, help="soft cap of scores")
    files.add_argument("--q-start", metavar="N", type=int, help="position of the first query: Lk - Lq is bottom-right")
    files.add_argument("--k-start", metavar="N", type=int, help="position of the first key")
    files.add_argument("--dtype", metavar="NAME", help="of q, k, v and output: bfloat16, float8_e4m3fn, ...")
    files.add_argument("--layout", choices=("BHSD", "BSHD"), help="axes of q, k, v and output (BHSD)")
    files.add_argument("--lse-layout", choices=("BHS", "BSH"), help="axes of lse (BHS)")
    files.add_argument("--lse-base", choices=("e", "2"), help="base of lse (e)")
    files.add_argument("--model", metavar="NAME", help="what may be rounded: fused, unfused, prescaled, tf32, ...")
    files.add_argument(
        "--largest", metavar="BYTES", type=at_least(1), help="most that a file may come to in memory (4 GiB)"
    )


def run(args: argparse.Namespace) -> int:
    """Judges: 0 it conforms, 1 it does not, 2 it cannot be judged."""
    from refattn.conformance.exchange.files import TensorFileError
    from refattn.conformance.reports.files import STANDARD_OUTPUT, ReportError, check_places, write_all
    from refattn.conformance.reports.terminal import print_cases, print_report

    given = {name: value for name in OF_FILES if (value := getattr(args, name)) is not None}
    places = places_of(args)
    try:
        check_places(places)
        report = _of_folder(args, given) if args.path.is_dir() else _of_file(args, given)
    except (TensorFileError, ReportError, UsageError) as fault:
        return refused("compare", str(fault))
    except OSError as fault:
        return refused("compare", f"{args.path}: {fault.strerror or fault}")
    command = shlex.join(["refattn", "compare", str(args.path)])
    try:
        write_all(report, places, command)
    except ReportError as fault:
        return refused("compare", str(fault))
    if STANDARD_OUTPUT not in places.values():
        if args.case or not args.path.is_dir():
            print_cases(report)
        else:
            print_report(report, command=command)
    return 0 if report.conforms else 1


def _of_folder(args: argparse.Namespace, given: dict[str, Any]) -> Any:
    from refattn.conformance.exchange.returned import compare_folder
    from refattn.conformance.reports.terminal import progress

    if given:
        name = next(iter(given)).replace("_", "-")
        raise UsageError(f"--{name} is for files; {args.path} says for each case how it is called")
    with progress(None) as advance:
        return compare_folder(args.path, args.case, advance)


def _of_file(args: argparse.Namespace, given: dict[str, Any]) -> Any:
    from refattn.conformance.exchange.bits import FLOATS
    from refattn.conformance.exchange.dump import Reading, compare_dump
    from refattn.conformance.reports.terminal import progress
    from refattn.rounding import MODELS

    if args.case:
        raise UsageError("--case is for folders of cases")
    if "dtype" in given:
        try:
            given["dtype"] = dtype_in(given["dtype"], FLOATS)
        except ValueError as fault:
            raise UsageError(f"--dtype: {fault}") from fault
    if given.get("model", "fused") not in MODELS:
        raise UsageError(f"--model: no model {given['model']!r}; there are {', '.join(MODELS)}")
    options = {name: given.pop(name) for name in OF_FILES[:5] if name in given}
    with progress(None) as advance:
        return compare_dump(args.path, Reading(options=options, **given), advance)
