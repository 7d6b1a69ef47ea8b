"""For other people's test suites: assertions for outputs and gradients, pictures, and a strategy for inputs.

    from refattn.testing import assert_attention_close
    assert_attention_close(my_kernel(q, k, v), q, k, v, causal=True)

Nothing is imported here that a test suite would notice: NumPy and Hypothesis are, inside the functions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import TYPE_CHECKING, Any

from refattn.arrays import Array, as_size, describe, is_array, is_one_of
from refattn.dtypes import COMPUTED, is_bool
from refattn.errors import InputsError

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from refattn.bounds import Model
    from refattn.conformance.inputs import Inputs

# Those of `attention` that a result depends on.
_OPTIONS = ("causal", "mask", "bias", "scale", "softcap", "sinks", "q_start", "k_start")
# What `inputs` can draw, beside q, k and v.
FEATURES = (*_OPTIONS, "gqa", "d_v", "rank", "poison", "empty")


def assert_attention_close(
    actual: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dtype: Any = None,
    model: str | Model = "fused",
    coherent: bool = False,
    lse: Array | None = None,
    rows: Sequence[int] | None = None,
    **options: Any,
) -> None:
    """Raises AssertionError unless `actual` is attention of q, k and v, within the bound derived for it (N6).

    q (..., H, Lq, d_k), k (..., Hkv, Lk, d_k) and v (..., Hkv, Lk, d_v), or rank 2, as the kernel got them, with the
    options of `attention` (causal, mask, bias, scale, softcap, sinks, q_start, k_start). actual (..., H, Lq, d_v) may
    be an array of any library. There is no tolerance to choose: each element has its own bound.

    dtype   the one that the kernel stores its result in; by default that of actual
    model   how the kernel may round: a name out of `refattn.bounds.MODELS`, or a `refattn.bounds.Model`
    coherent   for inputs of many equal terms, such as zero queries, whose rounding errors do not average out
    lse     the kernel's natural log-sum-exp (..., H, Lq), judged too
    rows    query rows to judge, for large inputs; actual and lse hold all rows or just these

    The first sentence of the message says what is wrong: where it is worst and by how much, NaN, shape or dtype, and
    which other reading of the options gives this result, if one does. Where the bound says nothing, that is an error
    too, never a pass. Raises what `attention` raises for arguments that do not fit.

    >>> import numpy as np, refattn
    >>> from refattn.testing import assert_attention_close
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 8))  # (H, L, d)
    >>> assert_attention_close(refattn.attention(q, k, v, causal=True), q, k, v, causal=True)
    >>> assert_attention_close(refattn.attention(q, k, v), q, k, v, causal=True)
    Traceback (most recent call last):
        ...
    AssertionError: the output matches "causal is ignored" [M4]: ...
    """
    __tracebackhide__ = True
    from refattn.conformance.closeness import explained

    _check_names("assert_attention_close", options, "lse, rows")
    claim = {"dtype": dtype, "model": model, "coherent": coherent, "lse": lse, "rows": rows}
    if message := explained(actual, q, k, v, options, **claim):
        raise AssertionError(message)


def assert_gradients_close(
    gradients: Any,
    q: Array,
    k: Array,
    v: Array,
    grad_output: Array,
    *,
    dtype: Any = None,
    model: str | Model = "fused",
    coherent: bool = False,
    **options: Any,
) -> None:
    """Raises AssertionError unless `gradients` are those of sum(grad_output * attention(...)), within their bound (D8).

    q (..., H, Lq, d_k), k (..., Hkv, Lk, d_k) and v (..., Hkv, Lk, d_v), or rank 2, and grad_output (..., H, Lq, d_v)
    as the backward pass got them, with the options of `attention`; bias, if there is one, is an array. gradients are
    those of q, k, v [, bias] [, sinks] in this order, or by name, each of the shape of its argument (D1); what is left
    out, or None, is not judged. All may be arrays of any library. Each element has its own bound, which is derived.
    It takes about a second for every million pairs of a query and a key, and with a bias memory for each of them.

    dtype   the one that gradients are stored in; by default that of each
    model   how the backward pass may round: a name out of `refattn.bounds.MODELS`, or a `refattn.bounds.Model`
    coherent   for inputs of many equal terms, whose rounding errors do not average out

    The first sentence of the message says which fault gives these gradients, if one does, and where the worst error
    is; a line for each gradient says which elements are wrong. Raises what `attention` raises for arguments that do
    not fit, GradientError (D1) for another grad_output and InputsError (E4) for gradients of what the call has not.

    >>> import numpy as np, refattn
    >>> from refattn.testing import assert_gradients_close
    >>> q, k, v, grad_output = np.random.default_rng(0).standard_normal((4, 2, 5, 8))  # (H, L, d)
    >>> gradients = refattn.attention_vjp(q, k, v, grad_output, causal=True)
    >>> assert_gradients_close(gradients, q, k, v, grad_output, causal=True)
    >>> assert_gradients_close({"k": gradients.k, "q": 2 * gradients.q}, q, k, v, grad_output, causal=True)
    Traceback (most recent call last):
        ...
    AssertionError: the gradient of q is 2 times the right one: gradient of q[0, 3, 4] is 4.01054858, expected ...
    gradient of q: 64 of 80 elements are wrong, rows 1 to the last
    the gradient of k is right
    """
    __tracebackhide__ = True
    from refattn.conformance.gradient_closeness import explained

    _check_names("assert_gradients_close", options)
    claim = {"dtype": dtype, "model": model, "coherent": coherent}
    if message := explained(gradients, q, k, v, grad_output, options, **claim):
        raise AssertionError(message)


def _check_names(function: str, options: dict[str, Any], more: str = "") -> None:
    """Raises TypeError for an option that is none; a tolerance is told that the bound is derived."""
    for name in options.keys() - _OPTIONS:
        why = "the bound is derived, there is no tolerance to set; " if name in ("atol", "rtol", "tolerance") else ""
        known = ", ".join((*_OPTIONS, "dtype, model, coherent", *filter(None, [more])))
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {why}expected {known}")


def inputs(
    *,
    dtypes: Collection[str] = ("float32",),
    features: Collection[str] = FEATURES,
    longest: int = 33,
    widths: Collection[int] = (1, 3, 8, 16),
) -> SearchStrategy[Inputs]:
    """A Hypothesis strategy for calls of attention: a dtype, NumPy arrays q, k and v, and options, all of them legal.

        @given(inputs(features=["causal", "q_start", "poison"]))
        def test_my_kernel(call):  # a tuple with the fields dtype, q, k, v, options
            assert_attention_close(my_kernel(call.q, call.k, call.v, **call.options), *call[1:4], **call.options)

    dtypes     names out of bfloat16 (needs ml_dtypes), float16, float32 and float64
    features   out of FEATURES, what the kernel knows: the options of `attention`; "gqa" for H a multiple of Hkv, "d_v"
               for values of a width of their own, "rank" for other ranks than 4, "poison" for NaN, infinities and huge
               numbers in keys and values that no row sees, "empty" for no tokens and for rows that see no key
    longest    of the lengths, which lie around powers of two
    widths     of the heads

    Masks are boolean arrays, True = visible, and biases arrays of q's dtype, both of a shape that broadcasts to
    (..., H, Lq, Lk); q_start and k_start are ints. Raises InputsError (E4) for names that are none.
    """
    from refattn.conformance.inputs import drawn_inputs

    for argument, given, known in (("features", features, FEATURES), ("dtypes", dtypes, COMPUTED)):
        if not _is_collection(given) or not all(is_one_of(x, known) for x in given):
            raise InputsError(argument, f"names out of {', '.join(known)}", describe(given))
    if not dtypes:
        raise InputsError("dtypes", "at least one dtype", "none")
    most = as_size(longest, 1)
    if most is None:
        raise InputsError("longest", "an int >= 1", describe(longest))
    if not _is_collection(widths) or not widths or any(as_size(width) is None for width in widths):
        raise InputsError("widths", "some ints >= 0", describe(widths))
    return drawn_inputs(tuple(dtypes), frozenset(features), most, tuple(map(int, widths)))


def _is_collection(x: Any) -> bool:
    return isinstance(x, (tuple, list, Set))


def weights_svg(q: Array, k: Array, v: Array, *, entry: int = 0, head: int = 0, **options: Any) -> str:
    """The attention weights of one head as the text of an SVG file that needs nothing else.

    q (..., H, Lq, d_k), k (..., Hkv, Lk, d_k) and v (..., Hkv, Lk, d_v), or rank 2, arrays of any library, with the
    options of `attention`. head is the query head, entry counts through the batch. The weights are golden values; of
    more than 64 queries or keys a cell shows the largest of its block. They are a diagnostic, not an explanation
    (X1, X2), and the picture says so. Raises what `attention` raises for arguments that do not fit, and InputsError
    (E4) for a head or an entry that is none, and where there is nothing to draw.
    """
    from refattn.conformance.reports import plots

    return plots.weights_svg(q, k, v, entry=entry, head=head, **options)


def mask_svg(visible: Array) -> str:
    """A boolean matrix (Lq, Lk), True = visible (M1), as the text of an SVG file: which query sees which key.

    `mask.to_array(q_len, k_len)` makes one of a mask. Raises InputsError (E4) for anything else.

    >>> from refattn import masks, testing
    >>> testing.mask_svg(masks.causal().to_array(4, 4))[:4]
    '<svg'
    """
    from refattn.conformance.reports import plots

    if not is_array(visible) or len(visible.shape) != 2 or 0 in visible.shape or not is_bool(visible.dtype):
        raise InputsError("visible", "a boolean matrix (Lq, Lk) that is not empty", describe(visible))
    return plots.mask_svg(visible)
