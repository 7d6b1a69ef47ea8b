"""What each fault of the catalogue means for the one who wrote the kernel: what it does, and what to do instead."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.conformance.case import Problem

# Fault -> words, with the sizes and options of the call in braces. All of the catalogue's functions are here.
MEANING = {
    "scale of d_model": "scores are divided by sqrt(H * d_k); divide by sqrt(d_k), the width of one head ({d_k})",
    "no scale": "scores are not scaled; multiply them by 1/sqrt(d_k) = {default:.6g}",
    "scale without the root": "scores are divided by d_k = {d_k}; divide by its square root",
    "scale of the values' width": "scores are divided by sqrt(d_v) = sqrt({d_v}); divide by sqrt(d_k) = sqrt({d_k})",
    "scale is squared": "the scale acts twice, as {scale:.6g} squared; apply it once, to q or to the scores",
    "sign of the scale is lost": "a negative scale is taken as positive; scale={scale:.6g} keeps its sign",
    "scale is ignored": "scale={scale:.6g} is ignored in favour of 1/sqrt(d_k) = {default:.6g}",
    "scale of zero means default": "scale=0 is taken for no scale given; compare with None",
    "scale 2 percent too large": "the scale is 2 percent too large; it is 1/sqrt(d_k) = {default:.6g}",
    "cap is ignored": "softcap={softcap:.6g} is ignored; put c tanh(x / c) after the scale",
    "cap is not divided by": "the soft cap is c tanh(x) without x / c inside; it is c tanh(x / c), c={softcap:.6g}",
    "cap is not multiplied by": "the soft cap is tanh(x / c) without c in front; it is c tanh(x / c), c={softcap:.6g}",
    "cap clips": "the soft cap clips at +-{softcap:.6g}; it is c tanh(x / c)",
    "cap before scale": "the soft cap comes before the scale; cap the scaled scores",
    "bias before cap": "the bias goes through the soft cap; add it after the cap",
    "mask before cap": "hidden scores go through the soft cap and come out finite; mask after the cap",
    "bias is scaled": "the bias is multiplied by the scale; add it to the scaled scores as it is",
    "bias is ignored": "the bias is ignored; add it to the scaled scores",
    "bias of the first head for all": "all heads get the bias of the first; each head has its own",
    "bias is subtracted": "the bias is subtracted; add it",
    "mask polarity": "the mask is inverted; True marks a pair that is visible",
    "mask is added as 0 and 1": "the boolean mask is added to the scores as 0 and 1; where it is False a score is -inf",
    "mask after softmax": "the mask zeroes weights after the softmax; hide scores before it, so that rows sum to 1",
    "k_start is ignored": "k_start={k_start} is ignored; it is the position of the first key",
    "first start for all entries": "the start of the first batch entry counts for all; each entry has its own",
    "causal hides itself": "the causal diagonal is off by one, and hides each query's own position; show keys <= query",
    "causal shows the next": "the causal diagonal is off by one, and shows one key too many; show keys <= query",
    "causal looks ahead": "the causal rule is turned round, and shows the keys from each query on; show keys <= query",
    "causal is ignored": "no causal rule; hide the keys after each query's position",
    "last row sees all keys": "the last query row is left without causal rule; it sees no key after its position",
    "causal from the top left": "causal aligned top-left, q_start=0 instead of {q_start} (Lq={Lq}, Lk={Lk})",
    "causal from the bottom right": "causal aligned bottom-right, q_start={surplus} instead of {q_start} "
    "(Lq={Lq}, Lk={Lk})",
    "mask drops causal": "a mask switches the causal rule off; both together combine by AND",
    "causal drops mask": "causal=True switches the mask off; both together combine by AND",
    "mask of rank 3 as batch": "the first axis of a mask of rank 3 is taken for the batch; it is the heads",
    "mask of the first entry for all": "the mask of the first batch entry counts for all; each entry has its own",
    "bias of -inf is a large number": "a bias of -inf is replaced by a large number; it hides its pair",
    "large negative bias is a mask": "a large negative bias is taken for a mask; finite biases hide nothing",
    "poison leaks from k": "NaN or infinity in hidden keys leaks; choose with where(), since NaN + -inf is NaN",
    "poison leaks from v": "NaN or infinity in hidden values leaks; 0 * NaN is NaN, so zero such values first",
    "poison leaks from the bias": "NaN or infinity in the bias of hidden pairs leaks; choose with where()",
    "maximum over hidden keys": "the maximum of a row is taken over hidden keys too, and weights underflow; "
    "hide before the maximum",
    "visible NaN keys count as zero": "visible keys of NaN count as zero; they make their logits NaN",
    "visible infinite values count as zero": "visible values of NaN or infinity count as zero; they show in the output",
    "one maximum for all rows": "one maximum serves all rows of a head, and a NaN row spoils the others; one per row",
    "keys of zeros are padding": "keys of zeros are taken for padding; a mask alone hides keys",
    "mask of one head for its group": "the mask of a group's first head counts for its whole group; per query head",
    "softmax over queries": "the softmax runs over the queries; it runs over the keys, the last axis",
    "softmax over heads": "the softmax runs over the heads; it runs over the keys, the last axis",
    "no maximum is subtracted": "exponentials overflow because no maximum is subtracted",
    "weights are not divided": "the weights are not divided by their sum",
    "empty row is NaN": "rows that see no key are NaN, 0 / 0; they are 0",
    "empty row is the mean": "rows that see no key are the mean of all values; they are 0",
    "empty row keeps the buffer": "rows that see no key keep what the output's buffer held; write 0 there",
    "hidden logits are -1e4": "hidden scores are -1e4 instead of -inf, which low or empty rows outweigh",
    "mask is scaled with the scores": "the number that hides scores is scaled with them, and no longer hides all",
    "hidden logits are the least number": "hidden scores are the least finite number instead of -inf, which empty rows "
    "turn into the mean",
    "sinks are scaled": "sinks are multiplied by the scale; they are logits already",
    "sinks are capped": "sinks go through the soft cap; they are logits already",
    "sink is not shifted": "exp(sink) is added to weights that are exp(logit - maximum); add exp(sink - maximum)",
    "sinks are ignored": "sinks are ignored; add exp(sink) to each row's denominator",
    "sink in the numerator": "the sink's weight goes to the values; it enters the denominator alone",
    "sink of the first head for all": "all heads get the sink of the first; each query head has its own",
    "sink as a sigmoid": "the sink gates by sigmoid(lse - sink) with the wrong sign",
    "sink is missing from the log-sum-exp": "the log-sum-exp leaves out the sink; it is part of the sum",
    "log-sum-exp in base 2": "the log-sum-exp is in base 2; multiply it by ln 2",
    "log-sum-exp of an empty row is 0": "the log-sum-exp of rows that see no key is 0; it is -inf",
    "log-sum-exp of an empty row is +inf": "the log-sum-exp of rows that see no key is +inf; it is -inf",
    "log-sum-exp is the maximum": "the log-sum-exp is the maximum alone; add the logarithm of the sum",
    "log-sum-exp in the dtype of q": "the log-sum-exp is stored in the dtype of q; keep it in float32 at least",
    "rows are shifted": "each row's logits have a constant of their own, which log-sum-exp and sinks show",
    "maximum starts at 0": "the maximum of a row starts at 0, so that low logits underflow; start at -inf",
    "rows of low logits count as empty": "rows whose logits are all very negative are zeroed as if they saw no key",
    "infinite logits are clamped": "infinite or huge logits are clamped; +inf makes its row NaN",
    "heads are interleaved": "query head h reads key/value head h % Hkv instead of h // (H / Hkv) (H={H}, Hkv={Hkv})",
    "first key head for all": "all query heads read the first key/value head; head h reads h // (H / Hkv)",
    "groups in reverse": "groups of query heads read key/value heads in reverse; head h reads h // (H / Hkv)",
    "output as wide as q": "the output is as wide as q, {d_k}; it is as wide as v, {d_v}",
    "tokens before heads": "the memory of the output is (tokens, heads) and read as (heads, tokens); transpose it",
    "k is transposed in memory": "k is read with tokens and width exchanged in memory; transpose, do not reshape",
    "strides are ignored": "arrays are read as if they were contiguous; use their strides, or copy them first",
    "result in float32": "the result is float32 whatever q is; give it q's dtype, {dtype}",
    "inputs are written to": "the call writes to its inputs; work on a copy",
    "outputs share a buffer": "a later call overwrites the answer of an earlier one; give each its own memory",
    "answers are memoised by shape": "answers are remembered by shape and come back for other data",
    "every second call differs": "the same call gives other bits the second time",
    "output of zeros": "the output is all zeros",
    "output of NaN": "the output is all NaN",
    "values are handed back": "the output is v itself, or what its buffer held: nothing was computed",
    "float64 in float32": "float64 is computed in float32; keep it",
    "products of truncated inputs": "inputs of the product q . k are cut to fewer bits, as TF32 does; switch that off",
    "overflow before scale": "q . k overflows in the storage type before it is scaled; accumulate in float32",
    "sum in the storage type": "the sum of the weights is accumulated in {dtype}; accumulate in float32",
    "output accumulated in the storage type": "the weighted sum is accumulated in {dtype}; accumulate in float32",
    "scores accumulated in the storage type": "q . k is accumulated in {dtype}; accumulate in float32",
    "softmax in half precision": "logits are rounded to half precision before the softmax; keep {dtype}",
    "tail tile is dropped": "keys after the last full tile are dropped; process the ragged tile too",
    "tail tile is not masked": "keys past the end of the last tile count as zeros; hide them",
    "sum is not rescaled": "the running sum is not rescaled when a tile raises the maximum",
    "output is not rescaled": "the running output is not rescaled when a tile raises the maximum",
    "running maximum starts at 0": "the running maximum starts at 0; start at -inf",
    "hidden first tile gives NaN": "a tile without a visible key gives exp(-inf - -inf) = NaN; guard the maximum",
    "only the first tiles are read": "keys after the first tiles are not read",
    "halves are averaged": "parts of the keys are merged by their mean; weigh each by exp(its log-sum-exp)",
    "halves are added": "parts of the keys are merged by their sum; weigh each by exp(its log-sum-exp)",
    "halves merge in base 2": "parts are merged by log-sum-exps in base 2 read as natural ones",
    "halves weigh by their logarithm": "parts are merged by the roots of their shares; the weight is exp(log-sum-exp)",
}


def meaning(name: str, problem: Problem) -> str:
    """What that fault means for one call, in words."""
    return MEANING[name].format(**facts(problem))


def facts(problem: Problem) -> dict[str, Any]:
    """The sizes and options of a call that sentences mention."""
    d_k = problem.q.shape[-1]
    default = 1 / math.sqrt(d_k) if d_k else 1.0
    q_len, k_len = problem.q.shape[-2], problem.k.shape[-2]
    return {
        "Lq": q_len,
        "Lk": k_len,
        "H": problem.heads,
        "Hkv": problem.k.shape[-3] if problem.k.ndim > 2 else 1,
        "d_k": d_k,
        "d_v": problem.v.shape[-1],
        "dtype": problem.dtype,
        "default": default,
        "scale": default if problem.scale is None else problem.scale,
        "softcap": math.inf if problem.softcap is None else problem.softcap,
        "surplus": k_len - q_len,
        "q_start": _plain(0 if problem.q_start is None else problem.q_start),
        "k_start": _plain(problem.k_start),
    }


def _plain(start: Any) -> Any:
    return np.asarray(start).tolist()
