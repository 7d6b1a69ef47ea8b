"""What public reports found is found again: their cases fail on it, and pass on what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import planted_faults
import public_faults
from refattn import attention, attention_stages, biases, layer, mask_kinds, masks, merge, paged, rolling, rope
from refattn.arrays import Array
from refattn.conformance.cases import all_cases, arrays, tiling
from refattn.conformance.cases import biases as bias_cases
from refattn.conformance.faults.catch import target_of
from refattn.conformance.public_reports import REPORTS
from refattn.conformance.records import Record
from refattn.conformance.runner import chosen_pairs, run_suite
from refattn.conformance.targets import find_target
from refattn.conformance.targets.function import FunctionTarget
from refattn.partials import Partial

CASES = {case.name: case for case in all_cases()}
BY_ID = {report.id: report for report in REPORTS}
ALL, FULL = planted_faults.ALL, planted_faults.FULL
NARROW = ("bfloat16", "float16", "float32")

# A report, a function with its fault, and the dtypes in which the fault shows.
FUNCTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("B03", "planted_faults:empty_row_is_NaN", ALL),
    ("B04", "planted_faults:hidden_logits_are__1e4", ALL),
    ("B04", "planted_faults:empty_row_is_the_mean", ALL),
    ("B05", "planted_faults:empty_row_is_NaN", ALL),
    ("B06", "planted_faults:empty_row_is_NaN", ALL),
    ("B09", "public_faults:infinite_log_of_nothing", FULL),
    ("B20", "public_faults:dropout_scaled_by_p", ALL),
    ("B22", "planted_faults:poison_leaks_from_v", ALL),
    ("B22", "planted_faults:poison_leaks_from_k", ALL),
    ("B23", "planted_faults:poison_leaks_from_k", ALL),
    ("B23", "planted_faults:poison_leaks_from_v", ALL),
    ("B27", "public_faults:zero_left_by_a_hidden_tile", NARROW),
    ("B28", "public_faults:maximum_from_a_sentinel", ("float16", *FULL)),
    ("B28", "public_faults:maximum_of_hidden_keys_too", NARROW),
    ("B31", "public_faults:masks_that_add_up", ALL),
    ("B36", "planted_faults:overflow_before_scale", ("float16",)),
    ("B40", "planted_faults:causal_from_the_top_left", ALL),
    ("B41", "planted_faults:causal_from_the_bottom_right", ALL),
    ("B43", "planted_faults:causal_from_the_bottom_right", ALL),
    ("B44", "planted_faults:causal_from_the_top_left", ALL),
    ("B46", "public_faults:not_causal_over_a_cache", ALL),
    ("B50", "public_faults:always_causal_never_scaled", ALL),
    ("B50", "planted_faults:no_scale", ALL),
    ("B52", "planted_faults:mask_after_softmax", ALL),
    ("B53", "planted_faults:mask_polarity", ALL),
    ("B54", "planted_faults:mask_polarity", ALL),
    ("B57", "public_faults:causal_by_ones", FULL),
    ("B61", "public_faults:whole_splits_alone", ALL),
    ("B62", "public_faults:cap_after_mask", ALL),
    ("B63", "planted_faults:cap_is_ignored", ALL),
    ("B65", "public_faults:clamped_sinks", ALL),
    ("B67", "public_faults:root_of_the_scale", ALL),
    ("B68", "planted_faults:scale_is_ignored", ALL),
    ("B71", "planted_faults:bias_is_scaled", ALL),
    ("B75", "public_faults:weights_in_eight_bits", ALL),
    ("B77", "public_faults:products_of_eleven_bits", ("float32",)),
    ("B78", "public_faults:strides_ignored", ALL),
    ("B81", "planted_faults:output_as_wide_as_q", ALL),
    ("B93", "public_faults:first_batch_entry_alone", ALL),
    ("B95", "public_faults:divides_by_sizes", ALL),
    ("B97", "public_faults:rows_never_written", ALL),
    ("B99", "planted_faults:log_sum_exp_in_base_2", FULL),
    ("B100", "public_faults:without_causal", ALL),
    ("B101", "public_faults:zeros", ALL),
)


def run(target: Any, names: tuple[str, ...], dtypes: tuple[str, ...] = ALL) -> list[Record]:
    pairs = chosen_pairs([CASES[name] for name in names], None, dtypes)
    return [
        record for record in run_suite(target, pairs, 20, explained=False).records if record.verdict != "unsupported"
    ]


def broken(records: list[Record], dtype: str) -> set[str]:
    return {record.case for record in records if record.dtype == dtype and record.verdict in ("fail", "crashed")}


@pytest.mark.parametrize(("label", "function", "dtypes"), FUNCTIONS)
def test_a_reported_fault_is_caught(label: str, function: str, dtypes: tuple[str, ...]) -> None:
    """Of a report's cases some fail on its fault, in every dtype that can show it."""
    pytest.importorskip("ml_dtypes", reason="bfloat16 on NumPy needs ml_dtypes")
    found = run(FunctionTarget(function), BY_ID[label].cases, dtypes)
    for dtype in dtypes:
        assert broken(found, dtype), f"{function} passes the cases of {label} in {dtype}"


