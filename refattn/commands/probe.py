"""`refattn probe`: what a black box does, found out without expected conventions."""

import argparse
from typing import Any

from refattn.commands import process
from refattn.commands.check import TARGET, in_dtype
from refattn.commands.output import refused

DESCRIPTION = """\
Finds out what an implementation of attention does, by constructed inputs: no convention is presumed. The result is a
convention card: default scale, mask polarity, alignment, empty rows, head mapping, log-sum-exp, what leaks through
masks, precision, ... each with the clause that it is about, and whether it is what the specification says.
"""

EPILOG = """\
Examples:
  refattn probe torch
  refattn probe my_kernel.py:attention --json card.json
  refattn probe torch --against numpy          only what two implementations do differently
  refattn probe torch --save-profile torch.json, then: refattn check torch --profile torch.json

Verdicts:
  as specified     what the clause says
  departs          something else
  not offered      there is no such option or result
  not determined   the probe cannot tell, and says why; a call that takes too long decides nothing

A card in JSON also holds, for each finding, the constructed calls in words. It is read by refattn check --profile,
which then tells choices that the card declares from faults.

The target runs in a process of its own: what ends that process is a line of the card, and the next question is asked.

Exit codes: 0 it could be probed, whatever was found, 2 the command line cannot be carried out.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `refattn probe`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("target", metavar="TARGET", help=TARGET)
    parser.add_argument("--json", metavar="FILE", help="write the card to FILE as JSON, - for standard output")
    parser.add_argument(
        "--save-profile", metavar="FILE", help="write the card to FILE, for refattn check --profile FILE"
    )
    parser.add_argument("--against", metavar="TARGET", help="show only what differs from another target, or a profile")
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        type=in_dtype,
        help="of the calls that are not about a dtype (float32 where there is one)",
    )
    parser.add_argument(
        "--library", metavar="NAME", help="arrays that your own function is called with: numpy, or what the file says"
    )
    parser.add_argument(
        "--convention", metavar="FILE", help="how your own function is called, as refattn check --convention takes it"
    )
    process.configure(parser, "question")


def run(args: argparse.Namespace) -> int:
    """Probes, prints the card: 0 it could be probed, 2 it could not."""
    from refattn.conformance.probe.card import Card
    from refattn.conformance.probe.schema import as_text
    from refattn.conformance.probe.table import print_card
    from refattn.conformance.reports.files import STANDARD_OUTPUT, ReportError, check_places, write_text
    from refattn.conformance.targets import TargetError

    given = {"--json": args.json, "--save-profile": args.save_profile}
    places = {option: where for option, where in given.items() if where is not None}
    try:
        check_places(places)
        card = _card(args, args.target)
        other: Card | None = _other(args) if args.against else None
        for option, where in places.items():
            write_text(option, where, as_text(card.as_dict()))
    except (TargetError, ReportError) as fault:
        return refused("probe", str(fault))
    if STANDARD_OUTPUT in places.values():
        return 0
    if other is None:
        print_card(card)
    else:
        _print_differences(card, other)
    return 0


def _card(args: argparse.Namespace, name: str) -> Any:
    from refattn.conformance.capture import captured
    from refattn.conformance.probe.run import PROBES, probe
    from refattn.conformance.reports.terminal import progress
    from refattn.conformance.targets import TargetError

    with captured([]):
        target = process.open_target(args, name, args.library, args.convention if name == args.target else None)
    try:
        if args.dtype and args.dtype not in target.dtypes:
            raise TargetError(target.unsupported((), args.dtype))
        with progress(len(PROBES), lambda finding: str(finding.name)) as advance:
            return probe(target, dtype=args.dtype, advance=advance)
    finally:
        target.close()


def _other(args: argparse.Namespace) -> Any:
    """The card of --against: a stored profile, or a target that is probed too."""
    from refattn.conformance import profiles
    from refattn.conformance.targets import TargetError

    if args.against.endswith(".json") or args.against in profiles.names():
        try:
            return profiles.load(args.against).card
        except profiles.ProfileError as fault:
            raise TargetError(f"--against: {fault}") from fault
    return _card(args, args.against)


def _print_differences(card: Any, other: Any) -> None:
    from refattn.commands.output import print_table
    from refattn.conformance.probe.card import differences

    found = differences(card, other)
    if found:
        print_table(
            ("clause", "finding", card.target, other.target), [(d.clause, d.name, d.first, d.second) for d in found]
        )
    shared = len(card.findings) - len(found)
    print(f"{card.target} and {other.target}: {len(found)} findings differ, {shared} are the same.")
