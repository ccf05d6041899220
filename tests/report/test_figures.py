"""The page, `report --json`, each command's own --json and its CSV hold the same numbers."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lrmoe.experiments import replay_command, simulation
from lrmoe.experiments.ablate.rows import figures_of
from lrmoe.experiments.compare.figures import QUANTITIES
from lrmoe.experiments.compare.figures import figures as compare_figures
from lrmoe.experiments.simulation import figures as simulate_figures
from lrmoe.report import sections, tables
from lrmoe.report.figures import ABLATE, COMPARE, REPLAY, SIMULATE, figures
from lrmoe.report.load import load_run
from lrmoe.report.matrix_figures import TARGET_QUANTITIES
from lrmoe.report.numbers import number, seconds, size
from lrmoe.simulate.run import Settings, run
from lrmoe.training.figures import FIGURES as TRAIN
from lrmoe.training.figures import figures as train_figures
from tests.experiments.test_ablate import GOOD
from tests.experiments.test_ablate import summary as ablate_summary
from tests.report.synthetic import compare_run, plan_csv, plan_lines, replay_run, train_run


def _values(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {figure["name"]: (figure["value"], figure["unit"], figure["better"]) for figure in found}


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_a_comparison_and_its_own_policy(tmp_path: Path) -> None:
    folder = compare_run(tmp_path / "run", ("megatron", "lrmoe", "some/my_file.py:Mine"))
    loaded = load_run(folder)
    ours, theirs = _values(figures(loaded)), _values(compare_figures(_summary(folder)))
    assert len(ours) > 20
    assert {name: theirs[name] for name in ours} == ours
    assert "compare.some/my_file.py:Mine.steps" in ours
    cell = {row[0]: row for row in tables.headline(loaded).rows}["MoE-layer time, wall"]
    for i, name in enumerate(("megatron", "lrmoe", "some/my_file.py:Mine"), 1):
        assert cell[i].startswith(seconds(ours[f"compare.{name}.moe_time_wall_s"][0]))


def test_a_training_run(tmp_path: Path) -> None:
    folder = train_run(tmp_path / "mine")
    ours, theirs = (
        _values(figures(load_run(folder))),
        _values(train_figures({**_summary(folder), "eval_loss": None})),
    )
    assert theirs == ours


def test_a_simulation(tmp_path: Path) -> None:
    summary = run(Settings(systems=("megatron", "lrmoe"), ranks=(4,), experts=(16,), tokens=128, top_k=2))
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "context": {"command": "test"}}))
    ours = _values(figures(load_run(tmp_path)))
    theirs = _values(simulate_figures({**summary, "context": {}}))
    assert "simulate.R4E16.lrmoe.backward_peak" in ours
    assert all(theirs[name][0] == pytest.approx(ours[name][0]) for name in ours if name in theirs)


def test_an_ablation(tmp_path: Path) -> None:
    summary = ablate_summary({None: [0.1, 0.5], GOOD: [0.11, 0.53]})
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "context": {"command": "test"}}))
    ours = {name: value for name, (value, _, _) in _values(figures(load_run(tmp_path))).items()}
    assert ours == {name: value for name, value, _, _ in figures_of(summary)}
    assert ours["ablate.memorise.lrm.topk.drop0.3.dloss"] == pytest.approx(0.02)


def test_a_replay(tmp_path: Path) -> None:
    folder = replay_run(tmp_path / "call")
    found = _values(figures(load_run(folder)))
    entry = _summary(folder)["systems"]["lrmoe"]
    assert found["replay.lrmoe.backward_ms"][0] == entry["backward_ms"]
    assert "replay.megatron.layer_speedup" not in found


def test_a_plan_passes_its_lines_on(tmp_path: Path) -> None:
    path = plan_lines(tmp_path / "plan.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert figures(load_run(path)) == lines


def test_a_sweep_and_its_csv(tmp_path: Path) -> None:
    path = plan_csv(tmp_path / "capacity.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    loaded = load_run(path)
    shown = sections.section(loaded, "run0").headline
    for row, cells in zip(rows, shown.rows, strict=True):
        assert cells[2] == row["largest_micro_batch"]
        assert cells[3] == size(float(row["device_bytes"]))
        assert cells[6] == number(float(row["layer_ms"]), 4)
    assert [value for value, _, _ in _values(figures(loaded)).values()] == [2, 0]


def test_a_quantity_has_one_unit_and_one_better_direction_in_every_command() -> None:
    of_targets = {name: (unit, better) for name, _, unit, better in TARGET_QUANTITIES}
    replays = {**replay_command.QUANTITIES, **replay_command.RATIOS}
    mappings = (
        COMPARE,
        SIMULATE,
        REPLAY,
        ABLATE,
        TRAIN,
        QUANTITIES,
        simulation.QUANTITIES,
        replays,
        of_targets,
    )
    found: dict[str, set[tuple[str, str]]] = {}
    for mapping in mappings:
        for name, unit in mapping.items():
            found.setdefault(name, set()).add(unit)
    differ = {name: units for name, units in found.items() if len(units) > 1}
    assert differ == {}
    assert found["kept_share"] == {("share", "higher")}
    units = {unit for known in found.values() for unit, _ in known}
    assert not units & {"B", "fraction", "nats/token", "peak/mean"}, "words that were replaced"
