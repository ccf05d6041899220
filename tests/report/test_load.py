"""Run folders become typed runs, or a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lrmoe.errors import ConfigError
from lrmoe.report.data import Run
from lrmoe.report.load import load_run
from tests.report.synthetic import FORWARD, LAYERS, STEPS, compare_run, train_run


def test_comparison(compared: Run) -> None:
    assert (compared.kind, compared.name, compared.target_loss) == ("compare", "demo", 2.3)
    assert [system.name for system in compared.systems] == ["megatron", "lrmoe"]
    assert compared.baseline is compared.systems[0]
    series = compared.systems[1].series
    assert len(series.step) == len(series.loss) == len(series.critical_s) == STEPS


def test_time_of_the_series_ends_at_the_summary(compared: Run) -> None:
    for system in compared.systems:
        assert system.series.critical_s[-1] == pytest.approx(system.number("moe_time_critical_s"))
        assert system.series.wall_s[-1] == pytest.approx(system.number("moe_time_wall_s"))


def test_loads_are_of_the_pruned_steps(compared: Run) -> None:
    megatron, lrmoe = (system.loads for system in compared.systems)
    assert len(megatron) == len(lrmoe) == LAYERS
    rows = [tuple(loads[0].backward_R) for loads in (megatron, lrmoe)]
    assert rows == [FORWARD, (1434, 1433)], "exact warm-up steps do not dilute it"
    assert lrmoe[0].mean == 2048


def test_training_run(tmp_path: Path) -> None:
    run = load_run(train_run(tmp_path / "mine"))
    (system,) = run.systems
    assert (run.kind, run.baseline, run.target_loss, system.name) == ("train", None, None, "mine")
    assert system.series.wall_s[-1] == pytest.approx(3.0)
    assert system.series.smoothed[8] is None
    assert system.series.smoothed[9] == pytest.approx(5.0 - 5.5 / 10)
    assert system.phase_ms == {"experts": 20.0}, "the worst layer and phases that never ran are left out"
    assert system.config == {"max_drop": 0.3}


def test_a_diverged_run_loads(tmp_path: Path) -> None:
    folder = compare_run(tmp_path / "run", reached=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["loss"] = lines[-1]["smoothed_loss"] = None
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert load_run(folder).systems[1].series.loss[-1] is None


def test_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run=.*no summary\.json there"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("summary.json", "{", "summary.json: not valid JSON"),
        ("summary.json", "[]", "expected a JSON object, found list"),
        ("metrics.jsonl", '{"step": 1}\nnot json\n', "metrics.jsonl, line 2: not valid JSON"),
        ("metrics.jsonl", '{"system": "lrmoe"}\n', "not as this version writes them .*phase_ms"),
        ("summary.json", '{"systems": {"lrmoe": 3}}', "not as this version writes them"),
        ("config.toml", "= 1", "config.toml: not valid TOML"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = compare_run(tmp_path / "run")
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_run(folder)
