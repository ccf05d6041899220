"""Runs an ablation: every rule beside the same run with nothing dropped, on worker processes; resumable.

    runs/<name>/{config.toml, summary.json, rows.csv, report.html}
    runs/<name>/cells/<regime>-<rule>-seed<s>/     a trajectory, not run again once it is finished

Quotas are those of 8 ranks (virtual.py), so that what is dropped is what expert parallelism would drop.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from lrmoe.errors import ConfigError
from lrmoe.experiments.ablate.rows import COLUMNS, between, cell_values, rows_of
from lrmoe.experiments.ablate.rules import Ablation, Cell
from lrmoe.experiments.compare.cells import CELLS, ROWS, named_model
from lrmoe.experiments.folder import check_free
from lrmoe.experiments.trajectories.regimes import (
    START_STEPS,
    get_regime,
    regime_config,
    start_is_made,
    start_model,
)
from lrmoe.experiments.trajectories.trajectory import Trajectory, TrajectoryJob, run_trajectory
from lrmoe.experiments.workers import Job, run_jobs
from lrmoe.experiments.workers_display import Display
from lrmoe.experiments.writing import csv_text, json_text, write_whole
from lrmoe.telemetry.figures import environment
from lrmoe.training.config import ModelConfig, TrainConfig
from lrmoe.training.locks import alone
from lrmoe.training.toml_files import read_toml

KIND = "ablate"
_HERE = "lrmoe.experiments.ablate.run"


def ablate(
    ablation: Ablation, *, workers: int | None = None, overwrite: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Run what is not finished and write the folder.

    Args:
        workers: processes; None: one per core.
        overwrite: begin anew where the folder holds another run.
        console: shows progress; None: stderr.

    Returns:
        The summary.

    Raises:
        ConfigError: the folder holds something else, or the model cannot be trained so.
        JobsFailed: some runs failed; the others are finished and stay.
    """
    _check_folder(ablation, overwrite)
    with alone(ablation.folder, setting="name", command="ablate"):
        return _run(ablation, workers, overwrite, console)


def _run(ablation: Ablation, workers: int | None, overwrite: bool, console: Console | None) -> dict[str, Any]:
    begin = time.monotonic()
    _begin(ablation, overwrite)
    _start(ablation, console)
    jobs = {cell: job_of(ablation, cell) for cell in ablation.cells()}
    missing = [cell for cell, job in jobs.items() if not job.finished]
    tasks = [_task(ablation, cell, jobs[cell].config.train.steps) for cell in missing]
    steps = sum(task.steps for task in tasks)
    with Display(
        ablation.folder.name, jobs=len(jobs), steps=steps, done=len(jobs) - len(tasks), console=console
    ) as display:
        run_jobs(tasks, workers=workers, display=display)
    summary = summarise(ablation, {cell: Trajectory.load(job.folder) for cell, job in jobs.items()})
    summary["total_s"] = time.monotonic() - begin
    _write(ablation.folder, summary)
    return summary


def job_of(ablation: Ablation, cell: Cell) -> TrajectoryJob:
    """The trajectory of a cell; makes the start checkpoint where there is none."""
    base = _base(ablation, {"max_drop": 0.0} if cell.rule is None else cell.rule.changes)
    config = regime_config(base, cell.regime, cell.seed, ablation.cache)
    if ablation.steps is not None:
        config = config.replace(train={"steps": ablation.steps})
    return TrajectoryJob(
        config=config,
        folder=ablation.folder / CELLS / cell.name,
        record_every=0,
        quota_rule="variance" if cell.rule is None else cell.rule.quota_rule,
    )


def train_cell(ablation: Ablation, cell: Cell, report: Callable[[int], None]) -> None:
    """What a worker does for a cell."""
    run_trajectory(job_of(ablation, cell), report)


def train_start(ablation: Ablation, report: Callable[[int], None]) -> None:
    """What a worker does for the start checkpoint."""
    start_model(_base(ablation, {}), ablation.cache, lambda step, _: report(step))


def _base(ablation: Ablation, lrmoe: Mapping[str, Any]) -> TrainConfig:
    tables = {"train": {"router_aux_loss": ablation.aux}, "lrmoe": dict(lrmoe)}
    model = named_model(ablation.model, ModelConfig())
    return TrainConfig.from_dict({**tables, "model": {k: v for k, v in vars(model).items() if v is not None}})


def _task(ablation: Ablation, cell: Cell, steps: int) -> Job:
    return Job(name=cell.name, target=f"{_HERE}:train_cell", args=(ablation, cell), steps=steps)


def _start(ablation: Ablation, console: Console | None) -> None:
    """Make the start checkpoint, in a process of its own so that it shows its steps, where some regime needs it."""
    needed = any(get_regime(part.regime).continues for part in ablation.parts)
    if not needed or start_is_made(_base(ablation, {}), ablation.cache):
        return
    job = Job(name="start checkpoint", target=f"{_HERE}:train_start", args=(ablation,), steps=START_STEPS)
    with Display("start checkpoint, trained once", jobs=1, steps=START_STEPS, console=console) as display:
        run_jobs([job], workers=1, display=display)


def _check_folder(ablation: Ablation, overwrite: bool) -> None:
    """Refuse a folder that holds something else, or cannot be written; changes nothing."""
    folder, path = ablation.folder, ablation.folder / "config.toml"
    check_free(folder, own=("summary.json", "report.html"), replaceable=True, overwrite=overwrite, kind=KIND)
    mine = _config(ablation)
    if overwrite or not path.exists():
        return
    found = read_toml(path).get(KIND, {})
    changed = [
        f"{key} was {found.get(key, 'unset')}, now {mine.get(key, 'unset')}"
        for key in sorted({*found, *mine})
        if found.get(key) != mine.get(key)
    ]
    if changed:
        raise ConfigError(
            f"name={folder.name!r}: {folder} holds an ablation of another configuration: {'; '.join(changed)}; pass "
            "--overwrite to replace it, or choose another --name"
        )


def _begin(ablation: Ablation, overwrite: bool) -> None:
    """Make room where that was asked for, and write config.toml."""
    if overwrite:
        shutil.rmtree(ablation.folder / CELLS, ignore_errors=True)
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in _config(ablation).items())
    text = f"# What all runs of this ablation share.\n[{KIND}]\n{lines}"
    (ablation.folder / "config.toml").write_text(text, encoding="utf-8")


def _config(ablation: Ablation) -> dict[str, Any]:
    values = {"model": ablation.model, "aux": float(ablation.aux), "steps": ablation.steps}
    return {key: value for key, value in values.items() if value is not None}


def summarise(ablation: Ablation, found: Mapping[Cell, Trajectory]) -> dict[str, Any]:
    """The summary of finished cells."""
    cells = [cell_values(cell, trajectory) for cell, trajectory in found.items()]
    regimes = {cell.regime: get_regime(cell.regime) for cell in found}
    return {
        "kind": KIND,
        **_config(ablation),
        "regimes": {
            name: {"about": regime.about, "target_loss": regime.target_loss}
            for name, regime in regimes.items()
        },
        "rows": rows_of(cells),
        "between": between(cells),
        "cells": cells,
        "context": environment(),
    }


def _write(folder: Path, summary: Mapping[str, Any]) -> None:
    rows = [{**{name: row[name] for name in COLUMNS}, "seeds": len(row["seeds"])} for row in summary["rows"]]
    write_whole(folder / ROWS, csv_text(COLUMNS, rows))
    write_whole(folder / "summary.json", json_text(summary))