def _naive_merge(parts: Any, sinks: Any = None) -> Any:
    first, second = parts[0], parts[-1]
    with np.errstate(invalid="ignore"):
        top = np.maximum(first.lse, second.lse)
        shares = [np.exp(part.lse - top) for part in (first, second)]
        total = shares[0] + shares[1]
        output = (first.output * shares[0][..., None] + second.output * shares[1][..., None]) / total[..., None]
        return Partial(output, top + np.log(total))


def _merge_of_powers_of_two(parts: Any, sinks: Any = None) -> Any:
    return merge([part._replace(lse=part.lse / part.lse.dtype.type(np.log(2))) for part in parts], sinks)


def _rolled_too_early(self: Any, q_len: int, seen_by: Any = rolling.RollingKVCache.seen_by) -> Any:
    seen = seen_by(self, q_len)
    full = isinstance(self.length, int) and self.length == self.window > 1
    return seen._replace(mask=masks.window(self.window - 2, 0)) if full else seen


def _first_part_of_the_table(self: Any, q_len: int, seen_by: Any = paged.PagedKVCache.seen_by) -> Any:
    seen = seen_by(self, q_len)
    count, pages = seen.k.shape[2], np.arange(seen.k.shape[2]) % (16 * self.page_size)
    assert len(pages) == count
    return seen._replace(k=seen.k[:, :, pages], v=seen.v[:, :, pages])


def _stages_without_a_guard(*arrays: Array, **options: Any) -> Any:
    stages = attention_stages(*arrays, **options)
    empty = ~np.any(stages.visible, axis=-1, keepdims=True)
    return stages._replace(
        weights=np.where(empty, np.nan, stages.weights), output=np.where(empty, np.nan, stages.output)
    )


def _bias_as_narrow_as_queries(q: Array, k: Array, v: Array, bias: Any = None, **options: Any) -> Any:
    with np.errstate(over="ignore"):
        return attention(q, k, v, bias=None if bias is None else bias.astype(q.dtype), **options)


# Report -> where refattn is broken, and how: faults that are not in one call of attention.
PATCHES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "B03": (layer, "attention_stages", _stages_without_a_guard),
    "B26": (tiling, "merge", _naive_merge),
    "B99": (tiling, "merge", _merge_of_powers_of_two),
    "B45": (mask_kinds.Window, "evaluate", lambda self, f: f.keys >= f.rows - (self.left or 0)),
    "B58": (
        biases.Alibi,
        "evaluate",
        lambda self, f, _: (
            -np.asarray(biases.alibi_slopes(self.heads))[:, None, None] * (np.abs(f.keys_from_rows - f.rows) + 1.0)
        ),
    ),
    "B73": (arrays, "attention", _bias_as_narrow_as_queries),
    "B83": (mask_kinds.Window, "evaluate", lambda self, f: f.keys_from_rows >= f.rows - self.left - 1),
    "B87": (rolling.RollingKVCache, "seen_by", _rolled_too_early),
    "B88": (bias_cases, "rope", lambda x, at, **named: rope(x, np.arange(x.shape[-2]) - 1, **named)),
    "B89": (layer, "_positions", lambda library, x, start: library.xp.zeros(x.shape[-2], dtype=library.xp.int64)),
    "B91": (
        mask_kinds.Padding,
        "evaluate",
        lambda self, f: f.keys < np.sum(np.asarray(self.keep), axis=-1)[:, None, None, None],
    ),
    "B92": (paged.PagedKVCache, "seen_by", _first_part_of_the_table),
}


