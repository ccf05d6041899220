"""Run a comparison of several cells, one after another, each in processes of its own.

    per cell  finished? -> a line  |  compare(cell) -> cells/<cell>/
              rows of all finished cells -> summary.json, rows.csv

What ends a cell early leaves the finished ones: the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError, InfeasibleError, LRMoEError
from lrmoe.experiments.compare.cells import Cell
from lrmoe.experiments.compare.config import Experiment
from lrmoe.experiments.compare.live import Place
from lrmoe.experiments.compare.matrix_folder import begin, check, finished, write_summary
from lrmoe.experiments.compare.matrix_rows import COLUMNS, ratios, rows_of
from lrmoe.experiments.compare.run import compare
from lrmoe.experiments.compare.starting import started
from lrmoe.experiments.terminal import duration
from lrmoe.experiments.trajectories.regimes import CACHE
from lrmoe.experiments.writing import csv_text
from lrmoe.telemetry.figures import environment
from lrmoe.training.kinds import MATRIX
from lrmoe.training.locks import alone

_SEEN_OF_CELL = ("link_bytes_per_s", "link_rule", "common_loss", "total_s")


def run_matrix(
    experiment: Experiment, cells: Sequence[Cell], *, overwrite: bool = False, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run the cells that are not finished, and write the folder of the whole.

    Args:
        cells: of `experiment`, two or more.
        overwrite: run all of them anew.
        say: called with a line for each cell.

    Returns:
        The summary: "rows" by cell, system and target, and "paired" ratios over seeds.

    Raises:
        ConfigError: the folder cannot be written, holds another run, or cells of another configuration, or another
            comparison is at work in it.
        LRMoEError: a cell failed; names it. The cells before it stay.
    """
    check(experiment, cells, overwrite=overwrite)
    with alone(experiment.folder, setting="train.name", command="compare"):
        return _run_missing(experiment, cells, overwrite, say)


def _run_missing(
    experiment: Experiment, cells: Sequence[Cell], overwrite: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    begin(experiment, overwrite=overwrite)
    cache, took = Path(experiment.train.train.runs) / CACHE.name, list[float]()
    for i, cell in enumerate(cells):
        if finished(cell) is not None:
            say(f"cell {i + 1} of {len(cells)}, {cell.name}: finished before")
            continue
        left = sum(finished(later) is None for later in cells[i + 1 :])
        place = Place(number=i + 1, of=len(cells), name=cell.name, left=left, took_s=tuple(took))
        begun = time.monotonic()
        _run(cell, place, cache, say)
        took.append(time.monotonic() - begun)
        _write(experiment, cells)
        say(f"{place.words}: done in {duration(took[-1])}")
    return _write(experiment, cells)


def _run(cell: Cell, place: Place, cache: Path, say: Callable[[str], None]) -> None:
    try:
        compare(started(cell.experiment, cache, say), overwrite=True, place=place)
    except (ConfigError, InfeasibleError) as error:
        raise type(error)(f"{place.words}: {error}") from error
    except LRMoEError as error:
        raise LRMoEError(f"{place.words}: {error}") from error
    except (KeyboardInterrupt, SystemExit):
        say(f"stopped in {place.words}; the same command goes on with it")
        raise


def _write(experiment: Experiment, cells: Sequence[Cell]) -> dict[str, Any]:
    """Write and return the summary of the cells that are finished."""
    found = [(cell, summary) for cell in cells if (summary := finished(cell)) is not None]
    rows = [row for cell, summary in found for row in rows_of(cell, summary)]
    c = experiment.compare
    summary = {
        "kind": MATRIX,
        "preset": experiment.preset,
        "systems": list(c.systems),
        "against": c.base,
        "targets": list(c.aims),
        "max_steps": c.max_steps,
        "smoothing": {"kind": "mean of the last steps", "steps": c.smoothing_steps},
        "world_size": c.ep,
        "cells_finished": len(found),
        "cells_asked": len(cells),
        "cells": [_about(cell, summary) for cell, summary in found],
        "rows": rows,
        "paired": ratios(rows, c.base),
        "fairness": _fairness(found),
        "total_s": sum(summary["total_s"] for _, summary in found),
        "context": environment(),
    }
    write_summary(experiment, summary, csv_text(COLUMNS, rows))
    return summary


def _about(cell: Cell, summary: Mapping[str, Any]) -> dict[str, Any]:
    return {"cell": cell.name, **cell.key, **{name: summary.get(name) for name in _SEEN_OF_CELL}}


def _fairness(found: Sequence[tuple[Cell, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Per model what each system was given; seeds and auxiliary losses change nothing of it."""
    by_model: dict[str, dict[str, Any]] = {}
    for cell, summary in found:
        given = {name: entry["fairness"] for name, entry in summary["systems"].items()}
        by_model.setdefault(cell.model, given)
    return by_model
