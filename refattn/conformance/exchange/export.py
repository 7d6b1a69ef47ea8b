"""`refattn cases export DIR`: inputs of cases as files, for a program in any language; nothing that is expected of it.

One folder for each case in one dtype, under a number that says nothing about it: the tensors, and case.json with
shapes and options. DIR/manifest.json says what was chosen, which is enough to make everything again, and the SHA-256 of
each tensor.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import Array
from refattn.conformance.captured import REQUIRED
from refattn.conformance.case import Case, Problem
from refattn.conformance.cases import all_cases
from refattn.conformance.exchange.bits import Tensor, tensor_of
from refattn.conformance.exchange.files import TensorFileError, write_npz, write_safetensors
from refattn.conformance.gradients import FILED
from refattn.conformance.records import DEFAULT_SEED
from refattn.conformance.runner import chosen_pairs
from refattn.dtypes import COMPUTED
from refattn.whole_files import write_whole

SCHEMA = "refattn.cases/1"
FORMATS = ("raw", "npz", "safetensors")
MANIFEST, DESCRIPTION = "manifest.json", "case.json"
INPUTS, OUTPUTS = "inputs", "outputs"
# Options, and what else a program may lack: rank other than 4, batch axes that broadcast, results beside the output.
FEATURES = (
    *("causal", "mask", "bias", "scale", "softcap", "sinks", "q_start", "k_start"),
    *("gqa", "rank", "batch", "lse", "weights"),
)
# Clauses of which files show nothing: inputs written to, strides, answers that change from call to call.
UNSEEN = {"A7", "N4"}
TENSORS = ("q", "k", "v", "mask", "bias", "sinks")
# Of cases about gradients alone.
WITH_GRADIENTS = (*TENSORS, "grad_output")
WORDS = {
    "layout": "q (..., H, Lq, d_k), k (..., Hkv, Lk, d_k), v (..., Hkv, Lk, d_v), output (..., H, Lq, d_v), in C order",
    "raw": "NAME.bin holds the elements of a tensor, little-endian",
    "npz": "inputs.npz holds the tensors by name; bfloat16 as its bit patterns in uint16",
    "safetensors": "inputs.safetensors holds the tensors by name",
    "case.json": "one key a line; null stands for an option or a tensor that the call does not have",
    "mask": "one byte for each pair of query and key (..., H, Lq, Lk), 1 = visible; with causal both must hold",
    "bias": "added to scaled, capped scores (..., H, Lq, Lk)",
    "causal": "key j is visible to query i if k_start + j <= q_start + i; q_start null is 0",
    "q_start, k_start": "a number, or one for each entry of the batch",
    "scale": "null is 1 / sqrt(d_k)",
    "softcap": "null is none; else softcap * tanh(scaled / softcap)",
    "sinks": "(H,): one logit more in each row's softmax, without a value",
    "output": "in the dtype of q, beside the inputs: output.bin, or output in outputs.npz or outputs.safetensors",
    "lse": "optional, likewise: natural log-sum-exp (..., H, Lq) in float32, of float64 in float64",
    "weights": "optional, likewise: (..., H, Lq, Lk) in the dtype of lse",
}
GRADIENT_WORDS = {
    "grad_output": "gradient of the output, in the dtype and shape of it",
    "output": "optional in cases of gradients, but judged if it is there",
    "grad_q, grad_k, grad_v": "gradients of sum(grad_output * output), each of the dtype and shape of its argument",
    "grad_bias, grad_sinks": "likewise; a case that is about one of them is not judged without it",
}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which cases are exported, in which form. Everything that is written follows from it."""

    format: str = "raw"
    dtypes: tuple[str, ...] = COMPUTED
    # None stands for all of them.
    clauses: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None
    limit: int | None = None
    seed: int = DEFAULT_SEED
    # The cases about gradients, or else all others.
    gradients: bool = False


