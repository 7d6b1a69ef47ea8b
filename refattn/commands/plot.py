"""`refattn plot`: the weights of a user's own q, k and v, or a mask, as an SVG picture."""

import argparse
from typing import Any

from refattn.commands.check import in_path
from refattn.commands.output import UsageError, refused

DESCRIPTION = """\
Draws the attention weights of one head of your own tensors, or which query sees which key under simple masks. The
picture is one SVG file that needs nothing else. Weights are a diagnostic: they show where a query reads, not why.
"""

EPILOG = """\
  refattn plot dump.npz --svg weights.svg --head 3          q, k, v and options, as for refattn check --inputs
  refattn plot dump.npz --name layer0 --svg weights.svg     where the file holds layer0.q, layer0.k, layer0.v, ...
  refattn plot dump.npz --causal --q-start 6 --svg -        with the causal rule added, to standard output
  refattn plot --window 3,0 --q-len 8 --svg mask.svg        a mask alone: each token and the three before it

Of more than 64 queries or keys, a cell stands for a block of them.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `refattn plot`, its description and its examples."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "file", metavar="FILE.npz", nargs="?", type=in_path, help="captured tensors; without it a mask is drawn"
    )
    parser.add_argument("--svg", metavar="FILE", required=True, help="the picture, - for standard output")
    parser.add_argument("--name", metavar="NAME", help="which tensors of the file: NAME.q, NAME.k, NAME.v")
    parser.add_argument("--head", metavar="N", type=int, default=0, help="the query head (%(default)s)")
    parser.add_argument("--entry", metavar="N", type=int, default=0, help="the batch entry (%(default)s)")
    parser.add_argument("--causal", action="store_true", help="a query sees the keys up to its own position")
    parser.add_argument("--window", metavar="L,R", type=_window, help="L keys before and R after; L, leaves R open")
    parser.add_argument("--q-start", metavar="N", type=int, help="position of the first query")
    parser.add_argument("--k-start", metavar="N", type=int, help="position of the first key")
    parser.add_argument("--q-len", metavar="N", type=int, help="queries, for a mask alone")
    parser.add_argument("--k-len", metavar="N", type=int, help="keys, for a mask alone (as many as queries)")


def run(args: argparse.Namespace) -> int:
    """Writes the picture: 0, or 2 with one sentence where it cannot be drawn."""
    from refattn.conformance.exchange.files import TensorFileError
    from refattn.conformance.reports.files import ReportError, check_places, write_text

    try:
        check_places({"--svg": args.svg})
        text = _of_mask(args) if args.file is None else _of_weights(args)
        write_text("--svg", args.svg, text)
    except (TensorFileError, ReportError, UsageError) as fault:
        return refused("plot", str(fault))
    return 0


def _of_mask(args: argparse.Namespace) -> str:
    from refattn import masks
    from refattn.conformance.reports.plots import mask_svg

    q_len, k_len = args.q_len, args.q_len if args.k_len is None else args.k_len
    if q_len is None or q_len < 1 or k_len < 1:
        raise UsageError("name a FILE.npz with q, k and v, or --q-len N of at least 1 for a mask alone")
    if not (args.causal or args.window):
        raise UsageError("a mask alone needs --causal or --window L,R")
    mask = masks.window(*args.window) if args.window else masks.causal()
    mask = mask & masks.causal() if args.causal else mask
    if args.q_start is None and (q_len != k_len or args.k_start):
        raise UsageError(f"with --q-len {q_len}, --k-len {k_len}, --k-start {args.k_start or 0} name --q-start [M5]")
    return mask_svg(mask.to_array(q_len, k_len, args.q_start or 0, args.k_start or 0))


def _of_weights(args: argparse.Namespace) -> str:
    from refattn import masks
    from refattn.conformance.captured import captured_cases
    from refattn.conformance.records import CAPTURED
    from refattn.testing import weights_svg

    if args.q_len is not None or args.k_len is not None:
        raise UsageError(f"--q-len and --k-len are for a mask alone; {args.file} has lengths of its own")
    found = {case.name.removeprefix(CAPTURED): case for case in captured_cases(args.file)}
    if args.name is None and len(found) > 1:
        raise UsageError(f"{args.file} holds several calls; choose by --name out of {', '.join(found)}")
    name = next(iter(found)) if args.name is None else args.name
    if name not in found:
        raise UsageError(f"--name: no {name!r} in {args.file}; there are {', '.join(found)}")
    case = found[name]
    problem = case.problem(case.own_dtype, 0)
    kept = ("causal", "bias", "scale", "softcap", "sinks", "q_start", "k_start")
    options: dict[str, Any] = {option: getattr(problem, option) for option in kept}
    options["causal"] |= args.causal
    options |= {start: value for start in ("q_start", "k_start") if (value := getattr(args, start)) is not None}
    terms = [problem.shown] if problem.shown is not None else []
    terms += [masks.window(*args.window)] if args.window else []
    options["mask"] = terms[0] if len(terms) == 1 else masks.dense(terms[0]) & terms[1] if terms else None
    return weights_svg(problem.q, problem.k, problem.v, entry=args.entry, head=args.head, **options)


def _window(text: str) -> tuple[int | None, int | None]:
    left, comma, right = text.partition(",")
    sides = [side.strip() for side in (left, right)]
    if not comma or not all(side.isdecimal() or not side for side in sides):
        raise argparse.ArgumentTypeError(f"expected L,R, two whole numbers, either left out for no limit; got {text!r}")
    first, second = (int(side) if side else None for side in sides)
    return first, second
