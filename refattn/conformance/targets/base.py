"""What every target shares: arrays in the problem's memory layout, a second call, a look at the inputs afterwards.

What a target does stands apart from what follows from it: `observe` calls and looks, `result_of` compares, and the two
may run in different processes.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from refattn.arrays import SPELLINGS, Array, device_of, library_of
from refattn.backend import Backend
from refattn.conformance.case import GRADIENTS, Api, Problem
from refattn.conformance.judge import OF, Result
from refattn.conformance.plain import Draw
from refattn.conformance.targets.answer import Answer as Answer
from refattn.conformance.targets.answer import Arrays
from refattn.conformance.targets.answer import Seen as Seen
from refattn.conformance.targets.answer import TargetError as TargetError
from refattn.conformance.targets.answer import in_words as in_words
from refattn.conformance.targets.differentiable import Differentiable
from refattn.conformance.targets.memory import Guarded, guarded, poison, shares_memory
from refattn.dtypes import COMPUTED, dtype_name
from refattn.errors import NotAnArrayError, RefattnError

# Root module of an array's class -> what people call the library.
LIBRARIES = {**SPELLINGS, "jaxlib": "JAX", "array_api_strict": "array-api-strict", "mlx": "MLX"}


class WorkerError(Exception):
    """How a call in a process of its own ended: a verdict, a message, the place in the target's code, a traceback."""

    def __init__(self, verdict: str, message: str, place: str = "", trace: str = "", kind: str = "") -> None:
        super().__init__(message)
        self.verdict, self.place, self.trace = verdict, place, trace
        # The class of the error that the target raised, if it did.
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What came of the calls on one problem, before anything is compared."""

    # What came instead of an array of q's library and device, in words; then nothing else is given.
    foreign: str = ""
    # Or the label of the clause that a wrong shape breaks, and words; then neither.
    misshapen: tuple[str, str] | None = None
    output: Seen | None = None
    lse: Seen | None = None
    weights: Seen | None = None
    gradients: dict[str, Seen] = field(default_factory=dict)
    # The output of the second call, and of one more after a call with other inputs, if there was one.
    second: Seen | None = None
    third: Seen | None = None
    # q, k and v after the calls, as float64.
    inputs: dict[str, Array]
    # The inputs beside which something was written, and those that the output shares memory with.
    beside: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


class Target(Protocol):
    """An implementation that can be called."""

    name: str
    dtypes: tuple[str, ...]
    # Whether refattn computes its answers, so that they are no second opinion; None if nobody looked.
    built_on_refattn: bool | None
    # Whether it runs in a process of its own.
    isolated: bool

    def versions(self) -> dict[str, str]:
        """The libraries that the verdict is about, with their versions."""

    notes: tuple[str, ...]

    def unsupported(self, needs: tuple[str, ...], dtype: str) -> str:
        """Why a problem with these needs cannot be expressed, or an empty string."""

    def missing(self, needs: tuple[str, ...], dtype: str) -> tuple[str, ...]:
        """The dtype, or those of the needs, that the target lacks."""

    def hint(self, fault: BaseException) -> str:
        """What may help against an error that a call raised, to be added to its message; or an empty string."""

    def call(self, problem: Problem) -> Result:
        """Run the implementation on a problem."""

    def api(self, draw: Draw) -> Api | None:
        """What checks of refattn's own functions get, or None for a foreign implementation."""

    def close(self) -> list[float]:
        """Ends what belongs to the target; when the processes began that it had left running, as time.time()."""


