"""Public implementations by name: what is there, what is missing, and that wrong answers of a library are caught."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn import cli
from refattn.conformance.alarms import fitted, judge_all
from refattn.conformance.case import LAYOUTS, Problem, Unsupported
from refattn.conformance.cases import all_cases
from refattn.conformance.drawn import drawn_problem
from refattn.conformance.plain import Draw
from refattn.conformance.runner import chosen_pairs, run_suite
from refattn.conformance.targets import TargetError, find_target
from refattn.conformance.targets.base import Answer
from refattn.conformance.targets.names import NAMES
from refattn.conformance.targets.rank4 import Rank4Target

CHOSEN = {"scores.width_of_one_head", "masks.causal", "biases.bias_per_head"}
# Name -> where the library's function is that the target calls, and that a test replaces by a wrong one.
OF_TORCH = {
    "torch": ("torch.nn.functional", "scaled_dot_product_attention"),
    "torch-math": ("torch.nn.functional", "scaled_dot_product_attention"),
    "torch-flash": ("torch.nn.functional", "scaled_dot_product_attention"),
    "torch-flex": ("torch.nn.attention.flex_attention", "flex_attention"),
    "torch-mha": ("torch.nn.functional", "scaled_dot_product_attention"),
    "torch-mha-weights": ("torch.nn.functional", "softmax"),
}
OF_JAX = {"jax": ("jax.nn", "dot_product_attention")}


def verdicts(name: str) -> list[str]:
    cases = [case for case in all_cases() if case.name in CHOSEN]
    report = run_suite(find_target(name), chosen_pairs(cases, dtypes=("float32",)), 20, explained=False)
    return [record.verdict for record in report.records if record.verdict != "unsupported"]


def too_large(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a first result 1 % too large."""

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = function(*arguments, **options)
        return (found[0] * 1.01, *found[1:]) if isinstance(found, tuple) else found * 1.01

    return wrong


