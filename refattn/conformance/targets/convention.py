"""A function that speaks another calling convention than refattn's: tensors in its layout, options under its names.

q, k and v lie in memory as the convention wants them, unless the problem is about memory. Where a call takes no batch,
there is one call for each entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from refattn.arrays import Array, library_of
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.conventions.convention import OPTIONS, Convention
from refattn.conformance.conventions.express import Lacking, Parts, express, features_of
from refattn.conformance.conventions.read import ConventionError, find_convention
from refattn.conformance.plain import numbers_of
from refattn.conformance.targets.base import Answer, ArrayTarget, Observed, TargetError, library_backend
from refattn.conformance.targets.convention_backward import gradients_of
from refattn.conformance.targets.function import load_function
from refattn.conformance.targets.layouts import Misshapen, OneCall, expected_shape, lay, pack, restored
from refattn.conformance.targets.leaves import Leaves, at_numbers
from refattn.conformance.targets.signatures import parameters_of


def by_convention(name: str, convention: str, library: str | None = None) -> ConventionTarget:
    """The target for a user's function that speaks a convention, which is named or in a file. Raises TargetError."""
    if ":" not in name:
        raise TargetError(
            f"a convention is for a function of your own, module:function or file.py:function, not {name}"
        )
    try:
        found = find_convention(convention)
    except ConventionError as fault:
        raise TargetError(str(fault)) from fault
    return ConventionTarget(name, found, library)


