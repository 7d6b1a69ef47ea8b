"""What foreign code prints, or warns of, becomes a note: Python's standard output, and what native code writes to fd 1.

Only so does `refattn check --json -` stay valid JSON whatever the target does.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator

# Longest note of one kind.
NOTE = 200


@contextlib.contextmanager
def captured(notes: list[str]) -> Iterator[None]:
    """What is printed, or warned of, inside becomes a note."""
    printed, written = io.StringIO(), [""]
    try:
        with _descriptor(written), contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
    finally:
        if text := (printed.getvalue() + written[0]).strip():
            notes.append(f"printed: {text[:NOTE]}")
        notes.extend(sorted({f"warned: {warning.message}"[:NOTE] for warning in warned}))


@contextlib.contextmanager
def let_through(to_error: bool) -> Iterator[None]:
    """What is printed is shown as it comes; on standard error where standard output is reserved for JSON."""
    if not to_error:
        yield
        return
    with _moved(2), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _descriptor(written: list[str]) -> Iterator[None]:
    """Gathers what goes to file descriptor 1 past Python's standard output."""
    with tempfile.TemporaryFile() as file:
        try:
            with _moved(file.fileno()):
                yield
        finally:
            file.seek(0)
            written[0] = file.read(10 * NOTE).decode(errors="replace")


@contextlib.contextmanager
def _moved(target: int) -> Iterator[None]:
    """File descriptor 1 is another one inside; nothing happens where there is none."""
    flush()
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    try:
        os.dup2(target, 1)
        yield
    finally:
        flush()
        os.dup2(kept, 1)
        os.close(kept)


def flush() -> None:
    """Empties Python's buffer and those of the C library, so that each text goes where it was written to."""
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(Exception):
            if stream is not None:
                stream.flush()
    if C_LIBRARY is not None:
        C_LIBRARY.fflush(None)


def _c_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        library.fflush  # noqa: B018  # raises where there is none
    except (OSError, TypeError, AttributeError):
        return None
    return library


C_LIBRARY = _c_library()
