"""Read what run folders hold; whatever cannot be read is an error that names the file and the line."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError

Line = Mapping[str, Any]
MADE_BY = "train, compare, ablate, plan, simulate, replay or `make headline`"


def json_object(text: str, where: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigError: names `where`.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def json_lines(path: Path, *, cut: bool = False) -> list[dict[str, Any]]:
    """One object a line; none where there is no such file.

    Args:
        cut: leave out a last line without its end, as a run that was stopped while writing leaves it.

    Raises:
        ConfigError: a line is not a JSON object.
    """
    if not path.is_file():
        return []
    text = read_text(path)
    rows = text.splitlines()
    if cut and text and not text.endswith("\n"):
        rows = rows[:-1]
    return [json_object(row, f"{path}, line {i}") for i, row in enumerate(rows, 1) if row.strip()]


def toml(path: Path) -> dict[str, Any]:
    """Tables of a TOML file; none where there is no such file.

    Raises:
        ConfigError: not valid TOML.
    """
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from error


def csv_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file by column.

    Raises:
        ConfigError: a row does not fit the heading, or there is none.
    """
    rows = list(csv.DictReader(read_text(path).splitlines()))
    if not rows:
        raise ConfigError(f"{path}: no rows there")
    for i, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ConfigError(f"{path}, line {i}: has not as many cells as the heading")
    return rows


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
