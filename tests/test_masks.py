"""Masks as objects: evaluated anywhere, asked about tiles, combined, drawn, copied, and built from bad arguments."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from libraries import Library
from refattn import errors, masks
from refusals import Maker, assert_refused

ROWS, KEYS = 5, 7
KEEP = np.asarray([[1, 0, 1, 1, 1, 0, 1], [0, 0, 1, 1, 1, 1, 1]], dtype=bool)
Q_IDS, K_IDS = np.asarray([0, 0, 1, 1, 2]), np.asarray([[0, 1, 1, 1, 2, 2, 3], [2, 2, 0, 0, 0, 1, 1]])
PAIRS = np.random.default_rng(0).random((2, 1, ROWS, KEYS)) < 0.5
BLOCKS = np.asarray([[1, 0, 1], [0, 0, 1], [1, 1, 1]], dtype=bool)
COUNTS = np.asarray([3, 6])
Q_START, K_START = np.asarray([4, -1]), 2

# What each mask must show: b is the batch entry, i and j are indices, p and s the positions of query and key.
KINDS: dict[str, tuple[Callable[[Any], masks.Mask], Callable[..., Any]]] = {
    "causal": (lambda a: masks.causal(), lambda b, i, j, p, s: s <= p),
    "window": (lambda a: masks.window(2, 1), lambda b, i, j, p, s: p - 2 <= s <= p + 1),
    "left window": (lambda a: masks.window(1, None), lambda b, i, j, p, s: s >= p - 1),
    "open window": (lambda a: masks.window(None, None), lambda b, i, j, p, s: True),
    "chunks": (lambda a: masks.chunks(3), lambda b, i, j, p, s: math.floor(p / 3) == math.floor(s / 3)),
    "prefix": (lambda a: masks.prefix(4), lambda b, i, j, p, s: s < 4),
    "lengths": (lambda a: masks.lengths(a(COUNTS)), lambda b, i, j, p, s: j < COUNTS[b]),
    "one length": (lambda a: masks.lengths(3), lambda b, i, j, p, s: j < 3),
    "padding": (lambda a: masks.padding(a(KEEP)), lambda b, i, j, p, s: KEEP[b, j]),
    "documents": (lambda a: masks.documents(a(Q_IDS), a(K_IDS)), lambda b, i, j, p, s: Q_IDS[i] == K_IDS[b, j]),
    "dense": (lambda a: masks.dense(a(PAIRS)), lambda b, i, j, p, s: PAIRS[b, 0, i, j]),
    "row of keys": (lambda a: masks.dense(a(KEEP[0])), lambda b, i, j, p, s: KEEP[0, j]),
    "blocks": (lambda a: masks.blocks(a(BLOCKS), (2, 3)), lambda b, i, j, p, s: BLOCKS[i // 2, j // 3]),
    "combined": (
        lambda a: masks.causal() & ~masks.padding(a(KEEP)) | masks.prefix(3),
        lambda b, i, j, p, s: (s <= p and not KEEP[b, j]) or s < 3,
    ),
}


def by_definition(name: str) -> np.ndarray:
    """The pairs of the named mask, (2, 1, ROWS, KEYS), one by one."""
    shown = np.zeros((2, 1, ROWS, KEYS), dtype=bool)
    for b, _, i, j in np.ndindex(*shown.shape):
        shown[b, 0, i, j] = KINDS[name][1](b, i, j, int(Q_START[b]) + i, K_START + j)
    return shown


def build(name: str, library: Library | None = None) -> masks.Mask:
    """The named mask, its arrays NumPy's or the library's."""
    return KINDS[name][0]((lambda x: x) if library is None else library.array)


@pytest.mark.parametrize("name", KINDS)
def test_arrays_and_every_form_of_indices_agree(library: Library, name: str) -> None:
    """to_array shows the pairs of the definition, and visible shows the same on grids, slices, pairs and points."""
    mask, expected = build(name, library), by_definition(name)
    like = library.array(np.zeros(1))
    whole = mask.to_array(ROWS, KEYS, Q_START, K_START, like=like)
    assert str(whole.dtype).endswith("bool")
    assert getattr(whole, "device", None) == getattr(like, "device", None)

    def assert_shows(shown: Any, pairs: np.ndarray) -> None:
        assert type(shown) is type(whole)
        np.testing.assert_array_equal(np.broadcast_to(library.host(shown), pairs.shape), pairs)

    assert_shows(whole, expected)
    own = library.array
    starts = (own(Q_START), K_START)
    for dtype in ("int64", "int32", "uint8"):
        rows, keys = own(np.arange(ROWS, dtype=dtype)), own(np.arange(KEYS, dtype=dtype))
        assert_shows(mask.visible(rows, keys, *starts), expected)
    assert_shows(mask.visible(rows, range(KEYS), Q_START.tolist(), K_START), expected)
    assert_shows(mask.visible(range(ROWS), keys, *starts), expected)
    assert_shows(mask.visible(own(np.asarray([4, 0])), range(1, 6, 2), *starts), expected[..., [4, 0], 1:6:2])
    assert_shows(mask.visible(own(np.asarray([[3], [1]])), keys, *starts), expected[..., [3, 1], :])
    assert_shows(
        mask.visible(own(np.asarray([[2], [2]])), own(np.asarray([[6, 0]])), *starts),
        expected[..., [2, 2], :][..., [6, 0]],
    )
    assert_shows(mask.visible(own(np.asarray([[0]])), 3, *starts), expected[..., :1, 3:4])
    assert_shows(mask.visible(own(np.zeros(0, dtype=np.int64)), keys, *starts), expected[..., :0, :])


@pytest.mark.parametrize("name", KINDS)
def test_lists_ranges_and_numbers_give_numpy_arrays(name: str) -> None:
    """Without arrays of another library the answer is NumPy's."""
    mask, expected = build(name), by_definition(name)
    starts = (Q_START.tolist(), K_START)
    for rows, keys in ((range(ROWS), range(KEYS)), (list(range(ROWS)), tuple(range(KEYS)))):
        shown = mask.visible(rows, keys, *starts)
        assert type(shown) is np.ndarray
        np.testing.assert_array_equal(np.broadcast_to(shown, expected.shape), expected)
    point = mask.visible(2, 3, Q_START[1], K_START)
    np.testing.assert_array_equal(np.broadcast_to(point, (2, 1))[1, 0], expected[1, 0, 2, 3])
    empty = mask.visible([], [1, 2], *starts)
    assert empty.shape[-2:] == (0, 2)


