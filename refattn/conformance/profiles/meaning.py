"""What findings mean: the wrong implementations of the catalogue that make the same choice, and a few of our own.

A departure that no fault describes here, such as a refusal, explains no result: what it causes stays a fault.
"""

from __future__ import annotations

from typing import Any

from refattn.arrays import Array
from refattn.conformance.faults import named
from refattn.conformance.faults.fault import Fault
from refattn.conformance.faults.pipeline import Plain
from refattn.conformance.probe.card import Finding


def _turned(run: Any) -> bool:
    """Whether causal alone hides, and the scale is not positive."""
    return run.causal and run.mask is None and run.bias is None and not run.factor() > 0


def _hidden_before_scale(run: Any, x: Array, seen: Array) -> Array:
    """-inf before the scale: 0 * -inf is NaN, and a negative scale makes it +inf, which gives NaN too."""
    return run.xp.where(seen, x, float("nan")) if _turned(run) else Plain.hidden(run, x, seen)


def _nan_below_zero(run: Any, x: Array) -> Array:
    """The square root of the scale multiplies queries and keys."""
    return run.stored(x * (float("nan") if run.factor() < 0 else run.factor()))


def _plain_scores(run: Any) -> Array:
    """Whatever arithmetic makes of an infinite key."""
    return run.stored(run.products(run.q, run.k))


def _infinite_log_sum(run: Any, total: Array, peak: Array) -> Array:
    return run.xp.where(peak == float("inf"), peak, Plain.log_sum(run, total, peak))


def _zeros_for_nan_with_causal(run: Any, output: Array, seen: Array) -> Array:
    """Where causal hides keys from a row, a NaN logit of the last key that it sees makes it 0."""
    if run.causal and run.mask is None and run.bias is None:
        queries, keys = (run.xp.any(run.xp.isnan(x), axis=-1) for x in (run.q, run.k))
        last = seen[..., :-1] & ~seen[..., 1:]
        hidden = run.xp.any(last, axis=-1, keepdims=True)
        own = run.xp.any(last & keys[..., None, :-1], axis=-1, keepdims=True)
        output = run.xp.where(hidden & (queries[..., None] | own), 0.0, output)
    return Plain.output(run, output, seen)


def _in_float32(run: Any, output: Array, seen: Array) -> Array:
    """The output of Plain, in float32 where it would be float64."""
    output = Plain.output(run, output, seen)
    return run.xp.astype(output, run.xp.float32) if output.dtype == run.xp.float64 else output


def _zeros_for_nan(run: Any, output: Array, seen: Array) -> Array:
    broken = run.xp.any(run.xp.isnan(run.q), axis=-1)[..., None]
    return Plain.output(run, run.xp.where(broken, 0.0, output), seen)


