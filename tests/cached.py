"""Tokens that go into a cache step by step, and what attention over all of them gives, within the bound."""

from __future__ import annotations

from typing import Any

import numpy as np

import refattn
from libraries import Library

BATCH, HEADS, KV_HEADS, D_K, D_V = 2, 4, 2, 4, 3


class Tokens:
    """Queries, keys and values of two entries, of which each has appended the first `done[entry]`."""

    def __init__(self, library: Library, count: int) -> None:
        rng = np.random.default_rng(count)
        self.library = library
        self.slow = library.slow  # checked at the end alone
        self.q = rng.standard_normal((BATCH, HEADS, count, D_K))
        self.k = rng.standard_normal((BATCH, KV_HEADS, count, D_K))
        self.v = rng.standard_normal((BATCH, KV_HEADS, count, D_V))
        self.done = [0, 0]

    def twin(self) -> Tokens:
        """The same tokens over again."""
        other = Tokens(self.library, self.q.shape[2])
        other.k, other.v, other.done = self.k.copy(), self.v.copy(), [*self.done]
        return other

    def append(self, cache: Any, counts: tuple[int, int], given: str = "list", poison: float = np.nan) -> Any:
        """The cache with the next tokens of each entry, poison filling the shorter; counts a list or an array."""
        new = max(counts)
        fresh = [np.full((BATCH, KV_HEADS, new, width), poison) for width in (D_K, D_V)]
        for entry, count in enumerate(counts):
            for x, whole in zip(fresh, (self.k, self.v), strict=True):
                x[entry, :, :count] = whole[entry, :, self.done[entry] : self.done[entry] + count]
        self.done = [done + count for done, count in zip(self.done, counts, strict=True)]
        k, v = (self.library.array(x) for x in fresh)
        if given == "none":
            return cache.append(k, v)
        return cache.append(k, v, counts=self.library.array(np.asarray(counts)) if given == "array" else list(counts))

    def newest(self, q_len: int) -> np.ndarray:
        """The newest q_len queries of each entry."""
        parts = [self.q[entry, :, done - q_len : done] for entry, done in enumerate(self.done)]
        return np.stack(parts)

    def check(self, cache: Any, q_len: int = 1, **options: Any) -> None:
        """attend gives each entry what attention over all its keys gives, within the bound."""
        q = self.newest(q_len)
        window = {} if not hasattr(cache, "window") else {"mask": refattn.masks.window(cache.window - 1, 0)}
        output = self.library.host(refattn.attend(self.library.array(q), cache, **options))
        options.pop("path", None)
        for entry, done in enumerate(self.done):
            seen = {"causal": True, "q_start": done - q_len, **window, **options}
            golden = refattn.golden(q[entry], self.k[entry, :, :done], self.v[entry, :, :done], **seen)
            error = np.abs(output[entry] - golden.output)
            assert (error <= golden.bound("float64")).all(), (entry, self.done, error.max())