@pytest.mark.parametrize("label", PATCHES)
def test_a_reported_fault_of_refattn_is_caught(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """refattn with the reported fault fails the report's cases, and not by a crash."""
    where, name, wrong = PATCHES[label]
    monkeypatch.setattr(where, name, wrong)
    dtypes = ("float16", "float32") if label == "B73" else ("float32",)
    found = run(find_target("numpy"), BY_ID[label].cases, dtypes)
    assert [record.case for record in found if record.verdict == "fail"], found


@pytest.mark.parametrize("label", public_faults.GRADIENTS)
def test_a_reported_gradient_is_caught(label: str) -> None:
    """Gradients as a report has them fail its cases in every dtype, though the output is right."""
    found = run(target_of(public_faults.GRADIENTS[label], "numpy"), BY_ID[label].cases, ALL)
    failing = [record for record in found if record.verdict == "fail"]
    assert {record.dtype for record in failing} == set(ALL), found
    assert all("gradient" in record.message for record in failing)


def test_every_report_has_a_fault() -> None:
    """What each covered report found is here, but for a report on a right kernel that was accused."""
    shown = {*PATCHES, *public_faults.GRADIENTS, *(label for label, _, _ in FUNCTIONS)}
    covered = {report.id for report in REPORTS if report.standing == "covered"}
    assert covered - shown == {"B74"}, "name the fault of each in FUNCTIONS, PATCHES or public_faults.GRADIENTS"
    assert shown <= {report.id for report in REPORTS}


@pytest.mark.parametrize("target", ["planted_faults:correct", "planted_faults:correct_unfused", "numpy"])
def test_what_is_right_passes_the_cases_of_every_report(target: str) -> None:
    """Right implementations fail no case of any report, and refattn can express them all."""
    pytest.importorskip("ml_dtypes", reason="bfloat16 on NumPy needs ml_dtypes")
    names = tuple(dict.fromkeys(name for report in REPORTS for name in report.cases))
    found = run(find_target(target), names)
    accused = {record.case for record in found if record.verdict in ("fail", "crashed")}
    # Scores beyond float16 are what these cases are about, and storing them low is a fault there.
    if target.endswith("unfused"):
        accused = {name for name in accused if not name.endswith("scores_beyond_float16")}
    assert accused == set()
    if target == "numpy":
        assert {record.case for record in found} == set(names)


@pytest.mark.parametrize("wrong", ["constant", "zeros", "shuffled_values", "without_causal"])
def test_wrong_answers_close_to_right_ones_are_caught(wrong: str) -> None:
    """Data of one sign lets no constant, no zeros, no shuffled values and no missing mask pass, in any dtype."""
    pytest.importorskip("ml_dtypes", reason="bfloat16 on NumPy needs ml_dtypes")
    found = run(FunctionTarget(f"public_faults:{wrong}"), ("levels.inputs_of_one_sign",))
    assert {record.verdict for record in found} == {"fail"}
    scale = run(FunctionTarget("planted_faults:no_scale"), ("levels.inputs_of_one_sign",))
    assert {record.verdict for record in scale} == {"fail"}


def test_what_cancels_is_not_accused() -> None:
    """A triangle of ones for causality is right in the output: only its log-sum-exp is judged wrong (P6)."""
    causal = tuple(case.name for case in CASES.values() if case.build is not None and "M4" in case.clauses)
    silent = run(FunctionTarget("public_faults:only_the_output"), causal, FULL)
    assert {record.verdict for record in silent} == {"pass"}
    spoken = run(FunctionTarget("public_faults:causal_by_ones"), causal, FULL)
    assert {record.fault for record in spoken if record.verdict == "fail"} == {"P4"}
