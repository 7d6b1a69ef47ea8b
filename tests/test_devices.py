"""Devices: every intermediate lives where q lives, and arrays of two devices or libraries are an error."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import refattn
from drawn_calls import Call, Floats
from libraries import Library
from test_tracing import BATCH, HEADS, OPTIONS, Q_LEN, arrays

STRICT_DEVICES = ("CPU_DEVICE", "device1", "device2", "no_float64", "no_x64")


def on_device(library: Library, name: str) -> Library:
    """array-api-strict, making its arrays on the named device; they are read back through the first one."""
    xp = library.xp
    device = xp.Device(name)
    integers = xp.int32 if name == "no_x64" else xp.int64

    def make(host: np.ndarray, dtype: str | None) -> Any:
        kind = getattr(xp, dtype) if dtype else {"b": xp.bool, "i": integers, "f": xp.float32}[host.dtype.kind]
        return xp.asarray(host.tolist(), dtype=kind, device=device)

    def read(x: Any) -> np.ndarray:
        return library.host(x.to_device(xp.Device("CPU_DEVICE")))

    return Library(library.name, xp, library.mutable, make, read)


@pytest.mark.library("strict")
@pytest.mark.parametrize("device", STRICT_DEVICES)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_intermediates_stay_on_the_device(library: Library, name: str, device: str) -> None:
    """On each of array-api-strict's devices, those without 64-bit types too, every stage is on q's device."""
    place = on_device(library, device)
    options = dict(OPTIONS[name])
    options["bias"] = [(t[0], *(Floats(x.values, None) if isinstance(x, Floats) else x for x in t[1:]))
                       for t in options.get("bias", ())] or None  # fmt: skip
    call = Call.of([library.host(x) for x in arrays(library)], options)
    inputs, given = call.arguments(place, "float32")
    stages = refattn.attention_stages(*inputs, **given)
    for stage in stages:
        assert stage.device == inputs[0].device
    output, lse = refattn.attention_with_lse(*inputs, **given)
    assert output.device == lse.device == inputs[0].device
    np.testing.assert_allclose(place.host(output), call.expected("float32").output, rtol=1e-4, atol=1e-5)


def other_device(library: Library, host: np.ndarray) -> Any:
    """The same library's array on another device."""
    if library.name == "torch":
        return library.array(host).to("meta")
    return library.array(host).to_device(library.xp.Device("device1"))


def other_library(library: Library, host: np.ndarray) -> Any:
    """Another library's array."""
    if library.name == "numpy":
        return pytest.importorskip("array_api_strict", reason="needs a second array library").asarray(host)
    return host


# q says where the others belong: where q itself is the odd one, k is the first that does not fit.
FIRST_THAT_DOES_NOT_FIT = ("k", "k", "v")
BOOLEANS = np.ones((Q_LEN, 4), dtype=bool)
ARGUMENTS: dict[str, Callable[[Callable[[np.ndarray], Any]], dict[str, Any]]] = {
    "bias": lambda make: {"bias": make(np.zeros((Q_LEN, 4)))},
    "sinks": lambda make: {"sinks": make(np.zeros(HEADS))},
    "scale": lambda make: {"scale": make(np.asarray(0.5))},
    "mask": lambda make: {"mask": make(BOOLEANS)},
    "dense": lambda make: {"mask": refattn.masks.dense(make(BOOLEANS))},
    "q_start": lambda make: {"causal": True, "q_start": make(np.zeros(BATCH, dtype=np.int64))},
    "lengths": lambda make: {"mask": refattn.masks.lengths(make(np.full(BATCH, 2)))},
    "relative": lambda make: {"bias": refattn.biases.relative(make(np.zeros((HEADS, 3))))},
}


@pytest.mark.library("strict", "torch")
@pytest.mark.parametrize("which", [0, 1, 2])
def test_q_k_v_on_two_devices(library: Library, which: int) -> None:
    """q, k and v on two devices are an error that names the arguments and the devices."""
    inputs = arrays(library)
    inputs[which] = other_device(library, library.host(inputs[which]))
    with pytest.raises(refattn.errors.RefattnError) as caught:
        refattn.attention(*inputs)
    assert_names(caught.value, FIRST_THAT_DOES_NOT_FIT[which])


@pytest.mark.library("strict", "torch")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_options_on_another_device(library: Library, name: str) -> None:
    """An option whose array lives elsewhere is an error that names it."""
    options = ARGUMENTS[name](lambda host: other_device(library, host))
    with pytest.raises(refattn.errors.RefattnError) as caught:
        refattn.attention(*arrays(library), **options)
    assert_names(caught.value, name)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_q_k_v_of_two_libraries(library: Library, which: int) -> None:
    """q, k and v of two libraries are an error that names the arguments and the libraries."""
    inputs = arrays(library)
    inputs[which] = other_library(library, library.host(inputs[which]))
    with pytest.raises(refattn.errors.RefattnError) as caught:
        refattn.attention(*inputs)
    assert_names(caught.value, FIRST_THAT_DOES_NOT_FIT[which])


def assert_names(error: Exception, name: str) -> None:
    """The message contains the argument's name as a word and the error its clause."""
    words = str(error).replace("`", " ").replace("(", " ").replace(",", " ").replace(":", " ").replace("'", " ").split()
    assert name in words or (name == "dense" and "mask" in words), str(error)
    assert error.clause in str(error)  # type: ignore[attr-defined]
