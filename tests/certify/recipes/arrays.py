"""Chapter A: shapes, ranks, batch axes, dtypes, sizes of zero."""

from __future__ import annotations

from certify.call import BASE, ONCE, Book, Call, plain
from certify.draw import Draw

BOOK = Book("A")


@BOOK.recipe("A1")
def more_keys_than_queries(draw: Draw) -> Call:
    """Lq and Lk differ, and so do d_k and d_v."""
    return Call(**draw.qkv(2, 7, d_v=5))


@BOOK.recipe("A1")
def more_queries_than_keys(draw: Draw) -> Call:
    """More queries than keys: every query has its own row."""
    return Call(**draw.qkv(7, 2))


@BOOK.recipe("A1", "P1")
def one_key(draw: Draw) -> Call:
    """A single key takes all weight: the output is its value, and the log-sum-exp its logit."""
    return Call(**draw.qkv(3, 1))


@BOOK.recipe("A1")
def values_wider_than_keys(draw: Draw) -> Call:
    """d_k = 1 and d_v = 16."""
    return Call(**draw.qkv(3, 4, d_k=1, d_v=16))


@BOOK.recipe("A1")
def values_narrower_than_keys(draw: Draw) -> Call:
    """d_k = 16 and d_v = 1."""
    return Call(**draw.qkv(3, 4, d_k=16, d_v=1))


@BOOK.recipe("A1")
def width_64(draw: Draw) -> Call:
    """d_k = d_v = 64, as one head of a model has it."""
    return Call(**draw.qkv(2, 4, batch=(1,), heads=1, d_k=64))


@BOOK.recipe("A2", flags=("rank-2",))
def one_head_without_an_axis(draw: Draw) -> Call:
    """Rank 2 is one head: (Lq, d_k), (Lk, d_k), (Lk, d_v)."""
    data = draw.qkv(4, 6, batch=(), heads=1)
    return Call(**{name: x[0] for name, x in data.items()}, causal=True, q_start=1)


@BOOK.recipe("A2")
def heads_without_a_batch(draw: Draw) -> Call:
    """Rank 3 has heads on its first axis, which never broadcast like a batch."""
    return Call(**draw.qkv(4, 6, batch=(), heads=3))


@BOOK.recipe("A2", "A3")
def two_batch_axes(draw: Draw) -> Call:
    """Rank 5 has two batch axes before the heads."""
    return Call(**draw.qkv(2, 3, batch=(2, 2), heads=2, d_k=4, d_v=4))


@BOOK.recipe("A3", flags=("batch-broadcast",))
def keys_of_one_entry(draw: Draw) -> Call:
    """Keys with a batch axis of 1 serve every entry of queries and values."""
    data, shared = draw.qkv(3, 4, batch=(2,), heads=2), draw.qkv(3, 4, batch=(1,), heads=2)
    return Call(q=data["q"], k=shared["k"], v=data["v"])


@BOOK.recipe("A3", flags=("batch-broadcast",))
def batch_axes_that_meet(draw: Draw) -> Call:
    """Queries of batch (2, 1) and keys and values of batch (1, 3) give a result of batch (2, 3)."""
    one = draw.qkv(2, 2, batch=(2, 1), heads=1, d_k=4, d_v=4)
    other = draw.qkv(2, 3, batch=(1, 3), heads=1, d_k=4, d_v=4)
    return Call(q=one["q"], k=other["k"], v=other["v"])


@BOOK.recipe("A3", "M3", flags=("ragged", "positions"))
def starts_broadcast_over_batch_axes(draw: Draw) -> Call:
    """One start per entry of the batch, which has one axis."""
    return Call(**draw.ramp(2, 4, batch=(3,), heads=2, d_k=4, d_v=3), causal=True, q_start=[0, 1, 2])


@BOOK.recipe("A4", kinds=BASE)
def one_result_for_every_dtype(draw: Draw) -> Call:
    """Inputs that all dtypes hold have one result, which each dtype rounds once."""
    return Call(**draw.qkv(5, 5), causal=True)


@BOOK.recipe("A5", kinds=BASE)
def bias_of_another_dtype(draw: Draw) -> Call:
    """A float32 bias keeps its bits beside inputs of 16."""
    wide = Draw("A5.bias", "float32", draw.again)
    return Call(**draw.qkv(4, 6), bias=plain(wide.array(4, 6)), wide=("bias",))


@BOOK.recipe("A5", "P3", flags=("sink",), kinds=BASE)
def sinks_of_another_dtype(draw: Draw) -> Call:
    """Sinks in float32 keep their bits beside inputs of 16."""
    data = draw.qkv(4, 6)
    wide = Draw("A5.sinks", "float32", draw.again)
    return Call(**data, sinks=wide.array(data["q"].shape[-3]), wide=("sinks",))


@BOOK.recipe("A6", flags=("uniform-weights",), kinds=BASE)
def no_width(draw: Draw) -> Call:
    """With d_k = 0 all scores are 0 and the values are averaged."""
    return Call(**draw.qkv(4, 6, d_k=0), causal=True, q_start=2)


@BOOK.recipe("A6", "P2", kinds=BASE)
def no_keys(draw: Draw) -> Call:
    """With Lk = 0 every row is empty."""
    return Call(**draw.qkv(3, 0))


@BOOK.recipe("A6", "P4", flags=("sink",), kinds=BASE)
def no_keys_but_sinks(draw: Draw) -> Call:
    """With Lk = 0 and sinks the output is 0 and the log-sum-exp the sink."""
    data = draw.qkv(3, 0)
    return Call(**data, sinks=draw.array(data["q"].shape[-3]))


@BOOK.recipe("A6", kinds=ONCE)
def no_queries(draw: Draw) -> Call:
    """With Lq = 0 the output has no rows."""
    return Call(**draw.qkv(0, 4))


@BOOK.recipe("A6", kinds=ONCE)
def no_heads(draw: Draw) -> Call:
    """H = 0 is legal with Hkv = 0."""
    return Call(**draw.qkv(3, 4, heads=0, kv_heads=0))


@BOOK.recipe("A6", kinds=ONCE)
def no_entries(draw: Draw) -> Call:
    """A batch of no entries has a result of none."""
    return Call(**draw.qkv(3, 4, batch=(0,)))


@BOOK.recipe("A6", kinds=BASE)
def no_value_width(draw: Draw) -> Call:
    """With d_v = 0 the output has no columns, and weights and log-sum-exp are what they are."""
    return Call(**draw.qkv(3, 4, d_v=0))