class ArrayTarget(Differentiable):
    """A target on the arrays of one backend; subclasses say what they support and make one call."""

    name: str
    # What a user should know about how the target is called.
    notes: tuple[str, ...] = ()
    built_on_refattn: bool | None = None
    isolated = False
    # Whether it is called between bands of NaN, on poisoned memory, and for half of the problems once more after a call
    # with other data.
    distrusted = True
    # The dtypes that it computes in, where its library has more.
    dtypes: tuple[str, ...] = COMPUTED

    def __init__(self, backend: Arrays) -> None:
        self.backend = backend
        self.dtypes = tuple(dtype for dtype in backend.dtypes if dtype in self.dtypes)

    def versions(self) -> dict[str, str]:
        """The version of the array library."""
        return {self.backend.name: self.backend.version() or "unknown"}

    def unsupported(self, needs: tuple[str, ...], dtype: str) -> str:
        """Names the dtype or the features that are missing."""
        if dtype not in self.dtypes:
            advice = " (install ml_dtypes for it)" if dtype == "bfloat16" and self.backend.name == "numpy" else ""
            return f"{self.name} has no {dtype} here{advice}"
        missing = self.missing(needs, dtype)
        return f"{self.name} cannot express {', '.join(missing)}" if missing else ""

    def missing(self, needs: tuple[str, ...], dtype: str) -> tuple[str, ...]:
        """The dtype alone, if it is lacking; else the features."""
        if dtype not in self.dtypes:
            return (dtype,)
        plain = needs if self.features is None else self.features
        return tuple(need for need in needs if need not in (self.gradients if need in GRADIENTS else plain))

    def hint(self, fault: BaseException) -> str:
        """Nothing; functions of the user's own know more."""
        return ""

    def api(self, draw: Draw) -> Api | None:
        """None: checks are about refattn's own functions."""
        return None

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """One call; `again` is the second, whose output alone matters. Raises Unsupported."""
        raise NotImplementedError

    def array(self, host: Array, dtype: str | None = None) -> Array:
        """A host array in the target's library; None keeps a dtype that is not floating."""
        return self.backend.array(np.asarray(host), dtype)

    def plain(self, host: Array) -> Array:
        """Masks, counts and ids in the target's library."""
        host = np.asarray(host)
        return self.array(host.astype(np.int32) if host.dtype.kind == "i" else host)

    def host(self, x: Array) -> Array:
        """The values of a floating array of the target, as float64."""
        return np.asarray(self.backend.host(x), dtype=np.float64)

    def dtype_of(self, x: Array) -> str:
        """The plain name of an array's dtype."""
        return dtype_name(x.dtype)

    def close(self) -> list[float]:
        """Nothing was started, and nothing is known of what the implementation did."""
        return []

    def call(self, problem: Problem) -> Result:
        """Two calls on the same inputs, and what follows from them."""
        return result_of(problem, self.observe(problem))

    def observe(self, problem: Problem) -> Observed:
        """Two or three calls on the same inputs, in the problem's memory layout, and a look at the inputs afterwards.

        The first answer is read after the calls that surround it, if there are any.
        """
        more = self.distrusted and not problem.among_others and zlib.crc32(problem.q.tobytes()) % 2
        placed = {name: self._placed(getattr(problem, name), problem) for name in ("q", "k", "v")}
        stored = {name: one.view for name, one in placed.items()}
        answer = self._first(problem, stored)
        parts = {"output": answer.output, "log-sum-exp": answer.lse, "weights": answer.weights}
        parts |= {f"{OF}{name}": x for name, x in answer.gradients.items() if not isinstance(x, Seen)}
        for what, array in parts.items():
            if foreign := self._foreign(what, array, stored["q"]):
                return Observed(foreign=foreign, inputs={})
        shared = tuple(name for name, x in stored.items() if shares_memory(answer.output, x))
        output = self._read(answer.output)
        lse, weights = (None if x is None else self._read(x) for x in (answer.lse, answer.weights))
        gradients = {name: self._read(x) for name, x in answer.gradients.items()}
        later = [self._again(problem, stored)]
        if more:
            self._other_call(problem)
            later.append(self._again(problem, stored))
        for one in later:
            if foreign := self._foreign("output of a later call", one, stored["q"]):
                return Observed(foreign=foreign, inputs={})
        buffers = {name: (one, self.host(one.buffer)) for name, one in placed.items() if one.buffer is not None}
        return Observed(
            output=output,
            lse=lse,
            weights=weights,
            gradients=gradients,
            second=self._read(later[0]),
            third=self._read(later[1]) if more else None,
            inputs={name: self.host(x) for name, x in stored.items()},
            beside=tuple(name for name, (one, host) in buffers.items() if one.written_beside(host)),
            shared=shared,
        )

    @property
    def _in_place(self) -> bool:
        """Whether memory is worth a look: it is not refattn's own, and arrays of the library can be written to."""
        return self.distrusted and "mutable" in self.backend.capabilities

    def _first(self, problem: Problem, stored: dict[str, Array]) -> Answer:
        """The answer to the first call: on poisoned memory, and between other calls where the problem asks for them."""
        if problem.among_others:
            self._other_call(problem)
        if self._in_place:
            poison(self, [(*problem.q.shape[:-1], problem.v.shape[-1]), problem.q.shape[:-1]], problem.dtype)
        if problem.grad_output is None:
            answer = self.compute(problem, **stored, again=False)
        else:
            answer = self.with_gradients(problem, **stored)
        if problem.among_others:
            self._other_call(problem)
        return answer

    def _again(self, problem: Problem, stored: dict[str, Array]) -> Array:
        """The output of the same call once more, followed by the library if the first was."""
        if problem.grad_output is not None and self.followed:
            return self.with_gradients(problem, **stored).output
        return self.compute(problem, **stored, again=True).output

    def _other_call(self, problem: Problem) -> None:
        """A call with other data that is forgotten: no answer may come from it, or change with it."""
        self.compute(problem, **{name: self._laid_out(-getattr(problem, name), problem) for name in "qkv"}, again=False)

    def _read(self, x: Any) -> Seen:
        if isinstance(x, Seen):
            return x
        return Seen(self.host(x).copy(), self.dtype_of(x))  # a later call may write into the same memory

    def _foreign(self, what: str, x: Any, like: Any) -> str:
        """What x is, in words, if it is no array of the library and device of `like`.

        None stands for what is not offered. A class that only says that it is of the library is not.
        """
        if x is None and "output" not in what:
            return ""
        if _library_of(x) == _library_of(like):
            if type(x) is not type(like) and not _stands_in_its_module(type(x)):
                return f"the {what} is {in_words(x)} that is no class of {_library_of(x)}"
            there, here = (_device(one) for one in (x, like))
            return f"the {what} is on {there}, expected {here}, where q is" if there != here else ""
        expected = LIBRARIES.get(_library_of(like), _library_of(like))
        if not (hasattr(x, "dtype") and hasattr(x, "shape")):
            return f"the {what} is {in_words(x)}, expected an array of {expected}"
        return f"the {what} is an array of {LIBRARIES.get(_library_of(x), _library_of(x))}, expected {expected}"

    def _placed(self, host: Array, problem: Problem) -> Guarded:
        """The values as the problem wants them in memory; where it wants nothing, between bands of NaN."""
        if self._in_place and problem.layout == "contiguous":
            return guarded(self, host, problem.dtype)
        return Guarded(self._laid_out(host, problem), None)

    def _laid_out(self, host: Array, problem: Problem) -> Array:
        """The values as an array that lies in memory as the problem wants it."""
        if problem.layout == "permuted":  # (..., tokens, heads, width), as projections leave it
            return self._swap(self.array(_swapped(host, -2, -3), problem.dtype), -2, -3)
        if problem.layout == "transposed":  # width before tokens
            return self._swap(self.array(_swapped(host, -1, -2), problem.dtype), -1, -2)
        if problem.layout == "sliced":  # a view inside a buffer full of NaN
            buffer = np.full((*host.shape[:-2], host.shape[-2] + 2, 2 * host.shape[-1]), np.nan)
            buffer[..., 1:-1, ::2] = host
            return self.array(buffer, problem.dtype)[..., 1:-1, ::2]
        if problem.layout == "expanded":  # one head for all, with a stride of 0
            head = self.array(host[..., :1, :, :], problem.dtype)
            return self.expanded(head, host.shape)
        if problem.layout == "reversed":  # tokens backwards, with a negative stride where the library has such views
            turned = self.array(host[..., ::-1, :].copy(), problem.dtype)
            return self.flipped(turned)
        return self.array(host, problem.dtype)

    def expanded(self, x: Array, shape: tuple[int, ...]) -> Array:
        """x broadcast to a shape, as a view where the library has views."""
        return library_of(x, "x").xp.broadcast_to(x, shape)

    def flipped(self, x: Array) -> Array:
        """The tokens of x backwards, likewise."""
        return library_of(x, "x").xp.flip(x, axis=-2)

    def _swap(self, x: Array, first: int, second: int) -> Array:
        if hasattr(x, "swapaxes"):
            return x.swapaxes(first, second)
        if not hasattr(x, "__array_namespace__"):
            return x.transpose(first, second)
        axes = list(range(x.ndim))
        axes[first], axes[second] = axes[second], axes[first]
        return x.__array_namespace__().permute_dims(x, tuple(axes))


