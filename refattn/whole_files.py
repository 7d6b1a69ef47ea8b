"""Files that are written as a whole or not at all: beside their place first, and then put there."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO


def write_whole(path: Path, content: bytes | Callable[[BinaryIO], object], *, synced: bool = False) -> None:
    """Puts bytes, or what a function writes, in the place of path, so that no reader ever sees half of it.

    An old file's permissions stay; what is no ordinary file, such as a pipe, is written to directly. synced waits until
    the device has it, a few milliseconds. Raises OSError, which names path, and then leaves it as it was.
    """
    try:
        _write(path.resolve(), content, synced)
    except OSError as fault:
        fault.filename, fault.filename2 = str(path), None
        raise


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes NumPy's arrays, or numbers, as numpy.savez does. Raises OSError, as `write_whole`.

    Where the disk is full, savez of NumPy 2.0 leaves an archive open, which then complains on standard error.
    """
    import numpy as np

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, x in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.asarray(x), allow_pickle=False)

    write_whole(path, write)


def check_writable(path: Path) -> None:
    """Raises OSError, with the reason, where a file could not be written now."""
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError("it is a folder; name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError("it may not be written to")
    if path.is_file() or not path.exists():
        beside = _beside(path)
        try:
            beside.touch()
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)


def _write(path: Path, content: bytes | Callable[[BinaryIO], object], synced: bool) -> None:
    if path.exists() and not path.is_file():
        if not isinstance(content, bytes):  # a pipe has no place to go back to
            memory = io.BytesIO()
            content(memory)
            content = memory.getvalue()
        path.write_bytes(content)
        return
    beside = _beside(path)
    try:
        with beside.open("xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """A name that nobody else has, of no more bytes than every file system takes."""
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}.part")
