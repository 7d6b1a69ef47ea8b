"""How an implementation may round: models with names, models of one's own, and what they come to in numbers (N6).

A `Model` says in words what is rounded to what; a `Rounding` is the same for one storage dtype, in unit roundoffs.
`refattn.bounds` derives from it how far a result may lie from the exact one; docs/bounds.md is the derivation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from refattn.arrays import as_size, describe, is_one_of
from refattn.dtypes import COMPUTED, RANGES
from refattn.errors import ModelError

# Unit roundoff, to nearest: half the distance from 1 to the next number.
ROUNDOFF = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
    "tfloat32": 2.0**-11,
    "float8_e4m3": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
# The smallest numbers that every implementation keeps: many flush subnormal numbers to zero, but not those of 16 bits
# and fewer, unless the model says so.
LEAST = {
    "bfloat16": 2.0**-126,
    "float16": 2.0**-24,
    "float32": 2.0**-126,
    "float64": 2.0**-1022,
    "tfloat32": 2.0**-126,
    "float8_e4m3": 2.0**-9,
    "float8_e5m2": 2.0**-16,
}
# The smallest normal numbers: what is left where subnormal ones are flushed to zero.
NORMAL = LEAST | {"float16": 2.0**-14, "float8_e4m3": 2.0**-6, "float8_e5m2": 2.0**-14}


@dataclass(frozen=True, kw_only=True)
class Model:
    """What an implementation rounds, beside its result. Each field that is left out rounds nothing more.

    stored      scores and weights are stored in the dtype of q on the way
    prescaled   q and k are multiplied by factors of the scale, and stored, before their product
    products    dtype that both operands of both matrix products are rounded to, such as "tfloat32"
    sums        dtype that every sum is kept in; by default float32, or float64 for float64
    truncating  sums, and operands of `products`, are cut off instead of rounded, as tensor cores do
    weights     dtype that weights are cast to before they meet the values, such as "float8_e4m3"
    flush       subnormal numbers of the dtypes involved become zero
    coherent    errors of a sum may all go the same way: n in place of 4 sqrt(n)
    tile        keys per tile at the least; each tile rescales what came before it once

    Raises ModelError (N6) for a dtype that has no place there.
    """

    stored: bool = False
    prescaled: bool = False
    products: str | None = None
    sums: str | None = None
    truncating: bool = False
    weights: str | None = None
    flush: bool = False
    coherent: bool = False
    tile: int = 32

    def __post_init__(self) -> None:
        for name in ("products", "sums", "weights"):
            if (dtype := getattr(self, name)) is not None and not is_one_of(dtype, ROUNDOFF):
                raise ModelError(f"{name} of a model", f"None or one of {', '.join(ROUNDOFF)}", describe(dtype))
        for name in ("stored", "prescaled", "truncating", "flush", "coherent"):
            if not isinstance(value := getattr(self, name), bool):
                raise ModelError(f"{name} of a model", "Python's True or False", describe(value))
        if as_size(self.tile, 1) is None:
            raise ModelError("tile of a model", "a number of keys, at least 1", describe(self.tile))


MODELS = {
    "fused": Model(),
    "unfused": Model(stored=True),
    "prescaled": Model(stored=True, prescaled=True),
    "worst-case": Model(coherent=True),
    "truncating": Model(truncating=True),
    "tf32": Model(products="tfloat32"),
    "flush": Model(flush=True),
    "float16-sums": Model(sums="float16"),
    "bfloat16-sums": Model(sums="bfloat16"),
    "e4m3-weights": Model(weights="float8_e4m3"),
    "e5m2-weights": Model(weights="float8_e5m2"),
}


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """A model for one storage dtype, in numbers: unit roundoffs u, and sizes below which numbers are lost.

    What n roundings do to a number, a factor between (1 - u)^n and (1 + u)^n, is kept as n `wear(u)`, its logarithm.
    """

    storage: float
    arithmetic: float
    sums: float
    # wear of q and k together, of a weight, and of a value that meets it, beyond what the other fields say.
    operands: float
    weight: float
    stored: bool
    coherent: bool
    tile: int
    # Sizes that are lost: of results and scores stored, of weights, of q and k, of terms of a sum.
    least: float
    least_weight: float
    least_input: float
    least_term: float

    @property
    def largest(self) -> float:
        """The largest number that scores and softmax may have on the way: beyond, nothing follows."""
        return self._range[1]

    @property
    def smallest(self) -> float:
        """The smallest normal number of the arithmetic."""
        return self._range[0]

    @property
    def _range(self) -> tuple[float, float]:
        return RANGES["float64" if self.arithmetic == ROUNDOFF["float64"] else "float32"]

    @property
    def reference(self) -> float:
        """Factor that adds the golden value's own error, which obeys the same bound in float64."""
        return 1 + ROUNDOFF["float64"] / self.arithmetic

    def growth(self, n: int) -> float:
        """g(n), how the errors of n additions add up."""
        return float(n) if self.coherent else min(float(n), 4 * math.sqrt(n))

    def of_sum(self, n: int) -> float:
        """The wear of a sum of n terms."""
        return self.growth(n) * wear(self.sums)


