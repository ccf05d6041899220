"""The page of a simulation: every table and plot, words that fit the figures, broken summaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lrmoe.errors import ConfigError
from lrmoe.report import html, simulation, simulation_plots
from lrmoe.report.data import Run
from lrmoe.report.load import load_run
from lrmoe.simulate.run import Settings, run


def write(folder: Path, summary: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({**summary, "context": {"command": "test"}}))
    return folder


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return run(
        Settings(systems=("megatron", "symi", "lrmoe"), ranks=(4, 8), experts=(16,), tokens=128, top_k=2)
    )


@pytest.fixture
def loaded(summary: dict[str, Any], tmp_path: Path) -> Run:
    return load_run(write(tmp_path / "sim", summary))


def test_the_page_has_all_tables_and_plots(loaded: Run) -> None:
    page = html.render([loaded])
    for ranks in (4, 8):
        assert page.count(f"Balance: {ranks} ranks, 16 experts</caption>") == 1
        assert page.count(f"Cost: {ranks} ranks, 16 experts</caption>") == 1
    assert [plot.name for plot in simulation_plots.plots(loaded)] == ["peak", "ranks", "pressure", "time"]
    assert "Simulated, nothing was run" in page
    fairness = simulation.fairness(loaded)
    assert [row[0] for row in fairness.rows] == ["megatron", "symi", "lrmoe"]


def test_words_and_figures_agree(loaded: Run, summary: dict[str, Any]) -> None:
    systems = summary["scenarios"][0]["systems"]
    text = simulation.verdict(loaded)
    assert f"{systems['lrmoe']['backward_peak']:.4g} backward" in text
    assert f"{systems['megatron']['forward_peak']:.4g} in both" in text
    balance = simulation.balance(summary["scenarios"][0])
    row = dict(zip(balance.columns, balance.rows[0], strict=True))
    assert (row["system"], row["kept"], row["at 20x"]) == ("megatron", "100.0%", "40.0%")


def test_calls_that_do_not_fit_are_said(summary: dict[str, Any], tmp_path: Path) -> None:
    scenario = json.loads(json.dumps(summary["scenarios"][0]))
    scenario["systems"]["symi"] = {"calls": 0, "infeasible_calls": 4, "infeasible": "too much"}
    changed = {**summary, "scenarios": [scenario]}
    loaded = load_run(write(tmp_path / "sim", changed))
    assert "symi does not fit the budget in 4 of 4 calls" in simulation.balance(scenario).note
    assert [plot.name for plot in simulation_plots.plots(loaded)] == ["peak", "pressure", "time"]
    peaks = simulation_plots.peaks(scenario)
    assert peaks is not None
    assert "symi" not in peaks.label
    html.render([loaded])


def test_chunks_are_shown_where_there_are_any(summary: dict[str, Any], tmp_path: Path) -> None:
    plain = load_run(write(tmp_path / "plain", summary))
    assert not any("chunks" in heading for table in simulation.tables(plain) for heading in table.columns)
    assert "chunks" not in simulation.fairness_short(plain).columns
    scenario = json.loads(json.dumps(summary["scenarios"][0]))
    scenario["systems"]["lrmoe"]["backward_chunks"] = 2.5
    loaded = load_run(write(tmp_path / "sim", {**summary, "scenarios": [scenario]}))
    assert simulation.chunks(scenario).rows[2] == ("lrmoe", "1", "2.5")
    assert "chunks" in simulation.fairness_short(loaded).columns
    assert "bwd chunks" in html.render([loaded])


def test_words_name_the_calls(summary: dict[str, Any], tmp_path: Path) -> None:
    loaded = load_run(write(tmp_path / "sim", summary))
    assert "4 calls measured after 12 that only make history" in simulation.method(loaded)
    settings = {**summary["settings"], "trace": "runs/demo", "steps": None, "skip": 0}
    del settings["generator"]
    loaded = load_run(write(tmp_path / "trace", {**summary, "settings": settings}))
    assert "counts of the trace runs/demo; all calls measured after 0" in simulation.method(loaded)
    still = {**summary["scenarios"][0], "at_home": {"smartmoe": "every 10 calls"}}
    assert "smartmoe (acts: every 10 calls) left every expert at home" in simulation.balance(still).note


def test_a_comparison_with_the_published_figures_is_shown(summary: dict[str, Any], tmp_path: Path) -> None:
    line = {"quantity": "peak", "published": 2.0, "simulated": 1.0, "ratio": 0.5, "what": "said so"}
    loaded = load_run(write(tmp_path / "sim", {**summary, "comparison": [line]}))
    assert simulation.tables(loaded)[-1].rows == [("peak", "2.000", "1.000", "0.500")]


@pytest.mark.parametrize(
    "broken", [{"scenarios": []}, {"scenarios": [{}]}, {"fairness": {}}, {"scenarios": 3}]
)
def test_a_broken_summary_is_named(summary: dict[str, Any], broken: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not as this version writes them"):
        load_run(write(tmp_path / "sim", {**summary, **broken}))
