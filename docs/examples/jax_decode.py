"""A decode step under jax.jit: it takes and returns the arrays of a cache, and is compiled once for each chunk size."""

import jax
import jax.numpy as jnp

from refattn import AttentionWeights, KVCache, Rotary, multi_head_attention

WIDTH, HEADS, KV_HEADS, TOKENS = 32, 4, 2, 10
D = WIDTH // HEADS
shapes = ((WIDTH, HEADS * D), (WIDTH, KV_HEADS * D), (WIDTH, KV_HEADS * D), (HEADS * D, WIDTH))
*keys, last = jax.random.split(jax.random.key(7), 5)
weights = AttentionWeights(*(jax.random.normal(key, shape) / 6 for key, shape in zip(keys, shapes, strict=True)))
x = jax.random.normal(last, (2, TOKENS, WIDTH))
layer = {"heads": HEADS, "kv_heads": KV_HEADS, "rope": Rotary("half")}  # no arrays: fixed when the step is traced


@jax.jit
def step(x, weights, k, v, length):
    """Output for the next tokens x (batch, S, WIDTH), and the cache's buffers and length with them."""
    output, _, cache = multi_head_attention(x, weights, cache=KVCache(k, v, length), **layer)
    return output, (cache.k, cache.v, cache.length)


empty = KVCache.allocate(x, batch=2, kv_heads=KV_HEADS, capacity=TOKENS, d_k=D)
state = (empty.k, empty.v, jnp.asarray(0))
parts = []
for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9), (9, 10)):  # a prompt of six tokens, then one by one
    output, state = step(x[:, start:stop], weights, *state)
    parts.append(output)
whole = multi_head_attention(x, weights, causal=True, **layer).output
apart = float(jnp.abs(jnp.concatenate(parts, axis=1) - whole).max())
print(f"largest difference from one pass {apart:.0e}")
assert apart < 1e-5
