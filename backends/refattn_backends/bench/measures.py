"""The measurements: each runs in a process of its own and gives rows of the table."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import refattn
from refattn import KVCache, attend, attention, attention_vjp, golden
from refattn.arguments import check_call
from refattn_backends.bench.bursts import medians, peak_bytes
from refattn_backends.bench.rates import decode_floor, floor_of
from refattn_backends.bench.rows import Row
from refattn_backends.bench.sizes import Sizes
from refattn_backends.numpy_backward import gradients_from
from refattn_backends.numpy_tiles import tiled

MIB, GIB = 2**20, 2**30
HEADS, WIDTH = 8, 64
TORCH = "torch fused"


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    """Standard normal values, the same in every run."""
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=dtype)


def torch_or_reason() -> tuple[Any, str]:
    """PyTorch, or None and why not."""
    try:
        import torch
    except ImportError:
        return None, "torch is not installed"
    return torch, ""


def prefill(sizes: Sizes) -> list[Row]:
    """Tiled NumPy against torch's fused kernel and against the dense path, full and causal."""
    q, k, v = (normal(HEADS, sizes.prefill, WIDTH) for _ in range(3))
    torch, reason = torch_or_reason()
    tensors = [torch.from_numpy(x)[None] for x in (q, k, v)] if torch else []
    rows = []
    for causal, limit in ((False, 1.25), (True, 1.35)):
        work = f"prefill, {HEADS} heads, L {sizes.prefill}, d {WIDTH}, {'causal' if causal else 'full'}"
        ours = {"tiled": partial(attention, q, k, v, causal=causal, path="tiled")}
        dense = {"dense": partial(attention, q, k, v, causal=causal)}
        sides: dict[str, Callable[[], Any]] = dict(ours)
        if torch:
            sides[TORCH] = partial(torch.nn.functional.scaled_dot_product_attention, *tensors, is_causal=causal)
        took = {name: 1e3 * seconds for name, seconds in medians(sides, sizes.rounds).items()}
        slow = {name: 1e3 * seconds for name, seconds in medians(ours | dense, 1).items()}
        floor = floor_of(HEADS, sizes.prefill, WIDTH, causal, products=2, exponentials=1)
        same: dict[str, Any] = {"work": work, "unit": "ms", "floor": floor}
        theirs = took.get(TORCH)
        rows.append(Row(**same, ours=took["tiled"], peer=TORCH, theirs=theirs, limit=limit, goal=1.0, reason=reason))
        rows.append(Row(**same, ours=slow["tiled"], peer="dense NumPy", theirs=slow["dense"], limit=1.0, goal=0.5))
    return rows


