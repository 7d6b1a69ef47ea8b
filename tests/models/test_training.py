"""A training step of small decoders with attention in float32: gradients of all parameters, within a derived bound.

Everything but attention is in float64, so that what differs is attention's doing. There q, k, v, sinks and the
gradient of the output are rounded to float32, and the output and the gradients err by the bounds that refattn derives
for them. The exact step's second derivatives carry these errors to the parameters' gradients, to first order; an
error of a gradient on its way is carried as an error of a value is.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from models.attention_functions import Attention, register, scaled_one_percent_off
from models.decoder_bound import Watched, eager_attention, golden, plain_attention, worst
from models.decoders import DECODERS, batch, build
from models.error_bound import UNIT_ROUNDOFF
from models.judged import LENGTH, inputs
from refattn.golden_gradients import GoldenGradients
from refattn_backends.transformers import attention_forward

PICKED = 3  # components of each parameter
ROUNDOFF = UNIT_ROUNDOFF[torch.float32]


class Trained(NamedTuple):
    """Some components of the gradients of all parameters, and their bounds if attention is in float32."""

    gradients: Tensor
    bounds: Tensor


class Term(NamedTuple):
    """A tensor of the exact step, and what it may be wrong by."""

    tensor: Tensor
    bound: Tensor


def step(name: str, attention: Attention) -> tuple[Any, Tensor]:
    """A float64 decoder, and its loss over a batch with right padding, the next token being the one to predict."""
    model, given, watched = build(DECODERS[name], torch.float64).requires_grad_(True), batch("right", LENGTH), Watched()
    register("trained", watched.unseen(attention))
    model.set_attn_implementation("trained")
    with watched:
        logits = model(**inputs(given), use_cache=False).logits
    targets = torch.where(given.keep == 1, given.ids, -100)[:, 1:]
    return model, torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())


def picked(model: Any, gradients: tuple[Tensor, ...]) -> Tensor:
    """Drawn components of each gradient, of the embedding's those of words that occur."""
    generator, found = torch.Generator().manual_seed(3), []
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient.shape == parameter.shape
        used = torch.arange(gradient.numel())
        if parameter is model.get_input_embeddings().weight:
            used = used.reshape(gradient.shape)[batch("right", LENGTH).ids[-1]].flatten()  # words that occur
        found.append(gradient.flatten()[used[torch.randperm(len(used), generator=generator)[:PICKED]]])
    return torch.cat(found)


@cache
def exact_step(name: str) -> Trained:
    """The step in float64, and what attention in float32 can do to its gradients."""
    calls: list[tuple[dict[str, Tensor], Any, Tensor]] = []
    adjoints: dict[tuple[int, str], Tensor] = {}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, None]:
        output, _ = plain_attention(module, q, k, v, mask, **options)
        arguments = {"q": q, "k": k, "v": v}
        if (sinks := options.get("s_aux")) is not None:
            arguments["sinks"] = sinks
        for key, x in (arguments | {"output": output}).items():
            x.register_hook(partial(adjoints.__setitem__, (len(calls), key)))
        detached = {key: x.detach() if torch.is_tensor(x) else x for key, x in options.items()}
        calls.append((arguments, golden(module, q, k, v, mask, **detached), output))
        return output, None

    model, loss = step(name, attend)
    gradients = torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)
    terms: list[Term] = []
    for place, (arguments, exact, output) in enumerate(calls):
        adjoint = adjoints[place, "output"]
        terms += [Term(output, worst(exact, torch.float32)), Term(adjoint, ROUNDOFF * adjoint.detach().abs())]
        shapes = {key: tuple(x.shape) for key, x in arguments.items()}
        of_gradients = GoldenGradients(exact, adjoint.detach().transpose(1, 2).numpy(), shapes)
        bounds = of_gradients.bounds("float32", coherent=True)
        for key, x in arguments.items():
            found = adjoints[place, key].detach()
            assert torch.allclose(found, torch.from_numpy(of_gradients.values[key]), rtol=1e-9, atol=1e-12)
            terms += [Term(x, ROUNDOFF * x.detach().abs()), Term(adjoints[place, key], torch.from_numpy(bounds[key]))]
    chosen = picked(model, gradients)
    bound = torch.zeros(len(chosen), dtype=torch.float64)
    reached, tensors = set(), [term.tensor for term in terms]
    for at, component in enumerate(chosen):
        derivatives = torch.autograd.grad(component, tensors, retain_graph=True, allow_unused=True)
        for which, (term, derivative) in enumerate(zip(terms, derivatives, strict=True)):
            if derivative is not None:  # an error below a layer says nothing of the gradients above it
                bound[at] += (derivative.abs() * term.bound).sum()
                reached.add(which)
    assert len(reached) == len(terms)
    return Trained(chosen.detach(), bound)


