"""What the subcommands share: JSON, tables, numbers and wrapped text, for terminals and for pipes."""

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


class UsageError(Exception):
    """Options that do not go together, or name what is not there."""


def refused(command: str, message: str) -> int:
    """The exit code of a command line that cannot be carried out, after a sentence on standard error."""
    print(f"refattn {command}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def print_json(data: Any) -> None:
    """Prints valid JSON; a number that JSON does not know becomes the string "-inf", "inf" or "nan"."""
    print(json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Prints a table, the columns named in right flush right; a pipe gets full width and no colour."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, highlight=False, width=1000)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_text(text: str, indent: str = "") -> None:
    """Prints a paragraph, wrapped to the terminal and never beyond 100 columns."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    width = max(40, min(100, columns))
    print(textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False))


def count(number: int | None) -> str:
    """A whole number with its thousands set off; "never" for None."""
    return "never" if number is None else f"{number:,}"


def size(number: int) -> str:
    """A number of bytes in the largest binary unit that keeps it at least 1."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(max(0, (number.bit_length() - 1) // 10), len(units) - 1)
    return f"{number / 1024**power:,.4g} {units[power]}"


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
