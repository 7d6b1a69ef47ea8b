"""A program that lives on files: it reads exported cases and writes results, by readers of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

import refattn
from refattn.arrays import Array

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}
SAFETENSORS = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64, "BOOL": np.bool_}
TENSORS = ("q", "k", "v", "mask", "bias", "sinks", "grad_output")


def read_case(folder: Path, form: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """The tensors of one case by name, and its description."""
    about = json.loads((folder / "case.json").read_text())
    own = DTYPES[about["dtype"]]
    if form == "raw":
        names: list[str] = [name for name in TENSORS if about.get(name) is not None]
        flat = {name: np.fromfile(folder / f"{name}.bin", np.bool_ if name == "mask" else own) for name in names}
        return {name: x.reshape(about[name]) for name, x in flat.items()}, about
    if form == "npz":
        with np.load(folder / "inputs.npz", allow_pickle=False) as stored:
            return {name: x.view(own) if x.dtype == np.uint16 else x for name, x in stored.items()}, about
    deserialize: Any = safetensors.deserialize
    entries = deserialize((folder / "inputs.safetensors").read_bytes())
    return {
        name: np.frombuffer(entry["data"], SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in entries
    }, about


def write_results(folder: Path, form: str, results: dict[str, Array]) -> None:
    """Results beside the inputs."""
    if form == "raw":
        for name, x in results.items():
            (folder / f"{name}.bin").write_bytes(x.tobytes())
    elif form == "npz":
        named: Any = {name: x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x for name, x in results.items()}
        np.savez_compressed(folder / "outputs.npz", **named)
    else:
        named = {name: np.ascontiguousarray(x) for name, x in results.items()}
        safetensors.numpy.save_file(named, folder / "outputs.safetensors")


def attend(tensors: dict[str, Array], about: dict[str, Any]) -> dict[str, Array]:
    """refattn's own answer to one case."""
    options: dict[str, Any] = {name: tensors[name] for name in ("mask", "bias", "sinks") if name in tensors}
    options |= {name: about[name] for name in ("causal", "scale", "softcap")}
    options |= {name: np.asarray(x) if isinstance(x := about[name], list) else x for name in ("q_start", "k_start")}
    output, lse = refattn.attention_with_lse(*(tensors[name] for name in "qkv"), **options)
    return {"output": output, "lse": lse}


def run_all(folder: Path, form: str, kernel: Callable[..., dict[str, Array]] = attend) -> int:
    """Runs a kernel on every case of an exported folder; how many there were."""
    places = sorted(path for path in folder.iterdir() if path.is_dir())
    for place in places:
        write_results(place, form, kernel(*read_case(place, form)))
    return len(places)
