"""Targets for implementations that need NVIDIA devices, on stand-ins of their signatures; see `stand_ins`."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import stand_ins
from refattn import cli
from refattn.conformance.cases import all_cases
from refattn.conformance.records import Report
from refattn.conformance.runner import chosen_pairs, run_suite
from refattn.conformance.targets.find import ON_NVIDIA
from refattn.conformance.targets.nvidia import PLACES, nvidia_target

SEED = 20
SLOW = ("long_rows.", "levels.", "non_influence.", "empty_rows.", "numbers.", "arrays.", "tiling.")
TORCH, JAX = pytest.mark.library("torch"), pytest.mark.library("jax")
# JAX compiles each new shape, so that its target gets a few cases of each kind.
FEW = ("masks.causal", "masks.aligned_top_left", "masks.window_of_three_keys", "masks_by_index.lengths")


def judged(
    monkeypatch: pytest.MonkeyPatch, name: str, dtypes: tuple[str, ...] = ("float16",), only: str = "", **wrong: Any
) -> Report:
    """The report on a stand-in that is built with those errors."""
    if name == "cudnn":
        import jax

        monkeypatch.setattr(jax.nn, "dot_product_attention", stand_ins.cudnn(**wrong))
    elif name == "xformers":
        for module, stand_in in stand_ins.xformers(**wrong).items():
            monkeypatch.setitem(sys.modules, module, stand_in)
    else:
        built = stand_ins.flashinfer(**wrong) if name == "flashinfer" else stand_ins.flash_attn(**wrong)
        monkeypatch.setitem(sys.modules, built.__name__, built)
    target = nvidia_target(name, device="cpu:0" if name == "cudnn" else "cpu")
    cases = [case for case in all_cases() if case.build and not case.name.startswith("vectors.")]
    cases = [case for case in cases if not only or case.name in only.split()]
    # One call for each entry, heads that are filled up to 64 and whole tensors as bias take their time.
    slow = name in ("flashinfer", "xformers") and not only
    cases = [case for case in cases if not (slow and case.name.startswith(SLOW))]
    cases = [case for case in cases if name != "cudnn" or case.name.startswith(FEW)]
    return run_suite(target, chosen_pairs(cases, None, dtypes), SEED, explained=False)


@pytest.mark.parametrize(
    ("name", "dtypes", "at_least"),
    [
        pytest.param("flash-attn", ("float16",), 70, marks=TORCH),
        pytest.param("flash-attn-varlen", ("float16",), 75, marks=TORCH),
        pytest.param("flashinfer", ("float16",), 70, marks=TORCH),
        pytest.param("xformers", ("float16",), 100, marks=TORCH),
        pytest.param("cudnn", ("float16",), 6, marks=JAX),
    ],
)
def test_a_right_stand_in_conforms(
    name: str, dtypes: tuple[str, ...], at_least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the convention can express is called so that the documented signature gives what is specified."""
    report = judged(monkeypatch, name, dtypes)
    assert report.conforms, report.broken[0]
    assert report.counts["pass"] >= at_least, report.counts


@pytest.mark.parametrize(
    ("name", "wrong", "case"),
    [
        pytest.param("flash-attn", {"align": "top-left"}, "masks.aligned_bottom_right", marks=TORCH),
        pytest.param("flash-attn", {"extra": 1}, "masks.window_of_three_keys", marks=TORCH),
        pytest.param("flash-attn", {"extra": 1}, "masks.window_both_ways", marks=TORCH),
        pytest.param("flash-attn", {"half_scale": True}, "scores.worked_example", marks=TORCH),
        pytest.param("flash-attn", {"heads_first": True}, "masks.causal", marks=TORCH),
        pytest.param("flash-attn-varlen", {"align": "top-left"}, "masks.aligned_per_length", marks=TORCH),
        pytest.param("flash-attn-varlen", {"extra": 1}, "masks.window_over_a_cache", marks=TORCH),
        pytest.param("flash-attn-varlen", {"heads_first": True}, "masks_by_index.lengths", marks=TORCH),
        pytest.param("flashinfer", {"base": 2.718281828459045}, "softmax.log_sum_exp", marks=TORCH),
        pytest.param("flashinfer", {"align": "top-left"}, "masks.aligned_bottom_right", marks=TORCH),
        pytest.param("flashinfer", {"extra": 1}, "masks.window_over_a_cache", marks=TORCH),
        pytest.param("flashinfer", {"hides": True}, "masks.true_means_visible", marks=TORCH),
        pytest.param("xformers", {"swaps_corners": True}, "masks.aligned_bottom_right", marks=TORCH),
        pytest.param("xformers", {"extra": 1}, "masks.window_both_ways_far_end", marks=TORCH),
        pytest.param("xformers", {"adds_to_scaled": False}, "biases.relative", marks=TORCH),
        pytest.param("cudnn", {"align": "bottom-right"}, "masks.aligned_top_left", marks=JAX),
        pytest.param("cudnn", {"extra": 1}, "masks.window_of_three_keys", marks=JAX),
        pytest.param("cudnn", {"lengths_are_indices": True}, "masks_by_index.lengths", marks=JAX),
    ],
)
def test_a_wrong_convention_fails(name: str, wrong: dict[str, Any], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that departs from its documentation in one convention fails the case that is about it."""
    report = judged(monkeypatch, name, only=case, **wrong)
    assert [record.verdict for record in report.records] == ["fail"], report.records


@TORCH
def test_what_cannot_be_expressed_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask is no reason for flash-attn to fail, nor an alignment that it does not have; both are named as lacking."""
    report = judged(
        monkeypatch, "flash-attn", only="masks.true_means_visible masks.aligned_top_left masks.aligned_bottom_right"
    )
    verdicts = {record.case: record for record in report.records}
    assert verdicts["masks.true_means_visible"].missing == ("mask",)
    lacking = verdicts["masks.aligned_top_left"]
    assert lacking.missing == ("q_start",)
    assert lacking.message.endswith("cannot express q_start=0, its positions being aligned bottom-right")
    assert verdicts["masks.aligned_bottom_right"].verdict == "pass"


@pytest.mark.parametrize("name", ON_NVIDIA)
def test_what_is_missing_is_said(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the library there is one sentence with what to install, and the exit code 2."""
    monkeypatch.setitem(sys.modules, PLACES[name].module.partition(".")[0], None)
    monkeypatch.setitem(sys.modules, PLACES[name].module, None)
    assert cli.main(["check", name]) == 2
    said = capsys.readouterr().err
    assert f"pip install '{PLACES[name].distribution}'" in said and "NVIDIA GPU" in said


@TORCH
def test_a_missing_device_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the library but without an NVIDIA device there is one sentence, and the exit code 2."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setitem(sys.modules, "flash_attn", stand_ins.flash_attn())
    assert cli.main(["check", "flash-attn", "--in-process"]) == 2
    assert "flash-attn needs an NVIDIA GPU, and torch finds none here" in capsys.readouterr().err