class ConventionTarget(ArrayTarget):
    """The function that "module:object" or "path.py:object" names, or is given, called by a convention.

    library and device are the convention's own and the backend's first, unless others are given.
    """

    def __init__(
        self,
        name: str,
        convention: Convention,
        library: str | None = None,
        function: Callable[..., Any] | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(library_backend(library or convention.library))
        self.name, self.device = name, device
        self._backward: Callable[..., Any] | None = None
        self._function = load_function(name) if function is None else function
        self.convention, self.notes = _narrowed(convention, self._function, name)
        self.dtypes = tuple(dtype for dtype in self.dtypes if dtype in convention.dtypes)
        self.features = features_of(self.convention)

    def unsupported(self, needs: tuple[str, ...], dtype: str) -> str:
        """See `ArrayTarget.unsupported`; a dtype that the convention does not name is its own doing."""
        if dtype not in self.convention.dtypes:
            return f"the convention {self.convention.name} has {', '.join(self.convention.dtypes)}, not {dtype}"
        return super().unsupported(needs, dtype)

    def array(self, host: Array, dtype: str | None = None) -> Array:
        """A host array in the target's library, on its device."""
        return self.backend.array(np.asarray(host), dtype, self.device)

    def observe(self, problem: Problem) -> Observed:
        """See `ArrayTarget.observe`; a log-sum-exp in base 2 becomes a natural one."""
        try:
            observed = super().observe(problem)
        except Misshapen as fault:
            label, words = fault.args
            return Observed(misshapen=(label, words), inputs={})
        lse = self.convention.lse
        if observed.lse is not None and lse is not None and lse.base == "2":
            return replace(observed, lse=observed.lse._replace(values=observed.lse.values * math.log(2)))
        return observed

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call, or one for each entry of the batch where the convention has no batch axis."""
        convention = self.convention
        if convention.dense_width and problem.layout in ("transposed", "sliced"):
            raise Unsupported(f"{self.name} needs the elements of a head's vector side by side in memory")
        if convention.equal_widths and problem.q.shape[-1] != problem.v.shape[-1]:
            raise Unsupported(f"{self.name} cannot express d_v other than d_k")
        if problem.literal and problem.window is not None and convention.window is None:
            raise Unsupported(f"{self.name} has no windows of its own")
        parts = Parts.of(problem)
        ones = [self._one_call(call) for call in self.calls(parts, q, k, v)]
        return self._whole(problem, parts, ones, q)

    def calls(self, parts: Parts, q: Array, k: Array, v: Array) -> list[OneCall]:
        """One call, or one for each entry of the batch where the convention has no batch axis."""
        q, k, v = (self._with_one_batch_axis(x, parts) for x in (q, k, v))
        (q, k, v), scale = self._widened(parts.problem, q, k, v)
        if self.convention.batched:
            return [OneCall(parts, scale, q, k, v)]
        if not parts.entries:
            raise Unsupported(f"{self.name} takes no batch, and this one is empty")
        return [OneCall(parts.entry(b), scale, *(x[b : b + 1, ...] for x in (q, k, v))) for b in range(parts.entries)]

    def differentiate(self, backward: str = "") -> None:
        """Gradients by the library's own differentiation, or by a function of the user's that speaks the convention."""
        if backward:
            self._backward, self.gradients = load_function(backward), self.offered_gradients()
        else:
            super().differentiate()

    def with_gradients(self, problem: Problem, q: Array, k: Array, v: Array) -> Answer:
        """One call and its gradients."""
        if self._backward is None:
            return super().with_gradients(problem, q, k, v)
        answer = self.compute(problem, q, k, v, again=False)
        return answer._replace(gradients=gradients_of(self, self._backward, problem, q, k, v))

    def arguments(self, parts: Parts, q: Array, k: Array, v: Array) -> dict[str, Any]:
        """Parameter -> value of one call, but for q, k, v and the output; q, k and v are (B, H, tokens, width)."""
        if self._leaves is not None:
            return self._watched_arguments(self._leaves, parts)
        return {name: self._argument(value, parts.problem.dtype) for name, value in self.expressed(parts).items()}

    def _watched_arguments(self, leaves: Leaves, parts: Parts) -> dict[str, Any]:
        """The same where gradients are taken: bias and sinks are expressed by numbers, then those become values."""
        problem, names = parts.problem, self.convention.names
        parameters = {name: "bias" for name in self.convention.parameters("bias") if problem.bias is not None}
        parameters |= {names.sinks: "sinks"} if names.sinks and problem.sinks is not None else {}
        numbered = replace(problem, sinks=None if problem.sinks is None else numbers_of(problem.sinks))
        found: dict[str, Any] = {}
        for parameter, value in self.expressed(replace(parts, problem=numbered, bias=parts.numbers)).items():
            name = parameters.get(parameter)
            if name is None:
                found[parameter] = self._argument(value, problem.dtype)
            else:
                array = self.array(at_numbers(getattr(problem, name), value), problem.dtype)
                found[parameter] = leaves.add(name, array, value)
        return found

    def expressed(self, parts: Parts) -> dict[str, Any]:
        """The same on the host. Raises Lacking."""
        return express(self.convention, parts)

    def tensors(self, parts: Parts, q: Array, k: Array, v: Array) -> dict[str, Any]:
        """q, k and v by the names of the parameters, in the convention's layout."""
        names, packed = self.convention.names, self.convention.packed
        if packed is None:
            return {getattr(names, name): lay(x, self.convention.layout) for name, x in (("q", q), ("k", k), ("v", v))}
        counts = [parts.k_len] * parts.entries if parts.counts is None else [int(n) for n in parts.counts]
        lengths = [parts.q_len] * parts.entries
        found = {names.q: pack(q, lengths), names.k: pack(k, counts), names.v: pack(v, counts)}
        for cumulative, most, of in ((packed.cu_q, packed.max_q, lengths), (packed.cu_k, packed.max_k, counts)):
            found[cumulative] = self.array(np.cumsum([0, *of], dtype=np.int32))
            if most:
                found[most] = max(of, default=0)
        return found

    def given(self, call: OneCall) -> dict[str, Any]:
        """All of one call, but for the output, by the names of the parameters."""
        given = self.tensors(call.parts, *call[2:]) | self.arguments(call.parts, *call[2:])
        scale = self.convention.names.scale
        return given | {scale: call.scale} if scale and call.scale is not None else given

    def ordered(self, given: dict[str, Any]) -> list[Any]:
        """What is passed by position, in order, taken out of what is given."""
        found: list[Any] = []
        for argument in self.convention.positional:
            own = (argument,) if argument in self.convention.fixed else self.convention.parameters(argument)
            found += [given.pop(name) for name in own]
        return found

    def result(self, returned: Any, position: int) -> Any:
        """What a function returned at a position; None if there is nothing."""
        if not isinstance(returned, (tuple, list)):
            return returned if position == 0 else None
        return returned[position] if position < len(returned) else None

    def raw(self, call: OneCall, with_lse: bool = False) -> tuple[Any, Any]:
        """Output and log-sum-exp as the function gives them, None for what it does not give."""
        convention, names = self.convention, self.convention.names
        given = self.given(call) | (convention.ask.get("lse", {}) if with_lse else {})
        if names.output:
            # A value that no attention gives, so that what is not written shows.
            empty = np.full(expected_shape(convention.output_layout or convention.layout, call.output_shape), np.nan)
            given[names.output] = self.array(empty, call.parts.problem.dtype)
        buffer = given.get(names.output) if names.output else None
        ordered = self.ordered(given)
        returned = self.called(self._function, ordered, given)
        lse = self.result(returned, convention.lse.position) if convention.lse else None
        return buffer if names.output else self.result(returned, 0), lse

    def called(self, function: Callable[..., Any], ordered: list[Any], given: dict[str, Any]) -> Any:
        """What a function returns. Raises Unsupported where it refuses."""
        try:
            return function(*ordered, **given)
        except NotImplementedError as refusal:
            raise Unsupported(f"{self.name} does not do this: {refusal}") from refusal

    def _one_call(self, call: OneCall) -> tuple[Any, Any]:
        """Output (B, H, Lq, d_v) and log-sum-exp (B, H, Lq) or None, or what came instead of arrays."""
        convention, shape = self.convention, call.output_shape
        output, lse = self.raw(call)
        if self._foreign("output", output, call.q):
            return output, None
        output = restored(output, convention.output_layout or convention.layout, shape, "output", "A1")
        if lse is not None and convention.lse is not None and not self._foreign("lse", lse, call.q):
            lse = restored(lse, convention.lse.axes, shape[:3], "log-sum-exp", "P4")
        if lse is None and "lse" in call.parts.problem.asks:
            raise Lacking(convention.name, "lse", f": {self.name} returned none")
        return output, lse

    def _whole(self, problem: Problem, parts: Parts, ones: list[tuple[Any, Any]], like: Array) -> Answer:
        """The answers of all calls as one, in the shape of the problem; like is an array of the calls."""
        rank2, whole = problem.q.ndim == 2, []
        for number, name in enumerate(("output", "lse")):
            several = [one[number] for one in ones]
            if any(x is None or self._foreign(name, x, like) for x in several):
                whole.append(several[0])
                continue
            xp = library_of(several[0], name).xp
            x = several[0] if len(several) == 1 else xp.concat(several, axis=0)
            x = x[..., : problem.v.shape[-1]] if name == "output" else x
            shape = x.shape[2:] if rank2 else (*parts.batch, *x.shape[1:])
            whole.append(xp.reshape(x, tuple(shape)))
        return Answer(*whole)

    def _argument(self, value: Any, dtype: str) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.kind == "f":
            return self.array(value, dtype if value.dtype == np.float64 else "float32")
        return self.plain(value)

    def _with_one_batch_axis(self, x: Array, parts: Parts) -> Array:
        xp = library_of(x, "x").xp
        if x.ndim == 2:
            return xp.reshape(x, (1, 1, *x.shape))
        whole = (*parts.batch, *x.shape[-3:])
        x = x if tuple(x.shape) == whole else xp.broadcast_to(x, whole)
        return x if x.ndim == 4 else xp.reshape(x, (parts.entries, *x.shape[-3:]))

    def _widened(self, problem: Problem, *qkv: Array) -> tuple[list[Array], float | None]:
        """Filled up with zeros to a width that there is, with the scale of the width that it was."""
        widths, d_k = self.convention.widths, int(problem.q.shape[-1])
        if not widths or all(x.shape[-1] in widths for x in qkv):
            return list(qkv), None
        if max(int(x.shape[-1]) for x in qkv) > max(widths) or not self.convention.names.scale:
            raise Unsupported(f"{self.name} has no heads of width {d_k}; there are {', '.join(map(str, widths))}")
        filled = []
        for x in qkv:
            missing = min(width for width in widths if width >= x.shape[-1]) - int(x.shape[-1])
            zeros = self.array(np.zeros((*x.shape[:-1], missing)), problem.dtype)
            filled.append(library_of(x, "x").xp.concat((x, zeros), axis=-1))
        default = 1 / math.sqrt(d_k) if d_k else 1.0
        return filled, default if problem.scale is None else problem.scale

    def _laid_out(self, host: Array, problem: Problem) -> Array:
        """In memory as the convention's layout has it, unless the problem wants something else; a view, though."""
        layout = self.convention.layout
        if problem.layout != "contiguous" or host.ndim < 3 or layout in ("BHSD", "HSD"):
            return super()._laid_out(host, problem)
        moved, to = (host, 0) if layout == "SBHD" else (host, -3)
        stored = self.array(np.ascontiguousarray(np.moveaxis(moved, -2, to)), problem.dtype)
        return library_of(stored, "x").xp.moveaxis(stored, to, -2)


def _narrowed(convention: Convention, function: Callable[..., Any], name: str) -> tuple[Convention, tuple[str, ...]]:
    """The convention without what the function's signature lacks, and a note that names that. Raises TargetError."""
    parameters = parameters_of(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):  # try everything
        return convention, ()
    known = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    for parameter, key in _required(convention).items():
        if parameter not in known:
            raise TargetError(
                f"{name} has no parameter {parameter!r}, which the convention {convention.name} needs ({key})"
            )
    lacks: list[str] = []
    tables: dict[str, Any] = {}
    names: dict[str, Any] = {}
    for option in OPTIONS:
        needed = () if option in convention.positional else convention.parameters(option)
        if absent := [one for one in needed if one not in known]:
            lacks += absent
            (names if hasattr(convention.names, option) else tables)[option] = None
    if names.get("q_start", "") is None:
        raise TargetError(f"{name} has no parameter {convention.names.q_start!r}, by which {convention.name} aligns")
    for key, without in (("lse", None), ("grouped", False)):
        if absent := [one for one in convention.ask.get(key, {}) if one not in known]:
            lacks += absent
            tables[key] = without
    if not lacks:
        return convention, ()
    off = {key: value for key, value in convention.off.items() if key not in {*tables, *names}}
    narrowed = replace(convention, off=off, names=replace(convention.names, **names), **tables)
    return narrowed, (f"the signature lacks of the convention {convention.name}: {', '.join(lacks)}",)


def _required(convention: Convention) -> dict[str, str]:
    """The parameters without which no call can be made, with the convention's key for each."""
    by_name = [key for key in ("q", "k", "v") if key not in convention.positional]
    found = {getattr(convention.names, key): key for key in by_name}
    found |= {parameter: "fixed" for parameter in convention.fixed if parameter not in convention.positional}
    found |= {convention.names.output: "output"} if convention.names.output else {}
    if (packed := convention.packed) is not None:
        found |= {one: "packed" for one in (packed.cu_q, packed.cu_k, packed.max_q, packed.max_k) if one}
    return found
