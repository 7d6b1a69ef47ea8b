"""Chapters G, T, K and M: many keys, in splits, tiles, pages and masks of more elements than 32 bits count."""

from __future__ import annotations

import numpy as np

from refattn import PagedKVCache, attend, masks
from refattn.arrays import Array
from refattn.conformance.case import Api, Chapter, Problem
from refattn.conformance.expect import expect, expect_equal, expect_within
from refattn.conformance.judge import golden_of
from refattn.conformance.plain import Draw

CASES = Chapter("long_rows")


def _ranges(k_len: int, kv_heads: int, size: int) -> Array:
    """Values (1, Hkv, Lk, n): key j shows in column j // size, as a number that depends on the head."""
    columns = np.arange(k_len)[:, None] // size == np.arange(-(-k_len // size))
    return columns[None, None] * (1.0 + np.arange(kv_heads))[:, None, None]


def _decode_over(k_len: int) -> None:
    def build(draw: Draw) -> Problem:
        data = draw.qkv(1, k_len, batch=(1,), heads=32, kv_heads=2)
        data["q"], data["v"] = np.zeros_like(data["q"]), _ranges(k_len, 2, 64)
        return Problem(**data, coherent=True)

    build.__name__ = f"decode_over_{k_len}_keys"
    build.__doc__ = (
        f"One query, 16 heads over each of 2, reads each of {k_len} keys once, the last of each split included."
    )
    CASES.problem("G1", "T1")(build)


for _k_len in (1023, 1024, 1025):
    _decode_over(_k_len)


@CASES.problem("T1", "P6")
def last_tiles_hidden(draw: Draw) -> Problem:
    """The last 128 keys are hidden and all logits are far below zero, for kernels that go from right to left."""
    data = draw.qkv(2, 160, batch=(1,), d_k=4)
    data["q"], data["k"] = np.full_like(data["q"], -7.0), np.full_like(data["k"], 8.0)
    data["k"][..., 0] += np.arange(160) % 4
    data["v"] = np.broadcast_to(np.arange(1.0, 5.0), data["v"].shape)
    return Problem(**data, shown=np.broadcast_to(np.arange(160) < 32, (2, 160)), coherent=True)


@CASES.problem("T1", "M4")
def causal_last_tiles(draw: Draw) -> Problem:
    """Causal rows at the end of 130 keys, all logits near -120: the first rows see nothing of the last tile."""
    data = draw.qkv(4, 130, batch=(1,), heads=1, d_k=2, d_v=4)
    data["q"], data["k"] = np.ones_like(data["q"]), np.full_like(data["k"], -60.0)
    data["k"][..., 0] -= np.arange(130) % 4
    data["v"] = np.broadcast_to(np.arange(1.0, 5.0), data["v"].shape)
    return Problem(**data, causal=True, scale=1.0, q_start=126, coherent=True)


@CASES.check("K8", "G1")
def long_tables_of_pages(api: Api) -> None:
    """4200 positions in pages of 64 and 256, in reverse order in the pool, 16 heads over one: all of them are read."""
    data = api.draw.qkv(1, 4200, batch=(1,), heads=16, kv_heads=1)
    data["q"], data["v"] = np.zeros_like(data["q"]), _ranges(4200, 1, 300)
    exact = golden_of(Problem(**data, coherent=True))
    for size in (64, 256):
        count = -(-4200 // size)
        pools = [_pool(data[name][0], size, count) for name in ("k", "v")]
        keys, values = (api.array(pool) for pool in pools)
        cache = PagedKVCache(keys, values, [[*range(count - 1, -1, -1)]], 4200)
        output = api.host(attend(api.array(data["q"]), cache))
        expect_within(f"output over pages of {size}", output, exact.output, exact.bound(api.dtype, coherent=True))


@CASES.check("M12", "M14")
def a_mask_beyond_32_bits(_api: Api) -> None:
    """A mask of 46342 x 46342 pairs, more than 2^31, answers for its last rows as for its first: here by diagonals."""
    size = 46342
    diagonals = np.random.default_rng(0).random(2 * size - 1) < 0.5
    # Row i is diagonals[size - 1 - i :], so that the whole takes no more memory than they do.
    array = np.lib.stride_tricks.as_strided(diagonals[size - 1 :], (size, size), (-1, 1), writeable=False)
    mask = masks.dense(array)
    for row in (0, 23170, 46339, 46340, 46341):
        for key in (0, 1, 23171, 46340, 46341):
            expected = "all" if diagonals[size - 1 - row + key] else "none"
            answer = mask.tile(range(row, row + 1), range(key, key + 1))
            expect(answer in (expected, "mixed"), f"the pair of row {row} and key {key} is {answer}, not {expected}")
    block = range(size - 8, size)
    expect_equal("tile of the last rows and keys", mask.tile(block, block), "mixed")


def _pool(x: Array, size: int, count: int) -> Array:
    """(Hkv, L, d) as pages (count, size, Hkv, d), the last positions on the first page, unused slots NaN."""
    padded = np.full((count * size, *x[:, 0].shape), np.nan)
    padded[: x.shape[1]] = np.moveaxis(x, 0, 1)
    return padded.reshape(count, size, *x[:, 0].shape)[::-1]
