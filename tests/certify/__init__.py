"""Certified vectors: attention on exact rationals and balls, written from the text of the specification alone.

    draw.py      seeded inputs, exact in the dtypes that they are for
    call.py      one call of attention, and the book of recipes that make calls
    pairs.py     which pairs are visible, and what is added to their scores
    rounding.py  the one float64 that a real number rounds to, proven
    attend.py    the call's output, weights and log-sum-exp, each proven
    gradients.py the gradients of the arguments, each proven
    recipes/     the calls, one module per chapter
    write.py     vectors and manifest in their canonical form

`python -m certify` compares what it makes with what refattn ships; `--write` replaces that.
"""
