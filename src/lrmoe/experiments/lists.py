"""Lists in the table [compare] and in its options: checked, each value once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lrmoe.errors import ConfigError


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def words(name: str, value: Any) -> tuple[str, ...]:
    """Names that are not empty."""
    return _checked(name, value, "names", lambda item: isinstance(item, str) and bool(item))


def seeds(name: str, value: Any) -> tuple[int, ...]:
    """Integers from 0."""
    return _checked(name, value, "integers >= 0", lambda item: type(item) is int and 0 <= item < 2**63)


def positive_numbers(name: str, value: Any) -> tuple[float, ...]:
    """Finite numbers above 0."""
    return _floats(_checked(name, value, "finite numbers > 0", lambda item: is_number(item) and item > 0))


def non_negative_numbers(name: str, value: Any) -> tuple[float, ...]:
    """Finite numbers from 0."""
    return _floats(_checked(name, value, "finite numbers >= 0", lambda item: is_number(item) and item >= 0))


def split(text: str) -> list[str]:
    """The parts of "a,b", without blanks around them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def names(option: str, text: str, valid: Iterable[Any]) -> list[str]:
    """The parts of an option like "a,b".

    Args:
        valid: what may be named, for the message; whether a name is one of it is for others to say.

    Raises:
        ConfigError: there is none; names the option and what is valid.
    """
    found = split(text)
    if not found:
        raise ConfigError(
            f"--{option} {text!r}: names nothing; valid, separated by commas: {', '.join(map(str, valid))}"
        )
    return found


def numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    """The numbers of an option like "0,1,2".

    Raises:
        ConfigError: a part is none, or there is none; names the option.
    """
    found: list[Any] = []
    with contextlib.suppress(ValueError):
        found = [kind(part) for part in split(text)]
    if not found:
        what = "integers" if kind is int else "numbers"
        raise ConfigError(f"--{option} {text!r}: must be {what}, separated by commas")
    return found


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _checked(name: str, value: Any, what: str, valid: Callable[[Any], bool]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not all(map(valid, value)):
        raise ConfigError(f"compare.{name}={value!r}: must be a list of {what}")
    if len(set(value)) != len(value):
        raise ConfigError(f"compare.{name}={list(value)!r}: each once")
    return tuple(value)
