"""Checks and times the CUDA paths: `python3 -m refattn_backends.gpu`, in less than five minutes.

Needs NumPy, array-api-compat and the libraries it is to run, torch or CuPy or both; refattn may be installed, or merely
found on the path (PYTHONPATH=.:backends in a checkout). Where no device answers, it says so in one sentence.

Each library: the conformance suite on the first device in float32, dense and tiled, within a time limit; then prefill
and decode, tiled, beside the peers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from refattn import KVCache, attend, attention

LIMIT = 50  # seconds of one conformance run, of which there are four
TIMED_LIMIT = 40  # seconds of the timings of one library
HEADS, LENGTH, WIDTH = 8, 4096, 64
CACHED = (32, 8, 32768, 128)  # query heads, key/value heads, keys, width
CALLS = 10


def main() -> int:
    """Runs everything there is a device for: 0 if all conforms or nothing can run, else 1."""
    found = {name: reason() for name, reason in (("cupy", without_cupy), ("torch", without_torch))}
    for name, reason in found.items():
        if reason:
            print(f"{name}: skipped, because {reason}.")
    failed = 0
    with published() as environment:
        for name in (name for name, reason in found.items() if not reason):
            for target in (name, f"{name}-tiled"):
                line, conforms = checked(target, environment)
                failed += not conforms
                print(f"{target}: {line}", flush=True)
            failed += not timed(name, environment)
    return int(bool(failed))


def without_torch() -> str:
    """Why torch cannot run on a CUDA device here; nothing if it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def without_cupy() -> str:
    """Why CuPy cannot run on a CUDA device here; nothing if it can."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    with suppress(cupy.cuda.runtime.CUDARuntimeError):
        return "" if cupy.cuda.runtime.getDeviceCount() else "CuPy finds no CUDA device"
    return "CuPy finds no CUDA driver or device"


@contextmanager
def published() -> Iterator[dict[str, str]]:
    """An environment in which the plugins are known: the given one, or in a checkout with their entry points."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if not entry_points(group="refattn.backends"):
            root = Path(__file__).parents[2]
            write_metadata(root / "pyproject.toml", Path(folder))
            paths = [folder, str(root), str(root / "backends"), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        yield environment


def write_metadata(pyproject: Path, folder: Path) -> None:
    """What an installer would write of a project's name, version and entry points."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    target = folder / f"{project['name']}-{project['version']}.dist-info"
    target.mkdir()
    (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group in ("refattn.backends", "refattn.paths"):
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in project["entry-points"][group].items())]
    (target / "entry_points.txt").write_text("\n".join(lines) + "\n")


def checked(target: str, environment: dict[str, str], *more: str) -> tuple[str, bool]:
    """The verdict of `refattn check` in words, and whether the target conforms."""
    command = [sys.executable, "-m", "refattn_backends.gpu_check", target, "--quick", "--json", "-", *more]
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            check=False,
            text=True,
            env=environment,
            timeout=LIMIT,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"no verdict within {LIMIT} s", False
    if not run.stdout.strip():
        return f"the check failed: {(run.stderr.strip().splitlines() or ['it says nothing'])[-1]}", False
    report = json.loads(run.stdout)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report["counts"].items() if count)
    broken = [one["case"] for one in report["records"] if one["verdict"] in ("fail", "crashed")]
    first = f"; first: {broken[0]}" if broken else ""
    conforms = bool(report["conforms"])
    return f"{'conforms' if conforms else 'does not conform'} ({counts}){first}, {report['seconds']:.0f} s", conforms


def timed(name: str, environment: dict[str, str]) -> bool:
    """Prints the times of one library, taken in a process of its own; whether that ended well and in time."""
    command = [sys.executable, "-m", "refattn_backends.gpu", name]
    try:
        return subprocess.run(command, env=environment, check=False, timeout=TIMED_LIMIT).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{name}: the timings took more than {TIMED_LIMIT} s and were stopped")
        return False


def times(name: str) -> Iterator[str]:
    """Prefill, full and causal, and decode, in float16 and float32, a line of text each."""
    library = _cupy_side() if name == "cupy" else _torch_side()
    for dtype in ("float16", "float32"):
        q, k, v = (library.normal((1, HEADS, LENGTH, WIDTH), dtype) for _ in range(3))
        for causal in (False, True):
            sides: dict[str, Callable[[], Any]] = {
                "tiled": partial(attention, q, k, v, causal=causal, path="tiled"),
                "dense": partial(attention, q, k, v, causal=causal),
                **library.peer(q, k, v, causal),
            }
            work = f"prefill, {HEADS} heads, L {LENGTH}, d {WIDTH}, {'causal' if causal else 'full'}"
            yield _line(name, f"{work}, {dtype}", library.medians(sides))
        heads, kv_heads, length, width = CACHED
        q = library.normal((1, heads, 1, width), dtype)
        k, v = (library.normal((1, kv_heads, length, width), dtype) for _ in range(2))
        cache = KVCache.allocate(k, *k.shape).append(k, v)
        sides = {
            "attention": partial(attention, q, k, v, path="tiled"),
            "attend": partial(attend, q, cache, path="tiled"),
            **library.peer(q, k, v, False),
        }
        work = f"decode, {heads}/{kv_heads} heads, {length} keys, d {width}, {dtype}"
        yield _line(name, work, library.medians(sides))


class _Side:
    """One library on its first CUDA device: drawing, its peer, and waiting for the device."""

    def normal(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Standard normal values on the device."""
        raise NotImplementedError

    def peer(self, q: Any, k: Any, v: Any, causal: bool) -> dict[str, Callable[[], Any]]:
        """What others compute of the same."""
        raise NotImplementedError

    def wait(self) -> None:
        """Returns when the device has nothing left to do."""
        raise NotImplementedError

    def medians(self, sides: dict[str, Callable[[], Any]]) -> dict[str, float | str]:
        """Milliseconds of each side, in interleaved bursts; what it raised where it fails."""
        from time import perf_counter

        taken: dict[str, list[float]] = {name: [] for name in sides}
        faults: dict[str, float | str] = {}
        for _ in range(3):
            for name, function in sides.items():
                if name in faults:
                    continue
                try:
                    function()
                    self.wait()
                    for _ in range(CALLS):
                        start = perf_counter()
                        function()
                        self.wait()
                        taken[name].append(1e3 * (perf_counter() - start))
                except Exception as fault:  # noqa: BLE001  # one side's failure is one entry of the line
                    faults[name] = f"{type(fault).__name__}"
        return {name: faults.get(name, statistics.median(values or [0.0])) for name, values in taken.items()}


def _torch_side() -> _Side:
    import torch

    class Torch(_Side):
        def normal(self, shape: tuple[int, ...], dtype: str) -> Any:
            return torch.randn(shape, dtype=getattr(torch, dtype), device="cuda")

        def peer(self, q: Any, k: Any, v: Any, causal: bool) -> dict[str, Callable[[], Any]]:
            fused, grouped = torch.nn.functional.scaled_dot_product_attention, q.shape[1] != k.shape[1]
            return {"torch fused": lambda: fused(q, k, v, is_causal=causal, enable_gqa=grouped)}

        def wait(self) -> None:
            torch.cuda.synchronize()

    return Torch()


def _cupy_side() -> _Side:
    import cupy

    class Cupy(_Side):
        def normal(self, shape: tuple[int, ...], dtype: str) -> Any:
            return cupy.random.standard_normal(shape, dtype=cupy.float32).astype(dtype)

        def peer(self, q: Any, k: Any, v: Any, causal: bool) -> dict[str, Callable[[], Any]]:
            return {}

        def wait(self) -> None:
            cupy.cuda.get_current_stream().synchronize()

    return Cupy()


def _line(name: str, work: str, took: dict[str, float | str]) -> str:
    sides = (f"{side} {value if isinstance(value, str) else f'{value:.3f} ms'}" for side, value in took.items())
    return f"{name}: {work}: {', '.join(sides)}"


if __name__ == "__main__":
    if sys.argv[1:]:
        for line in times(sys.argv[1]):
            print(line, flush=True)
        sys.exit()
    sys.exit(main())
