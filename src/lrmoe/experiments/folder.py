"""Folders of commands that write no checkpoints: another run is never replaced unasked. Needs no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError
from lrmoe.experiments.writing import json_text
from lrmoe.report import html
from lrmoe.report.data import Run
from lrmoe.report.load import load_run
from lrmoe.training.kinds import check_kind, kind_of

# of any run: train and compare write all but the last, which belongs to `lrmoe plan`
RESULTS = ("metrics.jsonl", "summary.json", "trace.parquet", "report.html", "capacity.csv")


def check_free(
    folder: Path, *, own: Sequence[str], replaceable: bool, overwrite: bool, kind: str = "simulate"
) -> None:
    """Refuse a folder that cannot be written or holds another run; creates and changes nothing.

    Args:
        folder: of the run.
        own: files that a run of the same kind leaves there.
        replaceable: whether a run of the same kind may be replaced unasked (its name is the command's default).
        overwrite: whether any earlier run of this kind may.
        kind: of the run, as its summary says.

    Raises:
        ConfigError: names the folder and the ways out. Checkpoints and runs of other commands are refused even with
            `overwrite`.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        raise ConfigError(f"name={folder.name!r}: cannot write to {place}")
    checkpoints = folder / "checkpoints"
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        raise ConfigError(
            f"name={folder.name!r}: {folder} holds checkpoints of a training run, which --overwrite does not touch; "
            "choose another name, or remove it"
        )
    check_kind(folder, "name", (kind,))
    found = [name for name in RESULTS if _has_content(folder / name)]
    if not found or overwrite or (replaceable and set(found) <= set(own) and _same_kind(folder, kind)):
        return
    raise ConfigError(
        f"name={folder.name!r}: {folder} holds an earlier run ({', '.join(found)}); pass --overwrite to replace it, "
        "or choose another name"
    )


def _clear(folder: Path) -> None:
    """Make the folder and remove what an earlier run left there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*RESULTS, "config.toml"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)


def put(summary: Mapping[str, Any], folder: Path) -> tuple[Run, Path]:
    """Write a run's summary and page, in the place of what an earlier run left there.

    Returns:
        The run as a report reads it, and the page.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        _clear(folder)
        (folder / "summary.json").write_text(json_text(summary), encoding="utf-8")
        run = load_run(folder)
        return run, html.write([run], folder / "report.html")
    except OSError as error:
        raise ConfigError(f"name={folder.name!r}: cannot write to {folder}: {error}") from error


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _same_kind(folder: Path, kind: str) -> bool:
    """Whether a summary, if there is one, is of that kind."""
    return not (folder / "summary.json").exists() or kind_of(folder) == kind
