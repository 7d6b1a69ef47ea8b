"""Partials and merge: a commutative monoid (T2), sinks once (T3), on every library."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import refattn
from libraries import Library
from refattn import Partial, merge
from refattn.errors import LibraryMismatchError, PartialError

H, LQ, LK, D = 2, 3, 9, 4


def parts_of(library: Library, cuts: tuple[int, ...]) -> list[Partial]:
    q, k, v = map(library.array, data())
    return [
        Partial(*refattn.attention_with_lse(q, k[:, a:b, :], v[:, a:b, :], q_start=5, k_start=a, causal=True))
        for a, b in itertools.pairwise((0, *cuts, LK))
    ]


def data() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((H, length, D)) for length in (LQ, LK, LK)]


def assert_whole(library: Library, whole: Partial, **options: Any) -> None:
    expected = refattn.golden(*data(), causal=True, q_start=5, **options)
    assert np.all(np.abs(library.host(whole.output) - expected.output) <= expected.bound("float64"))
    assert np.all(np.abs(library.host(whole.lse) - expected.lse) <= expected.lse_bound("float64"))


@pytest.mark.parametrize("cuts", [(), (4,), (1, 2, 3), (7, 8), (0, 5, 5)], ids=str)
def test_any_split_merges_to_the_whole(library: Library, cuts: tuple[int, ...]) -> None:
    """Partials over any split of the keys, empty parts and parts that no query sees included, merge to the whole."""
    assert_whole(library, merge(parts_of(library, cuts)))


def test_any_order_merges_to_the_whole(library: Library) -> None:
    """The order of the partials does not matter."""
    for order in itertools.permutations(parts_of(library, (2, 6))):
        assert_whole(library, merge(order))


def test_association_does_not_matter(library: Library) -> None:
    """Merging a merged pair with a third is merging three."""
    first, second, third = parts_of(library, (2, 6))
    assert_whole(library, merge([merge([first, second]), third]))
    assert_whole(library, merge([first, merge([second, third])]))


def test_nothing_is_the_identity(library: Library) -> None:
    """(0, -inf) changes not a bit, and two of it are it again."""
    (whole,) = parts_of(library, ())
    nothing = Partial(whole.output * 0.0, whole.lse * 0.0 - float("inf"))
    for pair in ([whole, nothing], [nothing, whole]):
        merged = merge(pair)
        np.testing.assert_array_equal(library.host(merged.output), library.host(whole.output))
        np.testing.assert_allclose(library.host(merged.lse), library.host(whole.lse), rtol=4e-16)
    empty = merge([nothing, nothing])
    assert np.all(library.host(empty.output) == 0)
    assert np.all(library.host(empty.lse) == -np.inf)


def test_sinks_enter_once(library: Library) -> None:
    """Sinks given to merge are in the whole's denominator and log-sum-exp; -inf is none, NaN and +inf give NaN."""
    sinks = np.asarray([0.5, -np.inf])
    assert_whole(library, merge(parts_of(library, (2, 6)), sinks=library.array(sinks)), sinks=sinks)
    broken = merge(parts_of(library, (2, 6)), sinks=library.array(np.asarray([np.nan, np.inf])))
    assert np.isnan(library.host(broken.output)).all()
    assert np.isnan(library.host(broken.lse)).all()


def test_infinite_outputs_survive(library: Library) -> None:
    """An output that a visible infinite value made infinite stays so beside any other share, and both meet as NaN."""
    output = np.asarray([[[np.inf, -np.inf, np.inf, 1.0]]])
    far, near = (
        Partial(output, np.asarray([[-5000.0]])),
        Partial(np.asarray([[[1.0, 1.0, -np.inf, 1.0]]]), np.zeros((1, 1))),
    )
    merged = merge([Partial(*map(library.array, far)), Partial(*map(library.array, near))])
    np.testing.assert_array_equal(library.host(merged.output), [[[np.inf, -np.inf, np.nan, 1.0]]])


def test_base_e(library: Library) -> None:
    """Shares of 8 and 2, given as natural logarithms, mix 1 and 0 to 0.8."""
    parts = [Partial(*map(library.array, (np.asarray([[[x]]]), np.log([[n]])))) for x, n in ((1.0, 8.0), (0.0, 2.0))]
    np.testing.assert_allclose(library.host(merge(parts).output), [[[0.8]]], rtol=1e-15)


def test_misfits_are_refused(library: Library) -> None:
    """No partial at all, other shapes, other libraries and bad sinks are errors of clause T3 or A7."""
    (whole,) = parts_of(library, ())
    with pytest.raises(PartialError, match="at least one"):
        merge([])
    for bad in (
        [whole, Partial(whole.output[:, :2, :], whole.lse[:, :2])],
        [whole.output],
        [Partial(whole.output, whole.output)],
    ):
        with pytest.raises(PartialError, match="partials"):
            merge(bad)
    with pytest.raises(PartialError, match="sinks"):
        merge([whole], sinks=library.array(np.zeros(3)))
    if library.name != "numpy":
        with pytest.raises(LibraryMismatchError):
            merge([whole, Partial(np.zeros((H, LQ, D)), np.zeros((H, LQ)))])
