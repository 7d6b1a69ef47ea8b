"""What a fault is: one small error, planted into the plain pipeline or into refattn itself."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from refattn.conformance.faults.pipeline import Plain
from refattn.dtypes import COMPUTED

# What no dtype changes.
ONE = ("float32",)

Attention = Callable[..., Any]


class Patch(NamedTuple):
    """`owner.name` replaced by something wrong. A function of a module is replaced wherever refattn imported it."""

    owner: Any
    name: str
    wrong: Any

    def places(self) -> list[Any]:
        """The owners whose attribute of that name is the same object."""
        if not isinstance(self.owner, ModuleType):
            return [self.owner]
        right = getattr(self.owner, self.name)
        modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "refattn"]
        return [module for module in modules if module.__dict__.get(self.name) is right]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A wrong implementation on purpose.

    It is an attention function of refattn's convention, the plain pipeline with some of its steps replaced or as a
    whole wrapped, or it is planted into refattn (`patches`), whose own checks must then fail.
    """

    name: str
    # The clause that it breaks, and whose cases must catch it.
    clause: str
    # The kind of public reports that it stands for; "" where none is known.
    kind: str
    # The dtypes in which it can show, and the libraries, all if there are none.
    dtypes: tuple[str, ...] = COMPUTED
    libraries: tuple[str, ...] = ()
    base: type[Plain] = Plain
    steps: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    wrap: Callable[[Attention], Attention] | None = None
    patches: tuple[Patch, ...] = ()
    # Whether the log-sum-exp is offered: only where the fault shows in nothing else, because its bound is much the
    # narrower one in 16 bits, and many implementations have none.
    lse: bool = False
    # Whether the steps are those of `faults.backward`: the output is right, and the gradients are not.
    backward: bool = False

    @property
    def identifier(self) -> str:
        """The name as a Python name: `refattn check refattn.conformance.faults:IDENTIFIER` judges it."""
        return "".join(c if c.isalnum() else "_" for c in self.name)

    def attention(self) -> Attention:
        """A fresh function with the fault, without memory of earlier calls."""
        if self.patches:
            raise TypeError(f"{self.name!r} is planted into refattn, and is no function")
        pipeline: Any = Plain if self.backward else type("Broken", (self.base,), dict(self.steps))

        def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
            return pipeline(q, k, v, **options).run()

        wrapped = attention if self.wrap is None else self.wrap(attention)

        def output_alone(q: Any, k: Any, v: Any, **options: Any) -> Any:
            result = wrapped(q, k, v, **options)
            return result[0] if isinstance(result, tuple) else result

        return wrapped if self.lse else output_alone

    def gradients(self) -> Attention:
        """The function of the gradients, backward(q, k, v, grad_output, **options), with the fault."""
        pipeline: Any = type("Broken", (self.base,), dict(self.steps))

        def backward(q: Any, k: Any, v: Any, gradient: Any, **options: Any) -> Any:
            return pipeline(q, k, v, gradient, **options).gradients()

        return backward

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Within it refattn has the fault; nothing changes for a fault that is a function."""
        with contextlib.ExitStack() as undo:
            for patch in self.patches:
                for place in patch.places():
                    undo.callback(setattr, place, patch.name, place.__dict__[patch.name])
                    setattr(place, patch.name, patch.wrong)
            yield
