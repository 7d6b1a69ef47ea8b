"""Gradients of a target's calls, taken by its array library: of q, k and v, and of what it makes of bias and sinks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from refattn.arrays import Array
from refattn.conformance.case import Problem, Unsupported
from refattn.conformance.plain import numbers_of
from refattn.conformance.targets import autodiff
from refattn.conformance.targets.answer import Answer, Arrays, Seen, TargetError
from refattn.conformance.targets.leaves import Leaves


class Differentiable:
    """What `ArrayTarget` knows of derivatives; the methods that it lacks here are those of `ArrayTarget`."""

    name: str
    backend: Arrays
    # Features out of Problem.needs that the target can express; None means all.
    features: frozenset[str] | None = None
    # Those out of GRADIENTS that it offers.
    gradients: frozenset[str] = frozenset()
    # Whether the array library takes them, and so follows each call; a call that it does not follow may go another way.
    followed = False
    # What becomes of bias and sinks while gradients are taken.
    _leaves: Leaves | None = None

    def compute(self, problem: Problem, q: Array, k: Array, v: Array, again: bool) -> Answer:
        """See `ArrayTarget.compute`."""
        raise NotImplementedError

    def array(self, host: Array, dtype: str | None = None) -> Array:
        """See `ArrayTarget.array`."""
        raise NotImplementedError

    def host(self, x: Array) -> Array:
        """See `ArrayTarget.host`."""
        raise NotImplementedError

    def dtype_of(self, x: Array) -> str:
        """See `ArrayTarget.dtype_of`."""
        raise NotImplementedError

    def differentiate(self, backward: str = "") -> None:
        """Offer gradients from now on: the library's own, or those of a function. Raises TargetError."""
        if backward:
            raise TargetError(f"--gradients {backward} is for a function of refattn's convention, not for {self.name}")
        if self.backend.name not in autodiff.LIBRARIES:
            advice = "name the function that computes them: --gradients module:function"
            raise TargetError(f"{self.name} runs on {self.backend.name}, which does not differentiate; {advice}")
        self.gradients, self.followed = self.offered_gradients(), True

    def offered_gradients(self) -> frozenset[str]:
        """Those out of GRADIENTS that go with the features."""
        features = {"bias", "sinks"} if self.features is None else self.features
        return frozenset({"gradients", *(f"{name} gradient" for name in ("bias", "sinks") if name in features)})

    def with_gradients(self, problem: Problem, q: Array, k: Array, v: Array) -> Answer:
        """One call, and the gradients of q, k, v, bias and sinks by the library's own differentiation."""
        made = Leaves()
        wanted = [name for name in ("bias", "sinks") if name in problem.differentiable]
        wanted = [name for name in wanted if f"{name} gradient" in self.gradients]
        if wanted:  # which arrays it makes of them shows in a call
            with self.watched(made):
                self.compute(problem, q, k, v, again=False)

        def output(arrays: dict[str, Array]) -> Array:
            with self.watched(Leaves({key: arrays[key] for key in made.arrays}) if wanted else None):
                return self.compute(problem, arrays["q"], arrays["k"], arrays["v"], again=False).output

        gradient = self.array(np.asarray(problem.grad_output), problem.dtype)
        arrays = {"q": q, "k": k, "v": v, **made.arrays}
        result, found = self.differentiated(output, arrays, gradient)
        gradients: dict[str, Array | Seen] = {name: found[name] for name in "qkv"}
        for name in wanted:
            keys = made.keys(name)
            if not keys and f"{name} gradient" in problem.asks:
                raise Unsupported(f"{self.name} is given no {name} in this call, but something that says the same")
            if keys:
                on_host = {key: self.host(found[key]) for key in keys}
                gradients[name] = Seen(made.summed(name, on_host, problem), self.dtype_of(found[keys[0]]))
        return Answer(result, gradients=gradients)

    def differentiated(
        self, output: Callable[[dict[str, Array]], Array], arrays: dict[str, Array], gradient: Array
    ) -> tuple[Array, dict[str, Array]]:
        """See `autodiff.differentiated`. Raises Unsupported where the implementation has none, and says so."""
        try:
            return autodiff.differentiated(self.backend.name, output, arrays, gradient)
        except NotImplementedError as refusal:
            raise Unsupported(f"{self.name} does not do this: {refusal}") from refusal

    @contextlib.contextmanager
    def watched(self, leaves: Leaves | None) -> Iterator[None]:
        """Calls inside keep in `leaves` what they make of bias and sinks, or hand over what is traced there."""
        before, self._leaves = self._leaves, leaves
        try:
            yield
        finally:
            self._leaves = before

    def argument(self, name: str, problem: Problem, form: Callable[[Array], Array] = np.asarray) -> Array:
        """Bias or sinks in a form that the implementation takes, of q's dtype; its gradient is taken by this array.

        form gets a host array of the shape that the problem's has; it may broadcast, reshape and select.
        """
        values = np.asarray(getattr(problem, name), dtype=np.float64)
        array = self.array(form(values), problem.dtype)
        if self._leaves is None or f"{name} gradient" not in self.gradients:
            return array
        return self._leaves.add(name, array, form(numbers_of(values)))
