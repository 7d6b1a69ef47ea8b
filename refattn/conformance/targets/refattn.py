"""refattn's own core on the arrays of one library: every feature, and the checks of its other functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn import registry
from refattn.arrays import Array
from refattn.backend import Backend
from refattn.conformance.case import GRADIENTS, Api, Problem
from refattn.conformance.plain import Draw
from refattn.conformance.targets.base import Answer, ArrayTarget, library_backend
from refattn.dtypes import dtype_name
from refattn.errors import PathError


class RefattnTarget(ArrayTarget):
    """refattn through the backend of that name."""

    built_on_refattn = True
    distrusted = False

    def __init__(self, backend: str, path: str = "dense") -> None:
        found = library_backend(backend)
        super().__init__(found)
        self.path = path
        self.has_gradients = path == "dense" or _has_tiled_gradients(found)
        self.gradients = frozenset(GRADIENTS if self.has_gradients else ())
        self.name = f"refattn-{backend}" if path == "dense" else f"refattn-{backend}-{path}"

    def unsupported(self, needs: tuple[str, ...], dtype: str) -> str:
        """A fast path never has the weights."""
        if self.path != "dense" and "weights" in needs:
            return f"{self.name} has no weights"
        return super().unsupported(needs, dtype)

    def versions(self) -> dict[str, str]:
        """refattn and the array library."""
        import refattn

        return {"refattn": refattn.__version__, **super().versions()}

    def api(self, draw: Draw) -> Api | None:
        """The bridge that checks use."""
        return Bridge(self, draw)

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """attention_with_lse and the stages' weights; attention() for the second call."""
        import refattn

        options = self.options(problem)
        if again:
            return Answer(refattn.attention(q, k, v, path=self.path, **options))
        output, lse = refattn.attention_with_lse(q, k, v, path=self.path, **options)
        if self.path != "dense":
            return Answer(output, lse)
        stages = refattn.attention_stages(q, k, v, **options)
        return Answer(output, lse, stages.weights)

    def differentiate(self, backward: str = "") -> None:
        """Nothing but what is offered anyway, unless the plugin has tiles without a backward pass."""
        if backward or not self.has_gradients:
            super().differentiate(backward)

    def with_gradients(self, problem: Problem, q: Array, k: Array, v: Array) -> Answer:
        """attention_vjp; where the fast path has none the library's own differentiation."""
        import refattn

        if not self.has_gradients:
            return super().with_gradients(problem, q, k, v)
        gradient = self.array(np.asarray(problem.grad_output), problem.dtype)
        found = refattn.attention_vjp(q, k, v, gradient, path=self.path, **self.options(problem))._asdict()
        named = {name: found[name] for name in problem.differentiable}
        return self.compute(problem, q, k, v, again=False)._replace(gradients=named)

    def options(self, problem: Problem) -> dict[str, Any]:
        """The options of a problem, masks and biases as refattn's own where the problem has them."""
        options: dict[str, Any] = {
            "causal": problem.causal,
            "scale": problem.scale,
            "softcap": problem.softcap,
            "q_start": _start(problem.q_start),
            "k_start": _start(problem.k_start),
        }
        if problem.mask is not None:
            options["mask"] = problem.mask(self.plain)
        elif problem.shown is not None:
            options["mask"] = self.plain(problem.shown)
        if problem.bias_of is not None:
            options["bias"] = problem.bias_of(lambda host: self.array(host, problem.dtype))
        elif problem.bias is not None:
            options["bias"] = self.argument("bias", problem)
        if problem.sinks is not None:
            options["sinks"] = self.argument("sinks", problem)
        return options


class Bridge:
    """The arrays of one library, for checks."""

    def __init__(self, target: RefattnTarget, draw: Draw) -> None:
        self._target, self._like = target, target.array(np.zeros(1), "float32")
        self.name, self.dtype, self.path, self.draw = target.backend.name, draw.dtype, target.path, draw
        self.capabilities = target.backend.capabilities

    def array(self, host: Array, dtype: str | None = None) -> Array:
        """A host array as one of the library; floats in the case's dtype unless another is named."""
        host = np.asarray(host)
        if dtype is None and host.dtype.kind != "f":
            return self._target.plain(host)
        return self._target.array(host, dtype or self.dtype)

    def host(self, x: Array) -> Array:
        """The values as NumPy: floats as float64, others as they are."""
        values = np.asarray(self._target.backend.host(x))
        return values.astype(np.float64) if values.dtype.kind == "f" else values

    def dtype_of(self, x: Array) -> str:
        """The plain name of an array's dtype."""
        return dtype_name(x.dtype)

    def same_library(self, x: Array) -> bool:
        """Whether x is an array of the library."""
        return type(x).__module__.partition(".")[0] == type(self._like).__module__.partition(".")[0]


def _has_tiled_gradients(backend: Backend) -> bool:
    try:
        registry.tiled_vjp(backend.library.partition(".")[0])
    except PathError:
        return False
    return True


def _start(start: Any) -> Any:
    return start if start is None or isinstance(start, int) else np.asarray(start)
