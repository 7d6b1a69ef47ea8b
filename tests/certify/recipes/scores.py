"""Chapter S: scale, soft cap, and the order of the stages."""

from __future__ import annotations

import numpy as np

from certify.call import Book, Call, dense, plain
from certify.draw import Draw

BOOK = Book("S")


@BOOK.recipe("S1")
def default_scale(draw: Draw) -> Call:
    """The default scale is 1/sqrt(d_k) of one head: d_model, none or its square change every weight."""
    return Call(**draw.qkv(4, 6))


@BOOK.recipe("S1")
def scale_of_a_square_width(draw: Draw) -> Call:
    """With d_k = 16 the default scale is 1/4."""
    return Call(**draw.qkv(3, 4, batch=(1,), heads=2, d_k=16))


@BOOK.recipe("S1")
def scale_of_an_odd_width(draw: Draw) -> Call:
    """With d_k = 3 the default scale is 1/sqrt(3), whatever width the kernel pads to."""
    return Call(**draw.qkv(4, 6, d_k=3))


@BOOK.recipe("S1")
def scale_of_width_1(draw: Draw) -> Call:
    """With d_k = 1 the default scale is 1."""
    return Call(**draw.qkv(4, 6, d_k=1))


@BOOK.recipe("S1", flags=("wide-logits",))
def scale_of_width_64(draw: Draw) -> Call:
    """With d_k = 64 the default scale is 1/8; unscaled, the largest score takes all."""
    return Call(**draw.qkv(2, 3, batch=(1,), heads=1, d_k=64))


@BOOK.recipe("S2")
def given_scale(draw: Draw) -> Call:
    """A given scale replaces the default one."""
    return Call(**draw.qkv(4, 6), scale=0.75)


@BOOK.recipe("S2")
def inexact_scale(draw: Draw) -> Call:
    """A scale is a Python number, the float64 nearest to 0.3, and not rounded to the inputs' dtype first."""
    return Call(**draw.qkv(4, 6), scale=0.3)


@BOOK.recipe("S2", flags=("negative-scale",))
def negative_scale(draw: Draw) -> Call:
    """A negative scale turns the order of the scores around."""
    return Call(**draw.qkv(4, 6), scale=-0.5)


@BOOK.recipe("S2", flags=("uniform-weights",))
def zero_scale(draw: Draw) -> Call:
    """With scale 0 all visible keys weigh the same, and the weights are exactly 1 over their number."""
    return Call(**draw.qkv(4, 6), scale=0.0, causal=True, q_start=2)


@BOOK.recipe("S2", flags=("wide-logits",))
def large_scale(draw: Draw) -> Call:
    """With scale 4 scores spread over tens, and the largest takes nearly all."""
    return Call(**draw.qkv(4, 6), scale=4.0)


@BOOK.recipe("S3", flags=("softcap",))
def softcap(draw: Draw) -> Call:
    """A soft cap c makes of a scaled score x the logit c tanh(x / c)."""
    return Call(**draw.qkv(4, 6, spread=2.0), softcap=2.0)


@BOOK.recipe("S3", flags=("softcap",))
def softcap_of_thirty(draw: Draw) -> Call:
    """A soft cap of 30 leaves small scores nearly alone."""
    return Call(**draw.qkv(4, 6, spread=4.0), softcap=30.0)


@BOOK.recipe("S3", flags=("softcap",))
def softcap_below_one(draw: Draw) -> Call:
    """A soft cap of 0.3 holds all logits within 0.3 of 0."""
    return Call(**draw.qkv(4, 6), softcap=0.3)


@BOOK.recipe("S3", "S2", flags=("softcap", "negative-scale"))
def softcap_after_scale(draw: Draw) -> Call:
    """The cap comes after the scale, which here is negative and not 1."""
    return Call(**draw.qkv(4, 6, spread=2.0), scale=-0.25, softcap=1.5)


@BOOK.recipe("S5", flags=("softcap",))
def cap_before_bias(draw: Draw) -> Call:
    """The bias is added after the cap, which would swallow it."""
    bias = draw.array(4, 6, spread=4.0)
    return Call(**draw.qkv(4, 6, spread=2.0), softcap=1.0, bias=plain(bias))


@BOOK.recipe("S5", flags=("softcap", "sink"))
def every_stage(draw: Draw) -> Call:
    """Scale, cap, bias, mask, causal rule and sinks in one call."""
    data = draw.qkv(4, 6, spread=2.0)
    return Call(
        **data,
        scale=0.5,
        softcap=3.0,
        bias=plain(draw.array(4, 6)),
        mask=dense(draw.shown(4, 6)),
        causal=True,
        q_start=3,
        sinks=draw.array(data["q"].shape[-3]),
    )


@BOOK.recipe("S5")
def hidden_after_cap(draw: Draw) -> Call:
    """Visibility is selected after the cap: a capped -inf would be the finite -1, and not hidden."""
    data = draw.ramp(4, 6)
    return Call(**data, softcap=1.0, mask=dense(np.tile(np.arange(6) < 4, (4, 1))))
