"""The names of public implementations that `refattn check` knows: where each one's target is, and what it needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from typing import Any, NamedTuple


class Named(NamedTuple):
    """One public implementation: its target's module below this package and class, and what a user must know."""

    module: str
    cls: str
    # What it is, in one sentence.
    says: str
    # What pip installs, and the names under which it is then imported.
    requires: str
    imports: tuple[str, ...]
    # Keyword arguments of the class.
    keywords: dict[str, Any]

    @property
    def installed(self) -> bool:
        """Whether its libraries can be found, without importing them."""
        return not self.missing

    @property
    def missing(self) -> tuple[str, ...]:
        """The libraries that cannot be found."""
        return tuple(name for name in self.imports if importlib.util.find_spec(name) is None)

    @property
    def quoted(self) -> str:
        """What pip installs, as a shell takes it."""
        return f'"{self.requires}"' if "[" in self.requires else self.requires

    @property
    def version(self) -> str:
        """The version of the first library, "" where it is not installed."""
        try:
            return importlib.metadata.version(self.imports[0])
        except importlib.metadata.PackageNotFoundError:
            return ""


def _named(module: str, cls: str, requires: str, says: str, *, imports: tuple[str, ...] = (), **keywords: Any) -> Named:
    return Named(module, cls, says, requires, imports or (requires,), keywords)


_SDPA = "torch.nn.functional.scaled_dot_product_attention"
_KERAS = "keras.ops.dot_product_attention on the backend"

NAMES: dict[str, Named] = {
    "torch": _named("torch", "TorchTarget", "torch", f"{_SDPA}, whichever kernel torch picks."),
    "torch-math": _named("torch", "TorchTarget", "torch", f"{_SDPA} on its plain kernel, MATH.", kernel="math"),
    "torch-flash": _named(
        "torch_flash", "TorchFlashTarget", "torch", f"{_SDPA} on its tiled kernel, with that kernel's log-sum-exp."
    ),
    "torch-flex": _named(
        "torch_flex", "TorchFlexTarget", "torch", "flex_attention of torch.nn.attention, called without compiling it."
    ),
    "torch-mha": _named(
        "torch_mha", "TorchLayerTarget", "torch", "torch.nn.MultiheadAttention whose projections change nothing."
    ),
    "torch-mha-weights": _named(
        "torch_mha",
        "TorchLayerTarget",
        "torch",
        "The same layer asked for its weights, which takes another path.",
        weights=True,
    ),
    "jax": _named("jax", "JaxTarget", "jax", "jax.nn.dot_product_attention on its implementation xla."),
    "onnx-reference": _named(
        "onnx_attention", "ReferenceTarget", "onnx", "The operator Attention in ONNX's own reference evaluator."
    ),
    "onnxruntime": _named(
        "onnx_attention",
        "RuntimeTarget",
        "onnxruntime onnx",
        "The operator Attention of ONNX in ONNX Runtime, on the CPU.",
        imports=("onnxruntime", "onnx"),
    ),
    "onnxruntime-mha": _named(
        "onnxruntime_contrib",
        "MultiHeadTarget",
        "onnxruntime onnx",
        "The operator MultiHeadAttention of com.microsoft in ONNX Runtime, on the CPU.",
        imports=("onnxruntime", "onnx"),
    ),
    "onnxruntime-gqa": _named(
        "onnxruntime_contrib",
        "GroupQueryTarget",
        "onnxruntime onnx",
        "The operator GroupQueryAttention of com.microsoft in ONNX Runtime, on the CPU.",
        imports=("onnxruntime", "onnx"),
    ),
    "mlx": _named(
        "mlx", "MlxTarget", "mlx[cpu]", "mlx.core.fast.scaled_dot_product_attention on the CPU.", imports=("mlx",)
    ),
    "keras-torch": _named(
        "keras", "KerasTarget", "keras torch", f"{_KERAS} torch.", imports=("keras", "torch"), library="torch"
    ),
    "keras-jax": _named("keras", "KerasTarget", "keras jax", f"{_KERAS} jax.", imports=("keras", "jax"), library="jax"),
    "tinygrad": _named("tinygrad", "TinygradTarget", "tinygrad", "Tensor.scaled_dot_product_attention of tinygrad."),
    "transformers-eager": _named(
        "transformers",
        "TransformersTarget",
        "transformers torch",
        "The attention function of transformers' Llama under attn_implementation='eager'.",
        imports=("transformers", "torch"),
    ),
    "transformers-sdpa": _named(
        "transformers",
        "TransformersTarget",
        "transformers torch",
        "The attention function that transformers' models share under attn_implementation='sdpa'.",
        imports=("transformers", "torch"),
        implementation="sdpa",
    ),
    "transformers-gemma2": _named(
        "transformers",
        "TransformersTarget",
        "transformers torch",
        "The eager attention function of transformers' Gemma 2, which has a soft cap.",
        imports=("transformers", "torch"),
        model="gemma2",
    ),
    "transformers-gpt-oss": _named(
        "transformers",
        "TransformersTarget",
        "transformers torch",
        "The eager attention function of transformers' gpt-oss, which has sinks.",
        imports=("transformers", "torch"),
        model="gpt_oss",
    ),
}


def chosen_names(asked: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The names that a command line asks for, or all that are installed; a name that is none ends it."""
    names = asked or [name for name, known in NAMES.items() if known.installed]
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"no implementation {', '.join(unknown)}; refattn check --list shows all")
    return names