def test_small_unsigned_indices_do_not_wrap_around(library: Library) -> None:
    """Positions are added in the index dtype of the library, whatever the dtype of the given indices."""
    rows = library.array(np.asarray([200, 0], dtype=np.uint8))
    shown = masks.window(1, 0).visible(rows, library.array(np.asarray([200, 255], dtype=np.uint8)), 300, 300)
    np.testing.assert_array_equal(library.host(shown), [[True, False], [False, False]])


@pytest.mark.parametrize("name", KINDS)
def test_answers_about_tiles_are_true(name: str) -> None:
    """ "all" and "none" are true of each pair of each tile, "mixed" comes for few that are not, and never for all."""
    mask, expected = build(name), by_definition(name)
    certain = 0
    for r0, r1 in ((a, b) for a in range(ROWS) for b in range(a + 1, ROWS + 1)):
        for k0, k1 in ((a, b) for a in range(KEYS) for b in range(a + 1, KEYS + 1)):
            answer = mask.tile(range(r0, r1), range(k0, k1), Q_START.tolist(), K_START)
            tile = expected[..., r0:r1, k0:k1]
            assert answer in ("all", "none", "mixed")
            assert answer != "all" or tile.all(), (r0, r1, k0, k1)
            assert answer != "none" or not tile.any(), (r0, r1, k0, k1)
            certain += answer != "mixed"
    assert certain > 0


