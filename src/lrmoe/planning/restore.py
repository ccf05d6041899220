"""Reading a planner's state back: everything is looked at before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from lrmoe.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_WORDS = {float: "a number", int: "an integer >= 0", bool: "true or false"}


def checked(part: DataclassInstance, state: Any, *, but: str, where: str) -> dict[str, Any]:
    """The values of a state, for the fields of `part`, which says their types; changes nothing.

    Args:
        part: a dataclass of floats, ints and bools. state: from JSON.
        but: a field that the configuration sets and no state has. where: how an error calls the state.

    Raises:
        ConfigError: the state is no table, lacks a field, or has one of another type; names the field.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"{where}={state!r}: must be a table")
    names = [item.name for item in fields(part) if item.name != but]
    missing = [name for name in names if name not in state]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    return {name: value_of(type(getattr(part, name)), state[name], f"{where}.{name}") for name in names}


def value_of(kind: type, value: Any, where: str) -> Any:
    """`value` as that type; a whole float may come back from JSON as an integer.

    Raises:
        ConfigError: it is of another type, or a negative integer; `where` names it.
    """
    valid = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if isinstance(value, bool) != (kind is bool) or not valid or (kind is int and value < 0):
        raise ConfigError(f"{where}={value!r}: must be {_WORDS[kind]}")
    return kind(value)
