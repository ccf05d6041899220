"""What kind of run a folder holds: `--overwrite` replaces a command's own runs, never those of another. No torch."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError

MATRIX = "matrix"  # a comparison of several cells
HEADLINE = "headline"
# files and folders that only runs leave; empty files are those of a run that failed before its first step
_LEFT = ("metrics.jsonl", "summary.json", "trace.parquet", "capacity.csv", "stage.jsonl", "headline.json")
_FOLDERS = ("cells", "checkpoints", "trajectories")


def kind_of(folder: Path) -> str | None:
    """`train`, `compare`, MATRIX, `ablate`, `simulate`, `replay`, `plan` or HEADLINE; None where nobody can say.

    What a finished run wrote about itself counts, of a stopped one its configuration and what it left.
    """
    if not (any(_has_content(folder / name) for name in _LEFT) or any(_holds(folder / n) for n in _FOLDERS)):
        return None
    summary = _summary(folder / "summary.json")
    if summary:
        return str(
            summary.get("kind") or ("compare" if isinstance(summary.get("systems"), dict) else "train")
        )
    if (folder / "trajectories").is_dir() or (folder / "headline.json").is_file():
        return HEADLINE
    tables = _tables(folder / "config.toml")
    if "ablate" in tables:
        return "ablate"
    if (folder / "cells").is_dir():
        return MATRIX
    if "compare" in tables:
        return "compare"
    if tables or _holds(folder / "checkpoints"):
        return "train"
    return "plan" if (folder / "capacity.csv").is_file() else None


def named(kind: str) -> str:
    """A run of that kind in words."""
    if kind == MATRIX:
        return "a comparison of several cells"
    return "a run of `make headline`" if kind == HEADLINE else f"a run of `lrmoe {kind}`"


def check_kind(folder: Path, setting: str, own: Sequence[str]) -> None:
    """Refuse a folder that holds a run of another kind, whether or not it is to be overwritten.

    Args:
        setting: how the message calls the run's name.
        own: kinds that the command makes.

    Raises:
        ConfigError: names the folder, its kind and the ways out.
    """
    kind = kind_of(folder)
    if kind is None or kind in own:
        return
    raise ConfigError(
        f"{setting}={folder.name!r}: {folder} holds {named(kind)}, which `lrmoe {own[0]}` does not replace, "
        "with --overwrite neither; choose another --name, or remove it"
    )


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _holds(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _summary(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