TILES: dict[str, tuple[masks.Mask, range, range, str]] = {
    "causal, past": (masks.causal(), range(8, 12), range(9), "all"),
    "causal, future": (masks.causal(), range(8), range(8, 16), "none"),
    "causal, diagonal": (masks.causal(), range(8), range(8), "mixed"),
    "window, outside": (masks.window(3, 0), range(16, 20), range(8), "none"),
    "window, inside": (masks.window(30, 4), range(16, 20), range(20), "all"),
    "open window": (masks.window(None, None), range(4), range(4), "all"),
    "chunk": (masks.chunks(8), range(8, 16), range(8, 16), "all"),
    "other chunk": (masks.chunks(8), range(8, 16), range(16, 20), "none"),
    "prefix": (masks.prefix(4), range(8), range(4), "all"),
    "after the prefix": (masks.prefix(4), range(8), range(4, 8), "none"),
    "lengths": (masks.lengths([4, 6]), range(8), range(4), "all"),
    "beyond lengths": (masks.lengths([4, 6]), range(8), range(6, 8), "none"),
    "kept": (masks.padding([[False] * 2 + [True] * 6]), range(8), range(2, 8), "all"),
    "padded": (masks.padding([[False] * 2 + [True] * 6]), range(8), range(2), "none"),
    "document": (masks.documents([0] * 4 + [1] * 4), range(4, 8), range(4, 8), "all"),
    "other document": (masks.documents([[0] * 4 + [1] * 4, [7] * 4 + [2] * 4]), range(4), range(4, 8), "none"),
    "one document": (masks.documents([[0] * 4, [1] * 4]), range(4), range(4), "all"),
    "dense": (masks.dense(np.tri(8, dtype=bool)), range(4, 8), range(5), "all"),
    "dense, hidden": (masks.dense(np.tri(8, dtype=bool)), range(4), range(4, 8), "none"),
    "block": (masks.blocks(np.eye(2, dtype=bool), 4), range(4, 8), range(5, 8), "all"),
    "other block": (masks.blocks(np.eye(2, dtype=bool), 4), range(4, 8), range(4), "none"),
    "and": (masks.causal() & masks.prefix(4), range(8, 12), range(4), "all"),
    "and with none": (masks.causal() & masks.prefix(4), range(2), range(4, 8), "none"),
    "or with all": (masks.causal() | masks.prefix(4), range(4), range(4), "all"),
    "not": (~masks.causal(), range(8), range(8, 16), "all"),
}


@pytest.mark.parametrize("name", TILES)
def test_tiles_that_are_plainly_all_or_none(name: str) -> None:
    """Where it can be seen from the ends of a tile, the answer is not merely "mixed"."""
    mask, rows, keys, expected = TILES[name]
    assert mask.tile(rows, keys) == expected
    assert mask.tile(rows, keys, 0, [0, 0]) == expected
    assert (~mask).tile(rows, keys) == {"all": "none", "none": "all"}.get(expected, expected)


def test_values_of_other_libraries_are_not_looked_at(library: Library) -> None:
    """Of arrays that are not NumPy's a tile is "mixed", and an empty tile is."""
    for mask in (masks.lengths, masks.padding, masks.documents, masks.dense):
        values = np.ones((2, 4), dtype=bool if mask in (masks.padding, masks.dense) else np.int64)
        values = values[:, 0] if mask is masks.lengths else values
        answer = mask(library.array(values)).tile(range(4), range(1))
        assert answer == ("all" if library.name == "numpy" else "mixed")
    if library.name != "numpy":
        assert masks.causal().tile(range(1, 2), range(1), library.array(np.asarray([0])), 0) == "mixed"
    assert masks.causal().tile(range(0), range(4)) == masks.causal().tile(range(4), range(0)) == "mixed"


