"""The process that a target runs in: the options of the commands that call one, and the target itself."""

import argparse
from typing import Any


def configure(parser: argparse.ArgumentParser, calls: str) -> None:
    """Adds the options; `calls` says what the time limit is for."""
    apart = parser.add_argument_group("the process that the target runs in")
    apart.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=_positive,
        default=60.0,
        help=f"for the calls of each {calls} (%(default)g)",
    )
    apart.add_argument(
        "--memory-limit", metavar="GIB", type=_positive, help="resident memory (80 %% of what is free at the start)"
    )
    apart.add_argument(
        "--in-process", action="store_true", help="none, no limits: a debugger reaches the target, a crash ends the run"
    )


def open_target(
    args: argparse.Namespace,
    name: str,
    library: str | None,
    convention: str | None = None,
    gradients: str | None = None,
) -> Any:
    """The target: in a process of its own, unless it is refattn's or the user wants it here. Raises TargetError."""
    from refattn.conformance.isolation.target import AVAILABLE, IsolatedTarget
    from refattn.conformance.targets import TargetError, find_target, is_own

    if args.in_process or (is_own(name) and convention is None):
        return find_target(name, library, convention, gradients)
    if not AVAILABLE:
        raise TargetError("targets run in a process of their own on POSIX systems alone: add --in-process")
    limit = None if args.memory_limit is None else int(args.memory_limit * 2**30)
    wanted = (name, library, convention, gradients)
    return IsolatedTarget(*wanted, seconds=args.time_limit, memory_limit=limit)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0; got {text!r}")
    return value
