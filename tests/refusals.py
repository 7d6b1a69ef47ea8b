"""What every refused argument owes its caller: the class of its clause, and a message of four parts."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from libraries import Library
from refattn import errors


def assert_refused(
    error: type[errors.RefattnError],
    argument: str,
    words: Any,
    call: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> None:
    """The call raises just this class, naming the argument, what was expected, what came, and the clause."""
    with pytest.raises(errors.RefattnError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert isinstance(caught.value, ValueError | TypeError)
    name, _, rest = message.partition(": expected ")
    expected, _, got = rest.rpartition("; got ")
    assert argument in name.replace(",", " ").split(), message
    assert expected, message
    assert got.endswith(f" [refattn {caught.value.clause}]"), message
    assert all(word in message for word in words), (words, message)


class Maker:
    """Arrays of the library under test, in float32 unless another dtype is named."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def __call__(self, *shape: int, dtype: str = "float32") -> Any:
        values = np.random.default_rng(list(shape)).standard_normal(shape)
        return self.library.array(np.asarray(values if dtype.startswith("float") else np.zeros(shape), dtype=dtype))

    def other(self, *shape: int, dtype: str = "float32") -> Any:
        """An array of another library than the one under test."""
        if self.library.name != "numpy":
            return np.ones(shape, dtype=dtype)
        strict = importlib.import_module("array_api_strict")
        return strict.ones(shape, dtype=getattr(strict, dtype))
