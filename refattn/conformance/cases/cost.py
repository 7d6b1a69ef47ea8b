"""Chapter C: the cost model's figures."""

from __future__ import annotations

from refattn import cost
from refattn.conformance.case import Api, Chapter
from refattn.conformance.expect import expect, expect_equal, expect_error
from refattn.errors import CostError

CASES = Chapter("cost")


@CASES.check("C1")
def pairs(_api: Api) -> None:
    """4096 x 4096 are 16,777,216 weights, 32 MiB in float16, 1 GiB for 32 heads."""
    one = cost.attention_cost(4096, 4096, heads=1, d_k=64, dtype="float16")
    many = cost.attention_cost(4096, 4096, heads=32, d_k=64, dtype="float16")
    expect_equal("weights of a head", one.weights_per_head, 16_777_216)
    expect_equal("bytes of a head", one.weights_per_head_bytes, 32 * 2**20)
    expect_equal("bytes of 32 heads", many.weights_bytes, 2**30)


@CASES.check("C2")
def work(_api: Api) -> None:
    """Scores and weighted sum take 2 n^2 (d_k + d_v) operations per head: twice the length, four times the work."""
    short, long = (cost.attention_cost(n, n, heads=3, d_k=64, d_v=32) for n in (512, 1024))
    expect_equal("operations", short.score_flops + short.value_flops, 3 * 2 * 512 * 512 * 96)
    expect_equal("ratio", long.score_flops + long.value_flops, 4 * (short.score_flops + short.value_flops))


@CASES.check("C3")
def cache_size(_api: Api) -> None:
    """A cache holds 2 B S Hkv d_h elements per layer: 8, 2 and 1 key/value heads compare as 8:2:1."""
    sizes = [cost.kv_cache_elements(2, 1000, kv_heads, 64) for kv_heads in (8, 2, 1)]
    expect_equal("elements of one head", sizes[2], 2 * 2 * 1000 * 64)
    expect_equal("ratios", [size // sizes[2] for size in sizes], [8, 2, 1])


@CASES.check("C4")
def alternatives(_api: Api) -> None:
    """Beside attention stand recurrence, convolution and local attention, with work, path length and state."""
    rows = {one.method.split(",")[0]: one for one in cost.alternatives(1000, 64, kernel=5, window=100)}
    for word in ("full attention", "recurrent", "convolution", "local attention"):
        expect(word in rows, f"the alternatives are {[*rows]}, expected {word!r} among them")
    expect_equal("path of attention", rows["full attention"].path, 1)
    expect_equal("path of a recurrence", rows["recurrent"].path, 999)
    expect_equal("work of a recurrence", rows["recurrent"].work, 1000 * 64 * 64)
    expect_equal("state of a recurrence", rows["recurrent"].state, 64)


@CASES.check("C1", "E1")
def sizes_that_are_refused(_api: Api) -> None:
    """Sizes are whole numbers of at least 0, heads a multiple of kv_heads, dtypes known."""
    for size in (-1, 1.5, "8", True):
        expect_error(CostError, "q_len", cost.attention_cost, size, 4, heads=1, d_k=8)
    expect_error(CostError, "kv_heads", cost.attention_cost, 4, 4, heads=6, kv_heads=4, d_k=8)
    expect_error(CostError, "dtype", cost.attention_cost, 4, 4, heads=1, d_k=8, dtype="int7")