def gradients(sizes: Sizes) -> list[Row]:
    """Tiled gradients on NumPy against torch's fused kernel: forward and backward, and backward alone."""
    q, k, v, g = (normal(HEADS, sizes.gradients, WIDTH) for _ in range(4))
    torch, reason = torch_or_reason()
    tensors = [torch.from_numpy(x)[None] for x in (q, k, v, g)] if torch else []
    rows = []
    for causal in (False, True):
        call = check_call(q, k, v, causal=causal)
        whole: dict[str, Callable[[], Any]] = {
            "tiled": partial(attention_vjp, q, k, v, g, causal=causal, path="tiled"),
        }
        alone: dict[str, Callable[[], Any]] = {"tiled": partial(gradients_from, call, g, tiled(call))}
        if torch:
            whole[TORCH], alone[TORCH] = torch_gradients(torch, tensors, causal)
        for name, sides, forward in (("forward and backward", whole, 1), ("backward", alone, 0)):
            took = {side: 1e3 * seconds for side, seconds in medians(sides, max(1, sizes.rounds // 2)).items()}
            work = f"{name}, {HEADS} heads, L {sizes.gradients}, d {WIDTH}, {'causal' if causal else 'full'}"
            floor = floor_of(HEADS, sizes.gradients, WIDTH, causal, products=5 + 2 * forward, exponentials=1 + forward)
            same: dict[str, Any] = {"work": work, "unit": "ms", "floor": floor, "peer": TORCH, "reason": reason}
            rows.append(Row(**same, ours=took["tiled"], theirs=took.get(TORCH), limit=1.5, goal=1.0))
    return rows


def torch_gradients(torch: Any, tensors: list[Any], causal: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What runs torch's forward and backward, and what runs backward alone."""
    arguments, g = [x.clone().requires_grad_() for x in tensors[:3]], tensors[3]
    fused = partial(torch.nn.functional.scaled_dot_product_attention, *arguments, is_causal=causal)
    output = fused()
    return (
        lambda: torch.autograd.grad(fused(), arguments, g),
        lambda: torch.autograd.grad(output, arguments, g, retain_graph=True),
    )


def decode(sizes: Sizes) -> list[Row]:
    """One query over many keys, 32 query and 8 key/value heads, as arrays and from a cache."""
    heads, kv_heads, width = 32, 8, 128
    q = normal(1, heads, 1, width)
    k, v = (normal(1, kv_heads, sizes.cached, width) for _ in range(2))
    took, reason = decode_times(q, k, v, sizes.rounds)
    work = f"decode, {heads}/{kv_heads} heads, {sizes.cached} keys, d {width}, "
    floor = decode_floor(k.nbytes + v.nbytes)
    rows = []
    for name, limit, goal in (("attention", 0.65, 0.5), ("attend", 0.4, 0.3)):
        theirs = 1e3 * took[TORCH] if TORCH in took else None
        same: dict[str, Any] = {"work": work + name, "unit": "ms", "floor": floor, "reason": reason}
        rows.append(Row(**same, ours=1e3 * took[name], peer=TORCH, theirs=theirs, limit=limit, goal=goal))
    return rows


def decode_times(q: Any, k: Any, v: Any, rounds: int) -> tuple[dict[str, float], str]:
    """Seconds of attention, attend and torch, and why torch is missing if it is."""
    torch, reason = torch_or_reason()
    cache = KVCache.allocate(k, *k.shape).append(k, v)
    sides: dict[str, Callable[[], Any]] = {
        "attention": lambda: attention(q, k, v, path="tiled"),
        "attend": lambda: attend(q, cache, path="tiled"),
    }
    if torch:
        tensors = [torch.from_numpy(x) for x in (q, k, v)]
        fused = torch.nn.functional.scaled_dot_product_attention
        sides[TORCH] = lambda: fused(*tensors, enable_gqa=True)
    return medians(sides, rounds), reason


def extra_memory(length: int, path: str) -> float:
    """MiB that full attention over HEADS heads takes beyond its inputs and output."""
    q, k, v = (normal(HEADS, length, WIDTH) for _ in range(3))
    attention(q[:, :32], k[:, :32], v[:, :32], path=path)  # what loading the path costs is not the length's
    before = peak_bytes()
    output = attention(q, k, v, path=path)
    return max(0, peak_bytes() - before - int(output.nbytes)) / MIB


def memory(sizes: Sizes) -> list[Row]:
    """Memory of tiled prefill beyond inputs and output."""
    work = f"memory of tiled prefill, L {sizes.long}, {HEADS} heads, beyond inputs and output"
    return [Row(work=work, unit="MiB", ours=extra_memory(sizes.long, "tiled"), limit=64, goal=64)]


def sampled_golden(sizes: Sizes) -> list[Row]:
    """Golden values of a few rows over very many keys."""
    q, k, v = (normal(sizes.golden, 64) for _ in range(3))
    rows = np.linspace(0, sizes.golden - 1, sizes.sampled).astype(int).tolist()
    start = time.perf_counter()
    golden(q, k, v, rows=rows, causal=True)
    took = time.perf_counter() - start
    work = f"golden values of {sizes.sampled} rows over {sizes.golden:,} keys, d 64"
    return [
        Row(work=f"{work}: time", unit="s", ours=took, limit=60, goal=60),
        Row(work=f"{work}: peak memory, inputs included", unit="GiB", ours=peak_bytes() / GIB, limit=2, goal=2),
    ]


def double_golden(sizes: Sizes) -> list[Row]:
    """Golden values in float64 against torch in double precision."""
    q, k, v = (normal(1, sizes.double, 64, dtype=np.float64) for _ in range(3))
    torch, reason = torch_or_reason()
    sides: dict[str, Callable[[], Any]] = {"golden": lambda: golden(q, k, v)}
    if torch:
        tensors = [torch.from_numpy(x) for x in (q, k, v)]
        sides["torch"] = lambda: torch.nn.functional.scaled_dot_product_attention(*tensors)
    took = medians(sides, 1)
    same: dict[str, Any] = {"work": f"float64 golden values, L {sizes.double}, d 64", "unit": "s", "reason": reason}
    return [Row(**same, ours=took["golden"], peer="torch double", theirs=took.get("torch"), limit=1.5, goal=1.5)]


def importing(_: Sizes) -> list[Row]:
    """`import refattn` in a fresh interpreter, and whether an array library came along."""
    script = (
        "import sys, time; start = time.perf_counter(); import refattn; took = time.perf_counter() - start; "
        "print(took, *sorted({'numpy', 'torch', 'jax', 'cupy', 'dask'} & set(sys.modules)))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True) for _ in range(5)
    ]
    words = [run.stdout.split() for run in runs]
    took = sorted(float(word[0]) for word in words)[len(words) // 2]
    loaded = " ".join(words[0][1:])
    reason = f"it loads {loaded}" if loaded else ""
    return [Row(work="import refattn", unit="s", ours=None if loaded else took, limit=0.15, goal=0.15, reason=reason)]


def small_call(_: Sizes) -> list[Row]:
    """The dense path where the checks are most of the work."""
    q, k, v = (normal(4, 16, 16) for _ in range(3))

    def hundred() -> None:
        for _ in range(100):
            attention(q, k, v)

    took = 1e4 * medians({"dense": hundred}, 5)["dense"]
    return [Row(work="small call, 4 heads x 16 x 16, dense on NumPy", unit="us", ours=took, limit=70, goal=70)]


def check(sizes: Sizes) -> list[Row]:
    """The whole conformance suite on NumPy."""
    quick = ["--quick", "--clauses", "S1"] if sizes.golden < 1000 else []
    command = [sys.executable, "-m", "refattn", "check", "numpy", "--json", "-", *quick]
    start = time.perf_counter()
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    took = time.perf_counter() - start
    reason = f"it ended with {code}" if code else ""
    return [Row(work="refattn check numpy", unit="s", ours=None if code else took, limit=30, goal=30, reason=reason)]


def torch_plugin(sizes: Sizes) -> list[Row]:
    """The torch plugin against the kernel that it calls."""
    torch, reason = torch_or_reason()
    work = f"torch plugin on the CPU, {HEADS} heads, L {sizes.prefill}, d {WIDTH}, causal"
    took: dict[str, Any] = {}
    if torch:
        q, k, v = (torch.from_numpy(normal(1, HEADS, sizes.prefill, WIDTH)) for _ in range(3))
        fused = torch.nn.functional.scaled_dot_product_attention
        sides = {
            "ours": lambda: attention(q, k, v, causal=True, path="tiled"),
            "theirs": lambda: fused(q, k, v, is_causal=True),
        }
        took = {name: 1e3 * seconds for name, seconds in medians(sides, sizes.rounds).items()}
    return [Row(work=work, unit="ms", peer=TORCH, limit=1.05, goal=1.05, reason=reason, **took)]


Measure = Callable[[Sizes], list[Row]]
MEASURES: dict[str, Measure] = {
    "prefill": prefill,
    "gradients": gradients,
    "decode": decode,
    "memory": memory,
    "sampled golden values": sampled_golden,
    "float64 golden values": double_golden,
    "import": importing,
    "small call": small_call,
    "conformance": check,
    "torch plugin": torch_plugin,
}


def versions() -> dict[str, str]:
    """What was measured, by version."""
    torch, _ = torch_or_reason()
    found = {
        "refattn": refattn.__version__,
        "numpy": np.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    return {**found, "torch": torch.__version__} if torch else found