def passes_and_is_caught(name: str, place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = verdicts(name)
    assert len(right) >= 2 and set(right) == {"pass"}
    module = importlib.import_module(place[0])
    monkeypatch.setattr(module, place[1], too_large(getattr(module, place[1])))
    assert set(verdicts(name)) == {"fail"}


@pytest.mark.library("torch")
@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_wrong_answers_of_torch_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary cases pass, and all fail where the library's function gives results 1 % too large."""
    passes_and_is_caught(name, OF_TORCH[name], monkeypatch)


@pytest.mark.library("jax")
@pytest.mark.parametrize("name", OF_JAX)
def test_wrong_answers_of_jax_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise."""
    passes_and_is_caught(name, OF_JAX[name], monkeypatch)


@pytest.mark.library("jax")
def test_jax_on_random_problems() -> None:
    """Random problems accuse it of nothing but of what is known."""
    target, drawn = find_target("jax"), [(seed, drawn_problem("float32", seed)) for seed in range(60)]
    tally = judge_all(target, "float32", [one for one in drawn if not target.unsupported(one[1].needs, "float32")][:6])
    assert tally.accused == []
    assert tally.verdicts["pass"] > 0


def test_names_and_modules_agree() -> None:
    """Each name's module exists, wherever its libraries do, with a class that is made of that name, and each says what
    it is in a sentence."""
    for name, known in NAMES.items():
        spec = importlib.util.find_spec(f"refattn.conformance.targets.{known.module}")
        assert spec is not None and spec.origin is not None
        module = importlib.import_module(spec.name)
        made_of = inspect.signature(getattr(module, known.cls))
        assert next(iter(made_of.parameters)) == "name", f"{known.cls} is made with a name, its first argument"
        made_of.bind(name, **known.keywords)
        assert known.says.endswith(".")


def test_named_libraries_have_their_places() -> None:
    """The session of the scoreboard installs each, and the specification may import none."""
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    group = {re.split(r"[>=]", one)[0] for one in pyproject["dependency-groups"]["scoreboard"]}
    banned = pyproject["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-module-level-imports"]
    untyped = {one for override in pyproject["tool"]["mypy"]["overrides"] for one in override["module"]}
    for name, known in NAMES.items():
        assert {*known.requires.split()} <= group, f"the dependency group scoreboard lacks what {name} requires"
        assert {*known.imports} <= {*banned}, f"the lists of array libraries in pyproject.toml lack those of {name}"
        assert {f"{one}.*" for one in known.imports} <= untyped, f"mypy's overrides lack the libraries of {name}"


def test_unknown_names_list_close_ones() -> None:
    """A misspelled name gets the ones that it may mean; another one all of them."""
    with pytest.raises(TargetError, match="did you mean onnxruntime"):
        find_target("onxruntime")
    with pytest.raises(TargetError, match=r"there are torch, torch-math, .*refattn-numpy"):
        find_target("magic")


def test_missing_libraries_are_named_with_what_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence: the libraries, and the command."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r'mlx needs the library mlx, which is not .*: pip install "mlx\[cpu\]"'):
        find_target("mlx")
    with pytest.raises(TargetError, match="needs the libraries keras, torch, which are not"):
        find_target("keras-torch")


def test_check_lists_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Each name, what it is, and a version or what to install."""
    assert cli.main(["check", "--list"]) == 0
    out = capsys.readouterr().out
    for name, known in NAMES.items():
        assert f"{name} " in out and known.says in out
    assert ("pip install" in out) == any(not known.installed for known in NAMES.values())


class OnHost(Rank4Target):
    """A target that shows how it would call."""

    name = "on-host"

    def __init__(self) -> None:
        super().__init__(find_target("numpy").backend)

    def compute(self, problem: Problem, q: Any, k: Any, v: Any, again: bool) -> Answer:
        raise NotImplementedError


def test_a_class_may_name_fewer_dtypes() -> None:
    """What its library has besides, the target refuses."""
    target = type("Narrow", (OnHost,), {"dtypes": ("float64", "float8")})()
    assert target.dtypes == ("float64",)
    assert target.unsupported((), "float32") == "on-host has no float32 here"


def problem(q_len: int, k_len: int, **options: Any) -> Problem:
    draw = Draw("float32", np.random.default_rng(0))
    return Problem(**draw.qkv(q_len, k_len), causal=True, **options)


@pytest.mark.parametrize(
    ("corner", "start", "own"),
    [
        ("top-left", 0, True),
        ("top-left", 2, False),
        ("bottom-right", 0, False),
        ("bottom-right", 2, True),
        ("square", 0, False),
        ("top-left", None, True),
    ],
)
def test_causal_flags_are_used_where_they_say_the_same(corner: Any, start: int | None, own: bool) -> None:
    """The flag stands for the problem's positions, or none are given; starts of keys and of entries need a mask."""
    target = OnHost()
    target.corner = corner
    assert target.own_causal(problem(3, 5, q_start=start)) is own
    assert not target.own_causal(problem(3, 5, q_start=start, k_start=1))
    assert not target.own_causal(problem(3, 5, q_start=np.asarray([0, 2])))


def test_masks_hold_what_the_flag_does_not() -> None:
    """With the causal rule in the mask it hides the future; without it only what the mask hides."""
    target, shown = OnHost(), np.asarray([[True, False, True]] * 3)
    given = replace(problem(3, 3), shown=shown, bias=np.ones((3, 3)))
    assert target.boolean(given, causal=False).shape == (2, 2, 3, 3)
    assert np.array_equal(target.boolean(given, causal=True)[1, 1], np.tri(3, dtype=bool) & shown)
    assert np.array_equal(target.additive(given, causal=True)[0, 0, 0], [1, -np.inf, -np.inf])
    assert target.additive(replace(given, bias=None, shown=None), causal=False) is None


@pytest.mark.parametrize(
    "options", [{"q_start": 1}, {"shown": np.ones((3, 3), dtype=bool)}, {"bias": np.zeros((3, 3))}]
)
def test_literal_options_that_only_others_express_are_refused(options: dict[str, Any]) -> None:
    """A probe asks what the implementation itself takes: no positions, no causal flag beside a mask or bias."""
    with pytest.raises(Unsupported, match="of its own"):
        OnHost().refuse(replace(problem(3, 3), literal=True, **options))
    OnHost().refuse(replace(problem(3, 3), literal=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [0, 1, 3])
def test_no_library_is_handed_negative_strides(layout: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the layout, host arrays go to a library in plain order: some take no negative stride, even of one."""
    target, strides = find_target("refattn-numpy"), []
    array = target.backend.array

    def noting(host: Any, *dtype: Any) -> Any:
        strides.extend(host.strides)
        return array(host, *dtype)

    monkeypatch.setattr(type(target.backend), "array", lambda self, host, *dtype: noting(host, *dtype))
    data = Draw("float32", np.random.default_rng(1)).qkv(length, length)
    target.call(Problem(**data, layout=layout))
    assert min(strides) >= 0


def test_random_problems_are_made_to_fit() -> None:
    """Four axes, one batch axis, and widths as a target wants them; other targets get the problem as it is."""
    draw, target = Draw("float32", np.random.default_rng(0)), OnHost()
    given = Problem(**draw.qkv(3, 5, batch=(2, 3), d_k=5, d_v=7))
    target.width_step, target.own_value_width = 8, False
    found = fitted(given, target)
    assert [x.shape for x in (found.q, found.k, found.v)] == [(6, 2, 3, 8), (6, 2, 5, 8), (6, 2, 5, 8)]
    assert np.array_equal(found.q[..., 5:], found.q[..., :3])
    target.refuse(found)
    assert fitted(given, find_target("numpy")) is given
