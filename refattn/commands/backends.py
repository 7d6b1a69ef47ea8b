"""`refattn backends`: the array libraries that can run the specification here."""

import argparse

from refattn.backend import CAPABILITIES
from refattn.commands.output import print_json, print_table

DESCRIPTION = """\
Lists every plugin of the entry-point group `refattn.backends`, imports its library if it is installed, and
runs the three-token example on each of its devices. Status:
  verified            the example ran on every device listed, with the known result
  not verified here   the library is installed, but nothing here can run it, as CuPy without a GPU
  not installed       the plugin is there, its library is not
  broken: ...         the plugin or its library failed, and how
"""

EPILOG = """\
Examples:
  refattn backends             a table
  refattn backends --json      the same for programs

Exit code 1 if a plugin is broken. The capabilities mean:
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `refattn backends`."""
    meanings = "".join(f"  {name:<12}{meaning}\n" for name, meaning in CAPABILITIES.items())
    parser.description, parser.epilog = DESCRIPTION, EPILOG + meanings
    parser.add_argument("--json", action="store_true", help="print a JSON list instead")


def run(args: argparse.Namespace) -> int:
    """Prints the registry's records."""
    from refattn.registry import backends

    records = backends()
    if args.json:
        print_json([record.as_dict() for record in records])
    else:
        print_table(
            ("backend", "version", "status", "devices", "capabilities", "plugin from"),
            [
                (
                    record.name,
                    record.version or "-",
                    record.status,
                    ", ".join(record.devices) or "-",
                    ", ".join(record.capabilities) or "-",
                    record.distribution,
                )
                for record in records
            ],
        )
    return int(any(record.status.startswith("broken") for record in records))
