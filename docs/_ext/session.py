"""What a reader would type, typed while a page is built: commands in a temporary folder, printed with their output."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import refattn

PACKAGE = Path(refattn.__file__).parent
EXAMPLES = Path(__file__).parents[1] / "examples"
# Longer than any page may take, so that a hang fails the build.
LIMIT = 300
# Two builds would differ in them.
TIMES = re.compile(r", \d+\.\d s$", re.MULTILINE)


class Session:
    """A folder that is removed when the page is built, and a shell in it. What it prints is Markdown.

    What lies in its folder `site` is installed: it can be imported, and its entry points are found.
    """

    def __init__(self, *examples: str) -> None:
        self._kept = tempfile.TemporaryDirectory(prefix="refattn-")
        self.folder = Path(self._kept.name).resolve()
        self.take(*examples)

    def take(self, *examples: str, to: str = ".") -> None:
        """Copies files of docs/examples into the folder, or one inside it."""
        (self.folder / to).mkdir(exist_ok=True)
        for name in examples:
            shutil.copy(EXAMPLES / name, self.folder / to)

    def write(self, name: str, text: str) -> None:
        """Writes a file of the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def edit(self, name: str, before: str, after: str) -> None:
        """Replaces one place in a file of the folder."""
        text = (self.folder / name).read_text(encoding="utf-8")
        if text.count(before) != 1:
            raise ValueError(f"{name} has {text.count(before)} places {before!r}")
        self.write(name, text.replace(before, after))

    def show(self, name: str, language: str = "python") -> None:
        """Prints a file of the folder as a block of code."""
        print(f"```{language}", (self.folder / name).read_text(encoding="utf-8").rstrip(), "```", sep="\n")

    def run(self, *commands: str, code: int = 0, start: str = "", end: str = "", echo: bool = False) -> None:
        """Prints commands and what they print as a block of a console; the last must end with that exit code.

        start and end are how the first line shown, and the first that is no longer, begin. echo asks for the code too.
        """
        shown: list[str] = []
        for number, command in enumerate(commands, start=1):
            output, status = self.typed(command)
            expected = code if number == len(commands) else 0
            if status != expected:
                raise RuntimeError(f"{command} gave {status}, not {expected}:\n{output}")
            shown += [f"$ {command.replace(str(PACKAGE), 'refattn')}", *_between(output.splitlines(), start, end)]
        shown += ["$ echo $?", str(code)] if echo else []
        print("```console", *shown, "```", sep="\n")

    def typed(self, command: str) -> tuple[str, int]:
        """What a command prints, both streams together, and its exit code; a script may import what lies beside it."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        found = os.pathsep.join(filter(None, [str(self.folder / "site"), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env={**os.environ, "PATH": path, "PYTHONPATH": found, "PYTHONSAFEPATH": "", "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        text = TIMES.sub("", done.stdout.replace(f"{self.folder}/", "").replace(str(self.folder), "."))
        text = text.replace(f"{PACKAGE}/", "refattn/")
        return "\n".join(line.rstrip() for line in text.splitlines()), done.returncode


def _between(lines: list[str], start: str, end: str) -> list[str]:
    """The lines from one to another, with dots for what is left out."""
    first = next(i for i, line in enumerate(lines) if line.startswith(start)) if start else 0
    after = [i for i, line in enumerate(lines) if i > first and line.startswith(end)] if end else []
    last = after[0] if end else len(lines)
    kept = lines[first:last]
    while kept and not kept[-1]:
        kept.pop()
    return [*(["..."] if first else []), *kept, *(["..."] if last < len(lines) else [])]