# Choices that no fault of the catalogue makes.
OWN = {
    fault.name: fault
    for fault in (
        Fault(
            name="scale of 0 or less gives NaN with causal",
            clause="S2",
            kind="scaling",
            steps={"hidden": _hidden_before_scale},
        ),
        Fault(name="row of a NaN query is 0", clause="M21", kind="NaN leak", steps={"output": _zeros_for_nan}),
        Fault(
            name="row of a NaN query is 0 with causal",
            clause="M21",
            kind="NaN leak",
            steps={"output": _zeros_for_nan_with_causal},
        ),
        Fault(name="infinite keys count by their sign", clause="M20", kind="NaN leak", steps={"scores": _plain_scores}),
        Fault(
            name="log-sum-exp of a logit of +inf is +inf",
            clause="P4",
            kind="LSE merge",
            lse=True,
            steps={"log_sum": _infinite_log_sum},
        ),
        Fault(name="scale below 0 gives NaN", clause="S2", kind="scaling", steps={"scaled": _nan_below_zero}),
        Fault(
            name="float64 becomes float32",
            clause="A4",
            kind="dtype-precision",
            dtypes=("float64",),
            steps={"output": _in_float32},
        ),
    )
}
_LEAKS = ("NaN and infinity leak", "NaN leaks", "infinity leaks")
# (name of the finding, what was found) -> names of faults, each on its own or together.
MEANING: dict[tuple[str, str], tuple[str, ...]] = {
    ("default scale", "none"): ("no scale",),
    ("default scale", "1/d_k"): ("scale without the root",),
    ("default scale", "1/sqrt(d_model)"): ("scale of d_model",),
    ("default scale", "1/sqrt(d_v)"): ("scale of the values' width",),
    ("scale option", "ignored"): ("scale is ignored",),
    ("scale option", "squared"): ("scale is squared",),
    ("scale option", "sign lost"): ("sign of the scale is lost",),
    ("scale option", "zero means default"): ("scale of zero means default",),
    ("scale option", "NaN below zero"): ("scale below 0 gives NaN",),
    ("scale option", "NaN with causal"): ("scale of 0 or less gives NaN with causal",),
    ("soft cap", "before the scale"): ("cap before scale",),
    ("soft cap", "ignored"): ("cap is ignored",),
    ("soft cap", "clipped"): ("cap clips",),
    ("soft cap", "c tanh(x)"): ("cap is not divided by",),
    ("soft cap", "tanh(x / c)"): ("cap is not multiplied by",),
    ("soft cap and bias", "bias before the cap"): ("bias before cap",),
    ("soft cap and mask", "mask before the cap"): ("mask before cap",),
    ("bias", "scaled"): ("bias is scaled",),
    ("bias", "ignored"): ("bias is ignored",),
    ("bias", "subtracted"): ("bias is subtracted",),
    ("bias", "first head's for all"): ("bias of the first head for all",),
    ("bias of -inf", "hides, NaN in a row of them"): ("empty row is NaN",),
    ("bias of -inf", "hides, uniform in a row of them"): ("empty row is the mean",),
    ("bias of -inf", "a large number"): ("bias of -inf is a large number",),
    ("large negative bias", "zeros"): ("large negative bias is a mask",),
    ("mask", "True is hidden"): ("mask polarity",),
    ("mask", "added as 0 and 1"): ("mask is added as 0 and 1",),
    ("mask", "after softmax"): ("mask after softmax",),
    ("mask of rank 3", "batch"): ("mask of rank 3 as batch",),
    ("mask of each entry", "first entry's for all"): ("mask of the first entry for all",),
    ("mask of each entry", "a group's first for the group"): ("mask of one head for its group",),
    ("causal", "hides itself"): ("causal hides itself",),
    ("causal", "shows the next"): ("causal shows the next",),
    ("causal", "keys from its own on"): ("causal looks ahead",),
    ("causal", "ignored"): ("causal is ignored",),
    ("causal alignment", "top-left"): ("causal from the top left",),
    ("causal alignment", "bottom-right"): ("causal from the bottom right",),
    ("q_start", "ignored"): ("causal from the top left",),
    ("q_start", "bottom-right"): ("causal from the bottom right",),
    ("k_start", "ignored"): ("k_start is ignored",),
    ("starts of each entry", "first entry's for all"): ("first start for all entries",),
    ("mask with causal", "mask ignored"): ("causal drops mask",),
    ("mask with causal", "causal ignored"): ("mask drops causal",),
    ("softmax", "over queries"): ("softmax over queries",),
    ("softmax", "over heads"): ("softmax over heads",),
    ("softmax", "not divided"): ("weights are not divided",),
    ("empty row", "NaN"): ("empty row is NaN",),
    ("empty row", "mean of v"): ("empty row is the mean", "hidden logits are the least number"),
    ("large logits", "overflow"): ("no maximum is subtracted",),
    ("low logits", "zeros"): ("rows of low logits count as empty",),
    ("low logits", "NaN"): ("maximum starts at 0",),
    ("keys of zeros", "hidden"): ("keys of zeros are padding",),
    ("query of NaN", "zeros in its row"): ("row of a NaN query is 0",),
    ("query of NaN", "zeros with causal"): ("row of a NaN query is 0 with causal",),
    ("query of NaN", "other rows too"): ("one maximum for all rows",),
    ("sinks", "ignored"): ("sinks are ignored",),
    ("sinks", "scaled"): ("sinks are scaled",),
    ("sinks", "in the numerator"): ("sink in the numerator",),
    ("sinks", "first head's for all"): ("sink of the first head for all",),
    ("sinks", "a wrong sigmoid"): ("sink as a sigmoid",),
    ("sinks and soft cap", "capped"): ("sinks are capped",),
    ("log-sum-exp", "base 2"): ("log-sum-exp in base 2",),
    ("log-sum-exp", "the maximum"): ("log-sum-exp is the maximum",),
    ("log-sum-exp of an empty row", "0"): ("log-sum-exp of an empty row is 0",),
    ("log-sum-exp of an empty row", "+inf"): ("log-sum-exp of an empty row is +inf",),
    ("log-sum-exp and sinks", "without the sink"): ("sink is missing from the log-sum-exp",),
    ("dtype of the log-sum-exp", "the dtype of q"): ("log-sum-exp in the dtype of q",),
    ("head mapping", "h % Hkv"): ("heads are interleaved",),
    ("head mapping", "first for all"): ("first key head for all",),
    ("head mapping", "reversed"): ("groups in reverse",),
    **{("hidden values", leak): ("poison leaks from v",) for leak in _LEAKS},
    **{("hidden keys", leak): ("poison leaks from k",) for leak in _LEAKS},
    **{("hidden biases", leak): ("poison leaks from the bias",) for leak in _LEAKS},
    ("visible NaN in k", "counts as zero"): ("visible NaN keys count as zero",),
    ("visible infinity in k", "by its sign"): ("infinite keys count by their sign",),
    ("bias of +inf", "a large number"): ("infinite logits are clamped",),
    ("log-sum-exp of a logit of +inf", "+inf"): ("log-sum-exp of a logit of +inf is +inf",),
    ("visible infinity in v", "NaN where the weight is 0"): ("poison leaks from v",),
    ("visible infinity in v", "counts as zero"): ("visible infinite values count as zero",),
    ("axes of the output", "scrambled"): ("tokens before heads",),
    ("values of another width", "as wide as q"): ("output as wide as q",),
    ("dtype of the result", "float32"): ("result in float32",),
    ("dtype of the result", "float32 for float64"): ("float64 becomes float32",),
    ("precision of float64", "float32"): ("float64 in float32",),
    ("precision of float32", "tf32-like products"): ("products of truncated inputs",),
    ("precision of float32", "logits of few bits"): ("softmax in half precision",),
    ("overflow in float16", "raw scores overflow"): ("overflow before scale",),
    ("sums of weights in 16 bits", "storage type"): ("sum in the storage type",),
    ("sums of the output in 16 bits", "storage type"): ("output accumulated in the storage type",),
    ("sums of scores in 16 bits", "storage type"): ("scores accumulated in the storage type",),
}


def faults_of(finding: Finding) -> tuple[Fault, ...]:
    """The faults that a finding describes; none for what is as specified, refused or not explained."""
    return tuple(OWN.get(name) or named(name) for name in MEANING.get((finding.name, finding.found), ()))