def in_float32(attention: Attention) -> Attention:
    """Attention in float32 for a layer in float64, forward and backward."""

    def attend(module: Any, *tensors: Tensor, **options: Any) -> tuple[Tensor, None]:
        cast = {key: x.float() if torch.is_tensor(x) else x for key, x in options.items()}
        output, _ = attention(module, *(x.float() if x.dtype == torch.float64 else x for x in tensors), **cast)
        assert output.dtype == torch.float32
        return output.double(), None

    return attend


def ratio(name: str, exact: Trained, attention: Attention) -> float:
    """The largest error over bound of a training step's gradients."""
    model, loss = step(name, in_float32(attention))
    actual = picked(model, torch.autograd.grad(loss, tuple(model.parameters()), materialize_grads=True))
    return float(((actual - exact.gradients).abs() / exact.bounds).nan_to_num(nan=torch.inf).max())


def without_gradient_of_keys(module: Any, q: Tensor, k: Tensor, *tensors: Tensor, **options: Any) -> Any:
    """A fault: keys get no gradient."""
    return attention_forward(module, q, k.detach(), *tensors, **options)


def half_the_group(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
    """A fault: the gradient of a shared value head is that of one query head in its group (D2)."""
    group = q.shape[1] // v.shape[1]
    v = torch.stack([v, *[v.detach()] * (group - 1)], 2).flatten(1, 2)
    return attention_forward(module, q, k.repeat_interleave(group, 1), v, mask, **options)


def without_slope(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
    """A fault: gradients pass the soft cap as if it were not there (D5)."""
    cap, group = options["softcap"], q.shape[1] // k.shape[1]
    scores = options["scaling"] * (q @ k.repeat_interleave(group, 1).mT)
    capped = scores + (cap * torch.tanh(scores / cap) - scores).detach()
    weights = capped.masked_fill(~mask, -1e30).softmax(-1) * mask
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2), weights


def without_gradient_of_sinks(module: Any, *tensors: Tensor, **options: Any) -> Any:
    """A fault: sinks get no gradient (D6)."""
    return attention_forward(module, *tensors, **options | {"s_aux": options["s_aux"].detach()})


FAULTS = [
    *((name, fault) for name in DECODERS for fault in (scaled_one_percent_off, without_gradient_of_keys)),
    *((name, half_the_group) for name in DECODERS),
    ("Gemma2", without_slope),
    ("gpt-oss", without_gradient_of_sinks),
]


@pytest.mark.parametrize("name", DECODERS)
def test_gradients_of_a_training_step_keep_to_the_bound(name: str) -> None:
    """refattn's and eager's gradients keep to the bound of the exact ones, so to twice of it of each other."""
    exact = exact_step(name)
    ratios = {attention.__name__: ratio(name, exact, attention) for attention in (attention_forward, eager_attention)}
    print(f"error over bound: {ratios}")
    assert max(ratios.values()) <= 1


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_planted_fault_exceeds_the_bound_of_gradients(name: str, fault: Any) -> None:
    """Each fault, of the output or of a gradient alone, moves a gradient ten times as far as rounding can."""
    found = ratio(name, exact_step(name), fault)
    print(f"error over bound: {found:.2g}")
    assert 10 < found < torch.inf  # not by a NaN
