"""A small decoder language model with seeded weights, on any library, and its exact counterpart with error bounds.

Embedding, two blocks of attention (grouped heads, rotary positions, cache) and a two-layer network, each added to its
input, and a head. No normalisation: it would add nothing to what the cases ask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Api
from refattn.conformance.plain import Draw
from refattn.conformance.tracked import Arithmetic, Tracked, merge, split

WORDS, WIDTH, HEADS, KV_HEADS, BLOCKS = 24, 16, 4, 2, 2
HEAD_WIDTH = WIDTH // HEADS
STYLE = "half"
# Of the projections of queries, keys, values and heads, and of the two layers of the network.
GAINS = (1.0, 1.0, 0.5, 0.5, 0.5, 0.5)


class Block(NamedTuple):
    """Host weights of one block, used as x @ w."""

    w_q: Array
    w_k: Array
    w_v: Array
    w_o: Array
    w_in: Array
    w_out: Array


class Decoder:
    """The model; tokens are host integers (batch, S)."""

    def __init__(self, draw: Draw) -> None:
        shared, wide = KV_HEADS * HEAD_WIDTH, 2 * WIDTH
        shapes = ((WIDTH, WIDTH), (WIDTH, shared), (WIDTH, shared), (WIDTH, WIDTH), (WIDTH, wide), (wide, WIDTH))
        self.dtype = draw.dtype
        self.embedding = draw.normal(WORDS, WIDTH)
        # Small gains keep the worst-case bound far below the effect of a wrong position.
        self.blocks = [
            Block(
                *(
                    draw.normal(*shape, spread=gain * shape[0] ** -0.5)
                    for shape, gain in zip(shapes, GAINS, strict=True)
                )
            )
            for _ in range(BLOCKS)
        ]
        self.head = draw.normal(WIDTH, WORDS, spread=WIDTH**-0.5)

    def caches(self, api: Api, batch: int, *room: int, kind: str = "KVCache") -> list[Any]:
        """One empty cache per block; room is its capacity, its pages and page size, or its window."""
        import refattn

        like = api.array(np.zeros(1))
        return [getattr(refattn, kind).allocate(like, batch, KV_HEADS, *room, HEAD_WIDTH) for _ in self.blocks]

    def logits(self, api: Api, tokens: Array, caches: list[Any] | None = None, drift: int = 0) -> Array:
        """Logits (batch, S, WORDS) on the host. With caches the tokens continue them, and the list is updated.

        drift moves the positions that tokens are rotated to: a fault that some cases plant on purpose.
        """
        from refattn import AttentionWeights, Rotary, multi_head_attention

        x = api.array(self.embedding[tokens])
        for number, block in enumerate(self.blocks):
            w_q, w_k, w_v, w_o, w_in, w_out = (api.array(w) for w in block)
            options: dict[str, Any] = {"causal": True}
            if caches is not None:
                options["cache"] = caches[number]
                if drift:
                    options["positions"] = api.array(np.arange(tokens.shape[1]) + caches[number].length + drift)
            attended = multi_head_attention(
                x,
                AttentionWeights(w_q, w_k, w_v, w_o),
                heads=HEADS,
                kv_heads=KV_HEADS,
                rope=Rotary(STYLE),
                **options,
            )
            if caches is not None:
                caches[number] = attended.cache
            x = x + attended.output
            hidden = x @ w_in
            x = x + ((hidden + abs(hidden)) * 0.5) @ w_out
        return api.host(x @ api.array(self.head))

    def exact(self, tokens: Array, window: int | None = None) -> Tracked:
        """The same logits in one full pass without cache, exactly, with their error bounds.

        Of a model whose tokens see no more than `window` tokens, if that is given.
        """
        at = Arithmetic(self.dtype)
        x, where = at.exact(self.embedding[tokens]), np.arange(tokens.shape[1])
        visible = where[None, :] <= where[:, None]
        if window is not None:
            visible &= where[None, :] > where[:, None] - window
        for block in self.blocks:
            q = at.rope(split(at.linear(x, block.w_q), HEADS), where, STYLE)
            k = at.rope(split(at.linear(x, block.w_k), KV_HEADS), where, STYLE)
            v = split(at.linear(x, block.w_v), KV_HEADS)
            attended, _ = at.attention(q, k, v, visible)
            x = at.add(x, at.linear(merge(attended), block.w_o))
            x = at.add(x, at.linear(at.relu(at.linear(x, block.w_in)), block.w_out))
        return at.linear(x, self.head)