def result_of(problem: Problem, observed: Observed) -> Result:
    """What was observed, compared: which inputs changed, and whether later calls gave the same bits."""
    if observed.misshapen:
        return Result(output=np.zeros(0), dtype="", misshapen=observed.misshapen)
    if observed.foreign or observed.output is None:
        return Result(output=np.zeros(0), dtype="", library=False, foreign=observed.foreign)
    changed = tuple(n for n, x in observed.inputs.items() if not _same_bits(x, np.asarray(getattr(problem, n))))
    # The judge alone knows whether a bias stands for an object, whose gradient would be another.
    gradients = {name: seen for name, seen in observed.gradients.items() if name in problem.differentiable}
    return Result(
        output=observed.output.values,
        dtype=observed.output.dtype,
        lse=None if observed.lse is None else observed.lse.values,
        lse_dtype="" if observed.lse is None else observed.lse.dtype,
        weights=None if observed.weights is None else observed.weights.values,
        gradients={name: seen.values for name, seen in gradients.items()},
        gradient_dtypes={name: seen.dtype for name, seen in gradients.items()},
        changed=changed,
        beside=observed.beside,
        shared=observed.shared,
        repeated=observed.second is not None and _same_bits(observed.output.values, observed.second.values),
        undisturbed=observed.third is None or _same_bits(observed.output.values, observed.third.values),
    )