class Exported(NamedTuple):
    """One case in one dtype, as it is written."""

    folder: str
    case: Case
    problem: Problem
    tensors: dict[str, Tensor]

    @property
    def needs(self) -> tuple[str, ...]:
        """What the program must know."""
        return needs_of(self.problem)

    def description(self) -> dict[str, Any]:
        """What case.json holds."""
        problem = self.problem
        tensors = TENSORS if problem.grad_output is None else WITH_GRADIENTS
        shapes = {name: list(x.shape) if (x := self.tensors.get(name)) is not None else None for name in tensors}
        *lead, q_len, k_len = problem.scores_shape
        options = {name: getattr(problem, name) for name in ("causal", "scale", "softcap", "q_start", "k_start")}
        return {
            "dtype": problem.dtype,
            **shapes,
            **{name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in options.items()},
            "output": [*lead, q_len, problem.v.shape[-1]],
            "lse": [*lead, q_len],
            "weights": [*lead, q_len, k_len],
            **({} if problem.grad_output is None else {FILED[name]: shapes[name] for name in FILED}),
        }

    def entry(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {
            "folder": self.folder,
            "case": self.case.name,
            "clauses": list(self.case.clauses),
            "dtype": self.problem.dtype,
            "needs": list(self.needs),
            "sha256": {name: tensor.digest() for name, tensor in self.tensors.items()},
        }


def exported(selection: Selection) -> Iterator[Exported]:
    """The cases of a selection, the plainest first, without those about memory and repeated calls."""
    labels = None if selection.clauses is None else frozenset(selection.clauses)
    known = None if selection.features is None else set(selection.features)
    count = 0
    for case, dtype in chosen_pairs(all_cases(), labels, selection.dtypes):
        if (
            case.build is None
            or UNSEEN & set(case.clauses)
            or (selection.limit is not None and count >= selection.limit)
        ):
            continue
        problem = case.problem(dtype, selection.seed)
        if (problem.grad_output is not None) != selection.gradients:
            continue
        if not (known is None or set(needs_of(problem)) <= known):
            continue
        count += 1
        yield Exported(f"{count:04d}", case, problem, _tensors(problem))


def export(
    folder: Path, selection: Selection, advance: Callable[[Exported], None] = lambda one: None
) -> list[Exported]:
    """Writes the cases of a selection into a folder, which must be new or empty. Raises TensorFileError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TensorFileError(f"{folder} is not an empty folder, and what lies there could be taken for results")
    new, found = not folder.exists(), list(exported(selection))
    try:
        for one in found:
            place = folder / one.folder
            place.mkdir(parents=True)
            write_whole(place / DESCRIPTION, in_lines(one.description()).encode())
            write_inputs(place, one.tensors, selection.format)
            advance(one)
        if found:
            text = json.dumps(manifest(selection, found), indent=1, ensure_ascii=False)
            write_whole(folder / MANIFEST, f"{text}\n".encode())
    except BaseException:  # some of the cases are none, and would be in the way of the next attempt
        for one in found:
            shutil.rmtree(folder / one.folder, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return found


def manifest(selection: Selection, found: list[Exported]) -> dict[str, Any]:
    """What manifest.json holds."""
    import refattn

    chosen = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(selection).items()}
    words = WORDS | GRADIENT_WORDS if selection.gradients else WORDS
    others = [form for form in FORMATS if form != selection.format]
    return {
        "schema": SCHEMA,
        "refattn": refattn.__version__,
        "selection": chosen,
        "words": {name: words for name, words in words.items() if name not in others},
        "cases": [one.entry() for one in found],
    }


def needs_of(problem: Problem) -> tuple[str, ...]:
    """The features out of FEATURES that a problem needs."""
    q, k, v = (x.shape for x in (problem.q, problem.k, problem.v))
    shape = {"rank": len(q) != 4, "batch": not q[:-3] == k[:-3] == v[:-3]}
    needed = {*problem.needs, *(name for name, used in shape.items() if used)}
    return tuple(name for name in FEATURES if name in needed)


def in_lines(description: dict[str, Any]) -> str:
    """JSON with one key a line, which is found without a parser."""
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in description.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_inputs(folder: Path, tensors: dict[str, Tensor], form: str) -> None:
    """The tensors of one case in one of FORMATS."""
    if form == "npz":
        write_npz(folder / f"{INPUTS}.npz", tensors)
    elif form == "safetensors":
        write_safetensors(folder / f"{INPUTS}.safetensors", tensors)
    else:
        for name, tensor in tensors.items():
            write_whole(folder / f"{name}.bin", tensor.data())


def _tensors(problem: Problem) -> dict[str, Tensor]:
    """Mask and bias in full, so that no program has to broadcast them."""
    found: dict[str, Array | None] = {
        name: getattr(problem, name) for name in (*REQUIRED, "bias", "sinks", "grad_output")
    }
    found["mask"] = problem.shown
    for name in ("mask", "bias"):
        if (values := found[name]) is not None:
            found[name] = np.ascontiguousarray(np.broadcast_to(values, problem.scores_shape))
    dtypes = {"mask": None}
    return {
        name: tensor_of(values, dtypes.get(name, problem.dtype))
        for name in WITH_GRADIENTS
        if (values := found[name]) is not None
    }
