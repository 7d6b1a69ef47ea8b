"""What cannot be written: a whole file or none, one sentence, and an exit code that is meant."""

import contextlib
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from refattn import cli
from refattn.whole_files import write_arrays, write_whole

FAULT = "planted_faults:causal_shows_the_next"


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_archive_holds_arrays_alone(tmp_path: Path) -> None:
    """It is what numpy.load reads without pickle; objects are refused, and leave nothing."""
    path = tmp_path / "some.npz"
    write_arrays(path, {"q": np.eye(2), "file": 3})
    with np.load(path, allow_pickle=False) as found:
        assert np.array_equal(found["q"], np.eye(2)) and found["file"] == 3
    with pytest.raises(ValueError, match=r"[Oo]bject"):
        write_arrays(tmp_path / "other.npz", {"q": np.asarray([object()])})
    assert names_in(tmp_path) == ["some.npz"]


def test_half_a_file_is_none(tmp_path: Path) -> None:
    """A file whose writing ends early, in whatever way, stays as it was, and nothing lies beside it."""
    path = tmp_path / "report"

    def half(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    for old in (None, b"old"):
        if old is not None:
            path.write_bytes(old)
        with pytest.raises(KeyboardInterrupt):
            write_whole(path, half)
        with room_for(1), pytest.raises(OSError, match="File too large") as fault:
            write_whole(path, b"new" * 1000)
        assert fault.value.filename == str(path)
        assert names_in(tmp_path) == ([] if old is None else ["report"])
    assert path.read_bytes() == b"old"


def test_an_old_file_keeps_its_permissions(tmp_path: Path) -> None:
    """What others could not read before, they cannot read now; threads that write at once leave one whole file."""
    path = tmp_path / "report"
    path.write_text("old")
    path.chmod(0o600)
    threads = [threading.Thread(target=write_whole, args=(path, bytes([65 + n]) * 100_000)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(path.read_bytes()) == 100_000 and len(set(path.read_bytes())) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names_in(tmp_path) == ["report"]


def test_a_full_disk_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command says in one sentence which file it could not write, with exit code 2, and leaves no part of it."""
    dump, out = tmp_path / "dump.npz", tmp_path / "out"
    rng = np.random.default_rng(0)
    tensors: Any = {name: rng.standard_normal((1, 6, 4)) for name in "qkv"}
    np.savez(dump, **tensors)
    out.mkdir()
    for command, named in [
        (["vectors", "export", str(out), "--clause", "B2", "--format", "npz"], ".npz"),
        (["cases", "export", str(out / "new"), "--dtype", "float32", "--clauses", "S1"], "case.json"),
        (["plot", str(dump), "--svg", str(out / "x.svg")], "x.svg"),
        (["check", "numpy", "--quick", "--case", "scores.*", "--save-inputs", str(out / "x.npz")], "x.npz"),
    ]:
        with room_for(200):
            assert cli.main(command) == 2, command
        said = capsys.readouterr().err
        assert str(out) in said and named in said and "cannot be written: File too large" in said
        assert said.count("\n") == 1
        assert names_in(out) == []


def test_failures_that_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdicts are told all the same, and the exit code is 2; no inputs lie without what came of them."""
    folder = tmp_path / "failures"
    with room_for(3000):
        assert (
            cli.main(
                ["check", FAULT, "--in-process", "--quick", "--case", "masks.causal*", "--save-failures", str(folder)]
            )
            == 2
        )
    said = capsys.readouterr()
    assert "does not conform" in said.out
    assert f"--save-failures: {folder}" in said.err and "cannot be written: File too large" in said.err
    assert not [name for name in names_in(folder) if name.endswith(".part")]


def test_numbers_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    """A negative seed, and a picture that no memory holds, are one sentence and exit code 2, not the 1 of a verdict."""
    assert cli.main(["check", "numpy", "--quick", "--clauses", "S1", "--seed", "-1"]) == 2
    assert "--seed: must be 0 or more, it is -1" in capsys.readouterr().err
    for length, words in ((10**17, "refattn: q_len: expected an int"), (2**23, "refattn: not enough memory")):
        assert cli.main(["plot", "--causal", "--q-len", str(length), "--svg", "-"]) == 2
        assert words in capsys.readouterr().err


def test_a_place_is_looked_at_before_a_card_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`refattn probe` refuses a place that cannot be written, or none at all, before it asks anything."""
    for option in ("--json", "--save-profile"):
        assert cli.main(["probe", "planted_faults:never_called", option, str(tmp_path / "none" / "card.json")]) == 2
        assert f"{option}: {tmp_path}" in capsys.readouterr().err
        assert cli.main(["probe", "planted_faults:never_called", option, ""]) == 2
        assert "got nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["vectors", "export", ""],
        ["cases", "export", ""],
        ["compare", ""],
        ["plot", "", "--svg", "-"],
        ["check", "numpy", "--save-failures", ""],
        ["check", "numpy", "--inputs", ""],
        ["check", "numpy", "--case", "scores.*", "--save-inputs", ""],
        ["check", "numpy", "--case", "scores.*", "--save-inputs", "name"],
        ["check", "numpy", "--json", ""],
    ],
)
def test_an_empty_word_is_no_path(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of the shell that is not set writes nothing into the current folder, nor under another name."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert "got n" in capsys.readouterr().err
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("example > /dev/full", 2, "refattn: standard output cannot be written: No space left on device\n"),
        ("example >&-", 0, ""),
        ("example 0<&- >&- 2>&-", 0, ""),
        ("clauses M --json > /dev/full 2> /dev/full", 2, ""),
        ("check > /dev/full 2> /dev/full", 2, ""),
        ("plot --window 1,0 --q-len 3 --svg - >&-", 2, "refattn plot: --svg: standard output is closed\n"),
    ],
)
def test_streams_that_are_full_or_closed(command: str, code: int, words: str) -> None:
    """A full one is exit code 2, never the 1 of a verdict; a closed one is what whoever closed it wanted."""
    line = f'"{sys.executable}" -m refattn {command}'
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (code, words)


def test_who_reads_the_old_file_reads_on(tmp_path: Path) -> None:
    """A file is put in its place, and not written over: whoever has the old one open still reads all of it."""
    place = tmp_path / "report.json"
    place.write_bytes(b"old")
    with place.open("rb") as old:
        write_whole(place, b"another")
        assert old.read() == b"old"
    assert place.read_bytes() == b"another"