def library_backend(name: str) -> Backend:
    """The backend of that name with its library installed. Raises TargetError, in one sentence."""
    from refattn import registry

    try:
        backend = registry.get(name)
    except RefattnError as error:
        raise TargetError(str(error)) from error
    if not backend.installed():
        advice = f"pip install {backend.distributions[0]}"
        raise TargetError(f"{name} needs the library {backend.library!r}, which is not installed: {advice}")
    if name == "jax":
        # Without its switch JAX has no float64; a judge decides that for the whole run, before any array is made.
        import jax

        jax.config.update("jax_enable_x64", True)
    if not backend.devices():
        raise TargetError(f"{name} is installed, but no device here can run it")
    return backend


def _device(x: Any) -> Any:
    """The device of an array; None where it has none to speak of, or its library is none that refattn computes with."""
    try:
        return device_of(library_of(x, "x"), x)
    except NotAnArrayError:
        return None


def _library_of(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _stands_in_its_module(cls: type) -> bool:
    """Whether a class is found under the name that it goes by: a parameter of torch is, a pretender is not."""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls


def _swapped(host: Array, first: int, second: int) -> Array:
    return np.ascontiguousarray(np.swapaxes(host, first, second))


def _same_bits(x: Array, y: Array) -> bool:
    return x is y or (x.shape == y.shape and bool(np.array_equal(x, y, equal_nan=True)))
