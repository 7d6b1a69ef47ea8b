"""Reading conventions from TOML. What is wrong is said in one sentence: file, key, what was expected, what came."""

from __future__ import annotations

import tomllib
import types
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from refattn.conformance.conventions.convention import NONE, Convention
from refattn.conformance.near import meant
from refattn.dtypes import COMPUTED

SUFFIX = ".toml"
# TOML's words for the types.
WORDS = {str: "a string", bool: "true or false", int: "an integer", dict: "a table", tuple: "a list", float: "a number"}


class ConventionError(ValueError):
    """A convention that cannot be read; the message is one sentence."""


def convention_names() -> tuple[str, ...]:
    """The conventions that come with refattn, in alphabetical order."""
    files = resources.files("refattn.conformance.conventions").iterdir()
    return tuple(sorted(file.name.removesuffix(SUFFIX) for file in files if file.name.endswith(SUFFIX)))


def find_convention(name: str) -> Convention:
    """The convention of that name, or in the file NAME.toml that it is the path of. Raises ConventionError."""
    if name.endswith(SUFFIX):
        return read_convention(Path(name))
    if name not in convention_names():
        guess, names = meant(name, convention_names()), ", ".join(convention_names())
        raise ConventionError(f"no convention {name!r}{guess or ';'} there are {names}, or the path of a file {SUFFIX}")
    text = (resources.files("refattn.conformance.conventions") / f"{name}{SUFFIX}").read_text(encoding="utf-8")
    return parse_convention(text, name, f"{name}{SUFFIX}")


def read_convention(path: Path) -> Convention:
    """The convention in a file of the user's own, named after it. Raises ConventionError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ConventionError(f"{path}: expected a TOML file, got {type(fault).__name__}: {fault}") from fault
    return parse_convention(text, path.stem, str(path))


def parse_convention(text: str, name: str, file: str) -> Convention:
    """The convention that a text describes. Raises ConventionError, which names the file."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as fault:  # numbers and nesting beyond Python's limits included
        raise ConventionError(f"{file}: expected TOML, got an error: {fault}") from fault
    convention = _build(Convention, table, file, "", {"name": name})
    assert isinstance(convention, Convention)
    unknown = [dtype for dtype in convention.dtypes if dtype not in COMPUTED]
    if unknown:
        raise ConventionError(f"{file}: dtypes: expected {', '.join(COMPUTED)}, got {unknown[0]!r}")
    for key, expected in convention.problems():
        raise ConventionError(f"{file}: {key}: expected {expected}, got {_came(table, key)}")
    return convention


def _build(kind: type, table: Any, file: str, where: str, known: dict[str, Any]) -> Any:
    """An instance of a dataclass from a table, every value checked against the type of its field."""
    if not isinstance(table, dict):
        raise ConventionError(f"{file}: {where.rstrip('.')}: expected a table, got {_words(table)}")
    hints = get_type_hints(kind)
    allowed = [one.name for one in fields(kind) if one.name not in known]
    for key in table:
        if key not in allowed:
            guess = meant(key, allowed)
            raise ConventionError(f"{file}: {where}{key}: expected one of {', '.join(allowed)}, got this key{guess}")
    values = {key: _value(hints[key], value, file, f"{where}{key}") for key, value in table.items()}
    try:
        return kind(**known, **values)
    except TypeError as fault:  # a field without a default
        missing = next(one for one in allowed if one not in values and f"'{one}'" in str(fault))
        raise ConventionError(f"{file}: {where}{missing}: expected {_expected(hints[missing])}, got nothing") from fault


def _value(hint: Any, value: Any, file: str, where: str) -> Any:
    """The value as its field has it."""
    kinds = [kind for kind in _alternatives(hint) if kind is not type(None)]
    for kind in kinds:
        if is_dataclass(kind):
            return _build(kind, value, file, f"{where}.", {})  # type: ignore[arg-type]  # is_dataclass knows classes too
        if _fits(kind, value):
            inner = get_args(kind)
            if get_origin(kind) is tuple:
                return tuple(_value(inner[0], one, file, where) for one in value)
            if get_origin(kind) is dict:
                return {key: _value(inner[1], one, file, f"{where}.{key}") for key, one in value.items()}
            return none_of(value) if kind is Any else value
    raise ConventionError(f"{file}: {where}: expected {_expected(hint)}, got {_words(value)}")


def none_of(value: Any) -> Any:
    """TOML has no None: the word stands for it."""
    return None if value == NONE else value


def _fits(kind: Any, value: Any) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return value in get_args(kind) and not isinstance(value, bool)
    plain = get_origin(kind) or kind
    if plain is tuple:
        return isinstance(value, list)
    return isinstance(value, plain) and (plain is bool or not isinstance(value, bool))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _expected(hint: Any) -> str:
    words: list[str] = []
    for kind in _alternatives(hint):
        if get_origin(kind) is Literal:
            words += map(repr, get_args(kind))
        elif kind is not type(None):
            words.append("a table" if is_dataclass(kind) else WORDS.get(get_origin(kind) or kind, "a value"))
    return " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


def _words(value: Any) -> str:
    kind = next((word for plain, word in WORDS.items() if type(value) is plain), "a list")
    return kind if isinstance(value, (dict, list)) else f"{kind}, {value!r}"


def _came(table: dict[str, Any], key: str) -> str:
    found: Any = table
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return "nothing" if found is None else _words(found) if not isinstance(found, (dict, list)) else repr(found)