def test_combination_laws(library: Library) -> None:
    """De Morgan, absorption and double negation hold pair by pair, and arrays combine from either side."""
    like = library.array(np.zeros(1))
    a, b = masks.window(1, 0), masks.padding(library.array(KEEP))

    def shown(mask: masks.Mask) -> np.ndarray:
        array = library.host(mask.to_array(ROWS, KEYS, 2, like=like))
        return np.broadcast_to(array, (2, 1, ROWS, KEYS))

    for left, right in (
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (~~a, a),
        (a & (a | b), a),
        (a | (a & b), a),
        (a & ~a, masks.prefix(0)),
        (a | ~a, masks.window(None, None)),
    ):
        np.testing.assert_array_equal(shown(left), shown(right))
    array = library.array(PAIRS)
    both, either = PAIRS & shown(a), PAIRS | shown(a)
    np.testing.assert_array_equal(shown(a & array), both)
    np.testing.assert_array_equal(shown(a | array), either)
    if library.name != "strict":  # whose arrays refuse to be combined with what they do not know
        np.testing.assert_array_equal(shown(array & a), both)
        np.testing.assert_array_equal(shown(array | a), either)


def test_masks_have_no_truth_value() -> None:
    """`and`, `or`, `not` and `if` on masks are errors that name the operators to use."""
    for use in (lambda m: m and m, lambda m: m or m, lambda m: not m, bool):
        assert_refused(errors.MaskArgumentError, "mask", ("& | ~",), use, masks.causal())


def test_drawings() -> None:
    """One mark per pair, a line per query, a block per batch entry and head; nothing for nothing."""
    assert masks.causal().to_text(3) == "x . .\nx x .\nx x x"
    assert masks.causal().to_text(1, 3, q_start=1) == "x x ."
    assert masks.padding([[True, False], [False, True]]).to_text(1, 2) == "x .\n\n. x"
    assert masks.causal().to_text(0) == masks.padding(np.zeros((2, 0), dtype=bool)).to_text(0).strip() == ""


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (masks.causal(), "causal()"),
        (masks.window(2, None), "window(2, None)"),
        (masks.window(None, 0), "causal()"),
        (masks.chunks(4), "chunks(4)"),
        (masks.prefix(4), "prefix(4)"),
        (masks.lengths(4), "lengths(4)"),
        (masks.padding([True]), "padding(ndarray of shape (1,) and dtype bool)"),
        (masks.documents([1, 2]), "documents(ndarray of shape (2,) and dtype int64)"),
        (masks.blocks([[True]], 2), "blocks(ndarray of shape (1, 1) and dtype bool, (2, 2))"),
        (masks.causal() & ~masks.prefix(1) | masks.chunks(2), "((causal() & ~prefix(1)) | chunks(2))"),
    ],
)  # fmt: skip
def test_masks_say_what_they_are(mask: masks.Mask, text: str) -> None:
    """repr reads like the constructors, arrays being described rather than printed."""
    assert repr(mask) == text


@pytest.mark.parametrize("name", KINDS)
def test_copies_and_pickles_show_the_same(name: str) -> None:
    """A copied, deep-copied or pickled mask shows the same pairs."""
    mask = build(name)
    for again in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):  # noqa: S301  # made here
        assert repr(again) == repr(mask)
        np.testing.assert_array_equal(again.to_array(ROWS, KEYS, 1), mask.to_array(ROWS, KEYS, 1))


def test_positional_masks_say_so() -> None:
    """Only masks that read query positions are positional, alone or within a combination."""
    reading, index = (masks.causal(), masks.window(1, 1), masks.chunks(2)), (masks.prefix(1), masks.lengths(1))
    assert all(mask.positional and (~mask).positional and (index[0] | mask).positional for mask in reading)
    assert not any(mask.positional or (~mask & index[1]).positional for mask in index)


