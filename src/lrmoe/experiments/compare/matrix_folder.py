"""The folder of a comparison of several cells: what is finished there, and whether it may be gone on with.

    runs/<name>/{config.toml, summary.json, rows.csv, report.html}
    runs/<name>/cells/<cell>/{config.toml, metrics.jsonl, trace.parquet, summary.json}

A cell is finished once its summary.json is there, which is written last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError
from lrmoe.experiments.compare.cells import CELLS, ROWS, Cell
from lrmoe.experiments.compare.config import Experiment
from lrmoe.experiments.writing import json_text, write_whole
from lrmoe.training.folder import CONFIG, SUMMARY, check_free, claim
from lrmoe.training.kinds import MATRIX, named
from lrmoe.training.toml_files import read_toml

KINDS = ("compare", MATRIX)  # that `lrmoe compare` makes
# keys that change nothing that a cell measures
_FREE = {"train": {"name", "runs", "log_every"}, "compare": {"against"}}


def finished(cell: Cell) -> dict[str, Any] | None:
    """The summary of a finished cell, or None."""
    summary = _read(cell.experiment.folder / SUMMARY)
    return summary if summary is not None and summary.get("kind") == "compare" else None


def check(experiment: Experiment, cells: Sequence[Cell], *, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, holds another run, or cells of another configuration; changes nothing.

    Raises:
        ConfigError: names the folder, what differs, and the ways out.
    """
    folder = experiment.folder
    if overwrite or not (folder / CELLS).is_dir():
        check_free(experiment.train, overwrite=overwrite, kinds=KINDS)
        return
    check_free(experiment.train, overwrite=True, kinds=KINDS)  # also: whether it can be written at all
    known = {cell.name for cell in cells}
    others = sorted(
        path.name for path in (folder / CELLS).iterdir() if path.is_dir() and path.name not in known
    )
    if others:
        raise _refused(experiment, f"holds cells that are not asked for now ({', '.join(others)})")
    for cell in cells:
        changed = list(_changed(cell))
        if changed:
            raise _refused(
                experiment, f"cell {cell.name} was run with another configuration: {'; '.join(changed)}"
            )


def make_room(experiment: Experiment, *, overwrite: bool) -> None:
    """Keep one comparison out of a folder that holds several, or with `overwrite` remove these.

    Raises:
        ConfigError: it holds some, and `overwrite` is not set; or they are cells of another command.
    """
    cells = experiment.folder / CELLS
    if not cells.is_dir():
        return
    check_free(experiment.train, overwrite=True, kinds=KINDS)
    if not overwrite:
        raise ConfigError(
            f"train.name={experiment.train.train.name!r}: {experiment.folder} holds {named(MATRIX)}; "
            "pass --overwrite to replace it, or choose another --name"
        )
    _drop_cells(experiment.folder)


def _drop_cells(folder: Path) -> None:
    shutil.rmtree(folder / CELLS, ignore_errors=True)
    (folder / ROWS).unlink(missing_ok=True)


def begin(experiment: Experiment, *, overwrite: bool) -> None:
    """Make the folder with its config.toml; with `overwrite` without what an earlier run left."""
    if overwrite:
        _drop_cells(experiment.folder)
    claim(experiment.train, experiment.write, fresh=overwrite)


def write_summary(experiment: Experiment, summary: Mapping[str, Any], rows: str) -> None:
    """Write summary.json and rows.csv, each whole or not at all."""
    write_whole(experiment.folder / ROWS, rows)
    write_whole(experiment.folder / SUMMARY, json_text(summary))


def _refused(experiment: Experiment, reason: str) -> ConfigError:
    return ConfigError(
        f"train.name={experiment.train.train.name!r}: {experiment.folder} {reason}; give the same options to go on "
        "with it, pass --overwrite to run all of it anew, or choose another --name"
    )


def _changed(cell: Cell) -> Iterator[str]:
    """What differs from the configuration that a cell's folder holds: "table.key: old, now new"."""
    path = cell.experiment.folder / CONFIG
    if not path.is_file():
        return
    old, new = read_toml(path), cell.experiment.to_dict()
    for table in sorted({*old, *new}):
        before, now = old.get(table, {}), new.get(table, {})
        for key in sorted({*before, *now} - _FREE.get(table, set())):
            if before.get(key) != now.get(key):
                yield f"{table}.{key} was {_said(before, key)}, now {_said(now, key)}"


def _said(table: Mapping[str, Any], key: str) -> str:
    return repr(table[key]) if key in table else "unset"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
