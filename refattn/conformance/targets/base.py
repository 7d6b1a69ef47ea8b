"""What every target shares: arrays in the problem's memory layout, a second call, a look at the inputs afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from refattn.arrays import Array, library_of
from refattn.backend import Backend
from refattn.conformance.case import Api, Problem
from refattn.conformance.judge import Result
from refattn.conformance.plain import Draw
from refattn.dtypes import dtype_name
from refattn.errors import RefattnError

# Root module of an array's class -> what people call the library.
LIBRARIES = {
    "numpy": "NumPy",
    "torch": "PyTorch",
    "jaxlib": "JAX",
    "jax": "JAX",
    "cupy": "CuPy",
    "dask": "Dask",
    "array_api_strict": "array-api-strict",
    "mlx": "MLX",
    "tinygrad": "tinygrad",
}


class TargetError(Exception):
    """A target that cannot be called; the message says why, in one sentence, and what to do."""


class Answer(NamedTuple):
    """What one call gave, in the target's own arrays."""

    output: Array
    lse: Array | None = None
    weights: Array | None = None


class Target(Protocol):
    """An implementation that can be called."""

    name: str
    dtypes: tuple[str, ...]

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


class Arrays(Protocol):
    """What a target needs to know of an array library: a part of `refattn.backend.Backend`."""

    @property
    def name(self) -> str:
        """What the library is called in a report."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The names out of `COMPUTED` that arrays can have."""

    @property
    def capabilities(self) -> frozenset[str]:
        """Names out of `refattn.backend.CAPABILITIES`."""

    def version(self) -> str | None:
        """The library's version."""

    def array(self, host: Array, dtype: str | None = None, device: str | None = None) -> Array:
        """A copy of a host array as one of the library; None keeps a dtype that is not floating."""

    def host(self, x: Array) -> Array:
        """The values as a NumPy array."""


class ArrayTarget:
    """A target on the arrays of one backend; subclasses say what they support and make one call."""

    name: str
    # Features out of Problem.needs that the target can express; None means all.
    features: frozenset[str] | None = None
    # What a user should know about how the target is called.
    notes: tuple[str, ...] = ()

    def __init__(self, backend: Arrays) -> None:
        self.backend = backend
        self.dtypes = tuple(backend.dtypes)

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
        return () if self.features is None else tuple(need for need in needs if need not in self.features)

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

    def call(self, problem: Problem) -> Result:
        """Two calls on the same inputs, in the problem's memory layout, and a look at the inputs afterwards.

        The first answer is read after the calls that surround it, if there are any.
        """
        inputs = {name: getattr(problem, name) for name in ("q", "k", "v")}
        stored = {name: self._laid_out(x, problem) for name, x in inputs.items()}
        self._other_call(problem)
        answer = self.compute(problem, **stored, again=False)
        self._other_call(problem)
        for what, array in (("output", answer.output), ("log-sum-exp", answer.lse), ("weights", answer.weights)):
            if foreign := self._foreign(what, array, stored["q"]):
                return Result(output=np.zeros(0), dtype="", library=False, foreign=foreign)
        output, dtype = self._read(answer.output)
        lse, lse_dtype = (None, "") if answer.lse is None else self._read(answer.lse)
        weights = None if answer.weights is None else self._read(answer.weights)[0]
        second = self._read(self.compute(problem, **stored, again=True).output)[0]
        changed = tuple(n for n, x in inputs.items() if not np.array_equal(self.host(stored[n]), x, equal_nan=True))
        return Result(
            output=output,
            dtype=dtype,
            lse=lse,
            lse_dtype=lse_dtype,
            weights=weights,
            changed=changed,
            repeated=_same_bits(output, second),
        )

    def _other_call(self, problem: Problem) -> None:
        """Where the problem asks for it, a call that is forgotten: no answer may come from it, or change with it."""
        if problem.among_others:
            self.compute(
                problem, **{name: self._laid_out(-getattr(problem, name), problem) for name in "qkv"}, again=False
            )

    def _read(self, x: Any) -> tuple[Array, str]:
        return self.host(x).copy(), self.dtype_of(x)  # a later call may write into the same memory

    def _foreign(self, what: str, x: Any, like: Any) -> str:
        """What x is, in words, if it is no array of the library of `like`; None stands for what is not offered."""
        if (x is None and what != "output") or _library_of(x) == _library_of(like):
            return ""
        expected = LIBRARIES.get(_library_of(like), _library_of(like))
        if not (hasattr(x, "dtype") and hasattr(x, "shape")):
            return f"the {what} is {in_words(x)}, expected an array of {expected}"
        return f"the {what} is an array of {LIBRARIES.get(_library_of(x), _library_of(x))}, expected {expected}"

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
            turned = self.array(np.ascontiguousarray(host[..., ::-1, :]), problem.dtype)
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


def in_words(x: Any) -> str:
    """The type of a value, with its article."""
    name = "None" if x is None else type(x).__name__
    return name if x is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _library_of(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _swapped(host: Array, first: int, second: int) -> Array:
    return np.ascontiguousarray(np.swapaxes(host, first, second))


def _same_bits(x: Array, y: Array) -> bool:
    return x.shape == y.shape and bool(np.array_equal(x, y, equal_nan=True))