def test_documents_of_different_integers_compare_by_value(library: Library) -> None:
    """Ids of queries and keys may have different integer dtypes."""
    for q_dtype, k_dtype in (("uint64", "int64"), ("uint8", "int32"), ("int8", "uint16")):
        q_ids, k_ids = (
            library.array(np.asarray([1, 2], dtype=q_dtype)),
            library.array(np.asarray([2, 1, 3], dtype=k_dtype)),
        )
        shown = masks.documents(q_ids, k_ids).to_array(2, 3, like=library.array(np.zeros(1)))
        np.testing.assert_array_equal(library.host(shown), [[False, True, False], [True, False, False]])


# ---- bad arguments ----------------------------------------------------------------------------------------

COUNT: tuple[Any, ...] = (-1, 1.0, 2.5, "2", True, None, [1], np.True_, np.float32(1), np.ones(2), math.inf, 1j)
NOT_BOOLEAN: tuple[Any, ...] = (
    [1, 0],
    [[0.5]],
    [["a"]],
    [[True], [True, False]],
    np.ones((2, 2)),
    np.ones((2, 2), dtype=int),
    1,
    "x",
)
NOT_INTEGER: tuple[Any, ...] = ([0.5], [True], ["a"], [[1], [1, 2]], [2**70], np.ones(2), 1.5, "x", {1}, None)
CONSTRUCTORS: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("window(left)", lambda x: masks.window(x, 0), tuple(x for x in COUNT if x is not None)),
    ("window(right)", lambda x: masks.window(0, x), tuple(x for x in COUNT if x is not None)),
    ("prefix(n)", masks.prefix, COUNT),
    ("chunks(size)", masks.chunks, (*COUNT, 0)),
    ("lengths(n)", masks.lengths, (-1, *NOT_INTEGER)),
    ("documents(q_ids)", masks.documents, (1, *NOT_INTEGER)),
    ("documents(k_ids)", lambda x: masks.documents([1], x), (1, *(x for x in NOT_INTEGER if x is not None))),
    ("blocks(size)", lambda x: masks.blocks([[True]], x), (*COUNT, 0, (1, 2, 3), [1, 1])),
    ("q_len", lambda x: masks.causal().to_array(x, 2), COUNT),
    ("k_len", lambda x: masks.causal().to_array(2, x), tuple(x for x in COUNT if x is not None)),
    ("rows", lambda x: masks.causal().visible(x, [0]), NOT_INTEGER),
    ("keys", lambda x: masks.causal().visible([0], x), NOT_INTEGER),
    ("rows", lambda x: masks.causal().tile(x, range(2)), (1, [0], None, range(-1, 2), range(0, 4, 2), range(4, 0, -1))),
    ("keys", lambda x: masks.causal().tile(range(2), x), (slice(0, 2), np.arange(2), range(-2, 0))),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "function", "values"), CONSTRUCTORS, ids=[str(c[0]) for c in CONSTRUCTORS])
def test_arguments_out_of_their_domain(argument: str, function: Any, values: tuple[Any, ...]) -> None:
    """Each wrong count, array, index or tile is an error of its own argument that says what came."""
    for value in values:
        assert_refused(errors.MaskArgumentError, argument, (type(value).__name__,), function, value)


@pytest.mark.parametrize(("argument", "function"), [
    ("padding(keep)", masks.padding), ("dense(array)", masks.dense), ("blocks(array)", lambda x: masks.blocks(x, 2)),
])  # fmt: skip
def test_masks_of_other_kinds_than_boolean(library: Library, argument: str, function: Any) -> None:
    """Integers, floats and text are no mask; an array of too low a rank is another error."""
    for value in NOT_BOOLEAN:
        assert_refused(errors.MaskKindError, argument, ("boolean",), function, value)
    for dtype in ("int32", "float32"):
        assert_refused(errors.MaskKindError, argument, ("(2, 3)", dtype), function, Maker(library)(2, 3, dtype=dtype))
    if argument != "dense(array)":
        low = Maker(library)(dtype="bool")
        assert_refused(errors.MaskArgumentError, argument, ("()", "bool"), function, low)


