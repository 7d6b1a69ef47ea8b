"""A backward function that speaks a calling convention: called like the function itself, its gradients read back.

It gets grad_output, in the layout of the output, after q, k and v where these are passed by position, else by name.
Where its signature has output or lse it gets what the function returned for these. It returns the gradients of q, k, v
[, bias] [, sinks] in this order, or by the names of the parameters, each in the form of the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem
from refattn.conformance.conventions.express import Lacking, Parts
from refattn.conformance.targets.answer import Seen
from refattn.conformance.targets.backward import FORWARD, asked_of_forward, in_order
from refattn.conformance.targets.layouts import Misshapen, OneCall, expected_shape, lay, pack
from refattn.conformance.targets.leaves import Leaves
from refattn.conformance.targets.signatures import refused_option
from refattn.gradients import summed_to

if TYPE_CHECKING:
    from refattn.conformance.targets.convention import ConventionTarget


def gradients_of(
    target: ConventionTarget, backward: Callable[..., Any], problem: Problem, q: Array, k: Array, v: Array
) -> dict[str, Array | Seen]:
    """The gradients that a backward function gives on a problem, in the shapes of the problem's arguments.

    What broadcasting or one call for each entry repeated is summed here, in float64. Raises Lacking and Misshapen.
    """
    parts = Parts.of(problem)
    shape = (parts.entries, problem.heads, parts.q_len, problem.v.shape[-1])
    gradient = np.broadcast_to(np.asarray(problem.grad_output), (*parts.batch, *shape[1:])).reshape(shape)
    several: dict[str, list[Array]] = {}
    dtypes: dict[str, str] = {}
    for number, call in enumerate(target.calls(parts, q, k, v)):
        own = gradient if target.convention.batched else gradient[number : number + 1]
        made = Leaves()
        for name, x in _returned(target, backward, made, own, call).items():
            if target._foreign(f"gradient of {name}", x, q):
                return {name: x}
            dtypes[name] = target.dtype_of(x)
            several.setdefault(name, []).append(_in_our_form(target, name, target.host(x), made, call))
    for name in ("bias", "sinks"):
        if f"{name} gradient" in problem.asks and name not in several:
            raise Lacking(target.convention.name, f"{name} gradient", f": {target.name} returns none")
    found: dict[str, Array | Seen] = {}
    for name, parts_of_it in several.items():
        x = np.asarray(getattr(problem, name))
        if name in "qkv":
            whole = np.concatenate(parts_of_it)[..., : x.shape[-1]]
            whole = whole.reshape(whole.shape[2:] if x.ndim == 2 else (*parts.batch, *whole.shape[1:]))
            total = summed_to(np, whole, x.shape)
        else:
            total = np.sum(parts_of_it, axis=0)
        found[name] = Seen(total, dtypes[name])
    return found


def _returned(
    target: ConventionTarget, backward: Callable[..., Any], made: Leaves, gradient: Array, call: OneCall
) -> dict[str, Array]:
    """What one call of the backward function gives, by our names; made keeps what became of bias and sinks."""
    convention, names = target.convention, target.convention.names
    with target.watched(made):
        given = target.given(call)
    if wanted := asked_of_forward(backward):
        before = dict(zip(FORWARD, target.raw(call, with_lse="lse" in wanted)))
        if "lse" in wanted and before["lse"] is None:
            raise Lacking(convention.name, "lse", f": {target.name} returned none, which its backward function takes")
        given |= {name: before[name] for name in wanted}
    widened = np.zeros(call.output_shape)
    widened[..., : gradient.shape[-1]] = gradient
    layout = convention.output_layout or convention.layout
    tensor = target.array(widened, call.parts.problem.dtype)
    tensor = pack(tensor, [call.parts.q_len] * call.parts.entries) if "T" in layout else lay(tensor, layout)
    by_position = convention.positional
    ordered = target.ordered(given)
    if "v" in by_position:
        ordered.insert(by_position.index("v") + 1, tensor)
    else:
        given["grad_output"] = tensor
    ours = {getattr(names, name): name for name in "qkv"}
    for name, parameters in (("bias", convention.parameters("bias")), ("sinks", (names.sinks,))):
        if made.keys(name):
            ours |= {str(parameter): name for parameter in parameters}
    try:
        returned = target.called(backward, ordered, given)
    except TypeError as refusal:
        if not (refused := refused_option(refusal, given)):
            raise
        need = ours.get(refused, refused)
        raise Lacking(convention.name, need, f": its backward function has no parameter {refused!r}") from refusal
    found = in_order(returned, list(dict.fromkeys(ours.values())), target.name)
    named = {ours.get(name, name): x for name, x in found.items()}
    return {name: x for name, x in named.items() if name in "qkv" or made.keys(name)}


def _in_our_form(target: ConventionTarget, name: str, x: Array, made: Leaves, call: OneCall) -> Array:
    """A gradient of q, k or v as (B, heads, tokens, width), one of bias or sinks in the problem's own shape."""
    if name not in "qkv":
        (key,) = made.keys(name)
        _check_shape(name, x, made.shape(key))
        return made.summed(name, {key: x}, call.parts.problem)
    layout, tensor = str(target.convention.layout), getattr(call, name)
    entries, heads, tokens, width = (int(size) for size in tensor.shape)
    if "T" in layout:
        counts = [tokens] * entries if name == "q" or call.parts.counts is None else [int(n) for n in call.parts.counts]
        _check_shape(name, x, (sum(counts), heads, width))
        whole, start = np.zeros((entries, tokens, heads, width)), 0
        for entry, count in enumerate(counts):
            whole[entry, :count] = x[start : start + count]
            start += count
        return np.swapaxes(whole, 1, 2)
    expected = expected_shape(layout, (entries, heads, tokens, width))
    _check_shape(name, x, expected)
    if "B" not in layout:
        x, layout = x[None], f"B{layout}"
    return np.transpose(x, tuple(layout.index(letter) for letter in "BHSD"))


def _check_shape(name: str, x: Array, expected: tuple[int, ...]) -> None:
    if x.shape != expected:
        raise Misshapen("D1", f"the gradient of {name} has shape {x.shape}, expected {expected}, that of the argument")
