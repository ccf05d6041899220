"""A configuration's tables as they are written: a TOML file, and `table.key=value` overrides."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError


def read_tables(path: str | Path | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a TOML file, if one is named, with `table.key=value` overrides applied, later ones last.

    Raises:
        ConfigError: the file cannot be read, an override cannot be, or a table is not one.
    """
    values = {} if path is None else read_toml(path)
    for override in overrides:
        apply_override(values, override)
    for name, table in values.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{name}={table!r}: must be a table")
    return values


def read_toml(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: it cannot be read or is not TOML; names the path.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 text: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one dotted key, in place: "lrmoe.max_drop=0.2". The value is TOML; what is not TOML is taken as a string."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or len(names) < 2 or not all(names):
        raise ConfigError(f"--set {override!r}: must look like table.key=value")
    table = values
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override!r}: {name} is not a table")
    try:
        table[names[-1]] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[names[-1]] = text.strip()