def wear(u: float) -> float:
    """-log(1 - u): no rounding of unit roundoff u changes the logarithm of a number by more."""
    return -math.log1p(-u)


def rounding_model(dtype: str, model: str | Model = "fused", coherent: bool = False) -> Rounding:
    """The model, by itself or by its name in MODELS, for a storage dtype. coherent=True makes it a worst case.

    Raises ModelError (N6), which lists the choices, for a dtype or a name that there is none of.

    >>> from refattn import bounds
    >>> bounds.rounding_model("bfloat16").storage
    0.00390625
    """
    if not is_one_of(dtype, COMPUTED):
        raise ModelError("dtype", f"one of {', '.join(COMPUTED)}", describe(dtype))
    if not isinstance(model, Model):
        if not is_one_of(model, MODELS):
            raise ModelError("model", f"one of {', '.join(MODELS)}, or a Model", describe(model))
        model = MODELS[model]
    if not isinstance(coherent, bool):
        raise ModelError("coherent", "Python's True or False", describe(coherent))
    wide = "float64" if dtype == "float64" else "float32"
    storage, kept = ROUNDOFF[dtype], NORMAL if model.flush else LEAST
    stored = model.stored and dtype != wide
    cut = 2 if model.truncating else 1  # twice the unit roundoff: what is cut off can be nearly all of a last place
    products = 0.0 if model.products is None else cut * ROUNDOFF[model.products]
    inexact = products if products > storage else 0.0  # operands of few enough digits are as they were
    casts = 0 if dtype == wide else 2 if stored else 1
    small = wide if dtype == wide else dtype  # the narrowest dtype that a weight goes through
    return Rounding(
        storage=storage,
        arithmetic=ROUNDOFF[wide],
        sums=cut * ROUNDOFF[model.sums or wide],
        operands=2 * wear(inexact) + (2 * wear(storage) if model.prescaled else 0.0),
        weight=casts * wear(storage)
        + wear(products)
        + wear(inexact)
        + wear(0.0 if model.weights is None else ROUNDOFF[model.weights]),
        stored=stored,
        coherent=coherent or model.coherent or model.truncating,
        tile=model.tile,
        least=kept[dtype],
        least_weight=max(kept[small], kept[model.weights or small], kept[model.products or small]),
        least_input=kept[dtype] if model.flush else 0.0,
        least_term=0.0 if model.sums is None else kept[model.sums],
    )


def described(model: Model) -> str:
    """The fields of a model that differ from those of "fused", as one would write them."""
    plain = MODELS["fused"]
    given = [
        f"{f.name}={getattr(model, f.name)!r}"
        for f in fields(model)
        if getattr(model, f.name) != getattr(plain, f.name)
    ]
    return f"Model({', '.join(given)})"