def test_combining_with_other_things() -> None:
    """& and | take masks and boolean arrays."""
    for value in (np.ones((2, 2)), np.ones((2, 2), dtype=int), True, "x", None, [[True]]):
        for combine in (lambda x: masks.causal() & x, lambda x: masks.causal() | x, lambda x: x & masks.causal()):
            assert_refused(errors.MaskKindError, "mask", (type(value).__name__,), combine, value)


def test_evaluation_beyond_the_arrays(library: Library) -> None:
    """Indices beyond a mask's host arrays, shapes that do not fit and other libraries are errors, not NumPy's."""
    for mask in (masks.padding([True] * 2), masks.documents([1, 2]), masks.dense(np.ones((2, 2), dtype=bool))):
        for keys in ([0, 2], [-1]):
            assert_refused(errors.MaskArgumentError, "rows", ("0 to 1",), mask.visible, [0], keys)
    assert_refused(errors.MaskArgumentError, "rows", ("0 to 1",), masks.documents([1, 2], [1]).visible, [2], [0])
    assert_refused(errors.BatchError, "rows", ("(3,)",), masks.causal().visible, np.zeros((2, 2), dtype=int), [0, 1, 2])
    clash = masks.lengths([1, 2, 3]) & masks.causal()
    assert_refused(errors.BatchError, "q_start", ("(3, 1)", "(2, 1)"), clash.to_array, 4, 4, [0, 1])
    assert_refused(errors.BatchError, "documents(k_ids)", ("(2,)", "(3,)"), masks.documents, [[1]] * 2, [[1]] * 3)
    for start in (1.5, "0", [0.5], True):
        assert_refused(errors.StartError, "q_start", ("int",), masks.causal().to_array, 2, 2, start)
        assert_refused(errors.StartError, "k_start", ("int",), masks.causal().tile, range(2), range(2), 0, start)
    ids = Maker(library).other(2, dtype="int32") if library.name == "numpy" else Maker(library)(2, dtype="int32")
    words = ("an array of NumPy",)
    misfit = masks.documents(ids)
    assert_refused(errors.LibraryMismatchError, "documents(q_ids)", words, misfit.to_array, 2, 2, like=np.zeros(1))
    assert_refused(errors.NotAnArrayError, "like", ("list",), masks.causal().to_array, 2, 2, like=[1])
    assert_refused(errors.MaskArgumentError, "lengths(n)", ("[-1, 2]",), masks.lengths, [-1, 2])
    assert_refused(errors.MaskArgumentError, "blocks(size)", ("int 0",), masks.blocks, [[True]], (1, 0))


def test_large_ids_stay_apart(library: Library) -> None:
    """Ids of 64 bits keep what is equal and what is not, in libraries whose default integers have 32 bits too."""
    ids = np.asarray([2**40, 0, 2**63 - 1, -(2**63), 2**40])
    unsigned = np.asarray([2**64 - 1, 2**63, 0], dtype=np.uint64)
    like = library.array(np.zeros(1))
    for q_ids, k_ids in ((ids, None), (ids, unsigned), (unsigned, ids), (ids.tolist(), [2**40])):
        keys = q_ids if k_ids is None else k_ids
        expected = [[int(q) == int(k) for k in keys] for q in q_ids]
        shown = masks.documents(q_ids, k_ids).to_array(len(q_ids), len(keys), like=like)
        np.testing.assert_array_equal(library.host(shown), expected)


def test_small_integers_of_numpy_do_not_wrap() -> None:
    """A NumPy integer as the side of a window or a length is the number that it is, in tiles too."""
    small: Any = np.uint8
    window = masks.window(small(2), small(0))
    np.testing.assert_array_equal(window.to_array(small(4), small(4)), masks.window(2, 0).to_array(4, 4))
    assert window.tile(range(8, 9), range(7, 9)) == "all"
    blocks = masks.blocks([[True, False]], 2)
    np.testing.assert_array_equal(blocks.to_array(small(2), small(4)), [[True, True, False, False]] * 2)
