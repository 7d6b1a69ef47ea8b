"""The layer as a module of PyTorch: what it returns, where its parameters come from, and that it learns."""

import torch

from refattn import KVCache, Rotary
from refattn_backends.torch_layer import MultiHeadAttention

torch.manual_seed(7)

# 2 x 10 tokens of width 64, 4 heads
layer = MultiHeadAttention(64, heads=4, causal=True)
x = torch.randn(2, 10, 64)
y, weights = layer(x)
assert y.shape == (2, 10, 64) and weights.shape == (2, 4, 10, 10)
assert torch.allclose(weights.sum(dim=-1), torch.ones(2, 4, 10))
assert weights[..., 0, 1:].count_nonzero() == 0

# the parameters of torch.nn.MultiheadAttention, whose causal mask has to be spelled out
theirs = torch.nn.MultiheadAttention(64, 4, batch_first=True)
ours = MultiHeadAttention.from_torch(theirs, causal=True)
later = torch.ones(10, 10, dtype=torch.bool).triu(1)
assert torch.allclose(ours(x)[0], theirs(x, x, x, attn_mask=later)[0], atol=1e-5)

# fewer key/value heads, rotary positions, and a cache: prompt of six tokens, then one by one
layer = MultiHeadAttention(64, heads=4, rope=Rotary("half"), causal=True).pooled(kv_heads=2)
with torch.no_grad():
    whole = layer(x)[0]
    cache = KVCache.allocate(x, batch=2, kv_heads=2, capacity=10, d_k=layer.d_k)
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9), (9, 10)):
        y, weights, cache = layer(x[:, start:stop], cache=cache)
        assert torch.allclose(y, whole[:, start:stop], atol=1e-5)

# one head that learns to find the marked token: the last one asks, and is answered with the value of the marked one
finder = MultiHeadAttention(6, heads=1, d_k=8, d_v=8, out_width=4, causal=True)
optimizer = torch.optim.Adam(finder.parameters(), lr=0.03)
for _ in range(200):
    at = torch.randint(0, 9, (64,))
    x = torch.cat([torch.randn(64, 10, 4), torch.zeros(64, 10, 2)], dim=-1)
    x[torch.arange(64), at, 4] = 1.0  # marked
    x[:, -1, 5] = 1.0  # asks
    answer, weights = finder(x)
    loss = torch.nn.functional.mse_loss(answer[:, -1], x[torch.arange(64), at, :4])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}, weight on the marked token {weights[torch.arange(64), 0, -1, at].mean().item():.2f}")
assert loss < 0.1
