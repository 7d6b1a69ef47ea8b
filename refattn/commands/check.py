"""`refattn check`: judge an implementation. The work is done by `refattn.conformance.runner`."""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `refattn check`, its description and its examples."""
    from refattn.conformance.runner import add_arguments

    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the suite on the target and returns its exit code."""
    from refattn.conformance.runner import check_command

    return check_command(args)
