"""The page of a comparison of several cells, from rows of plain numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lrmoe.experiments.compare.matrix_rows import ratios
from lrmoe.report import html, matrix, matrix_plots, sections
from lrmoe.report.data import Run
from lrmoe.report.figures import of_runs
from lrmoe.report.load import load_run
from lrmoe.report.matrix_cases import cases
from lrmoe.report.matrix_figures import figures

SYSTEMS = ["megatron", "symi", "mine.py:Mine"]
TIMES = {"megatron": (10.0, 12.0), "symi": (8.0, 9.0), "mine.py:Mine": (5.0, 3.0)}


def row(model: str, seed: int, system: str, target: float | None, *, reached: bool = True) -> dict[str, Any]:
    """A row whose time is that of TIMES, doubled for the lower target."""
    time = TIMES[system][seed] * (1.0 if target in (None, 0.1) else 2.0)
    values = {
        "steps": 100 + seed + 10 * SYSTEMS.index(system),
        "critical_s": time,
        "wall_s": 3 * time,
        "wire_bytes": 2048,
        "buffer_peak_bytes": 4096,
        "kept_share": 0.7,
        "dropped_energy": 0.0012,
        "added_variance": 0.25,
    }
    return {
        "model": model,
        "regime": "memorise",
        "aux": 0.0,
        "seed": seed,
        "target": target,
        "system": system,
        **(values if reached else dict.fromkeys(values)),
        "reached": reached,
        "budget": None,
        "final_loss": 0.04,
        "cell": f"{model}-memorise-aux0-seed{seed}",
    }


def summary(rows: list[dict[str, Any]], *, against: str | None = "symi", **changes: Any) -> dict[str, Any]:
    given = {"slots_beyond_E/R": "2", "bytes_of_slots": 2048}
    values = {
        "kind": "matrix",
        "systems": SYSTEMS,
        "against": against,
        "targets": sorted({r["target"] for r in rows if r["target"] is not None}, reverse=True),
        "max_steps": 300,
        "preset": "demo",
        "smoothing": {"steps": 10},
        "world_size": 8,
        "cells_finished": 4,
        "cells_asked": 4,
        "rows": rows,
        "paired": ratios(rows, against),
        "fairness": {model: dict.fromkeys(SYSTEMS, given) for model in ("qwen", "glm")},
        "context": {"command": "lrmoe compare"},
    }
    return {**values, **changes}


def loaded(folder: Path, found: dict[str, Any]) -> Run:
    (folder / "summary.json").write_text(json.dumps(found))
    return load_run(folder)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    rows = [
        row(model, seed, system, target)
        for model in ("qwen", "glm")
        for seed in (0, 1)
        for system in SYSTEMS
        for target in (0.1, 0.05)
    ]
    return loaded(tmp_path, summary(rows))


def test_ratios_are_taken_per_seed_before_they_are_averaged(run: Run) -> None:
    table = matrix.headline(run)
    assert [case.name for case in cases(run)] == [
        "qwen, loss 0.1",
        "qwen, loss 0.05",
        "glm, loss 0.1",
        "glm, loss 0.05",
    ]
    assert table.columns == ("", "megatron", "symi", "Mine"), "more cases than systems: cases are rows"
    mean, half = (5 / 8 + 3 / 9) / 2, abs(5 / 8 - 3 / 9) / 2
    assert table.rows[0] == (
        "qwen, loss 0.1",
        "1.292 +- 0.042 (11.00 s)",
        "8.500 s +- 5.9%",
        f"{mean:.2f} +- {half:.2f} (4.000 s)",
    )
    assert "against symi" in table.title
    assert "The same for all: memorise, aux 0." in table.note


def test_few_cases_stand_beside_each_other(tmp_path: Path) -> None:
    rows = [row("qwen", seed, system, 0.1) for seed in (0, 1) for system in SYSTEMS]
    table = matrix.headline(loaded(tmp_path, summary(rows)))
    assert table.columns == ("", "loss 0.1")
    assert [found[0] for found in table.rows] == ["megatron", "symi", "Mine"]


def test_a_case_has_every_quantity_and_a_table_holds_every_seed(run: Run) -> None:
    titles = [table.title for table in matrix.tables(run)]
    assert titles[1:5] == [
        "qwen, memorise, aux 0, loss 0.1",
        "qwen, memorise, aux 0, loss 0.05",
        "glm, memorise, aux 0, loss 0.1",
        "glm, memorise, aux 0, loss 0.05",
    ]
    first = matrix.tables(run)[1]
    assert first.columns[:4] == ["", "arrived", "time, critical path", "/ symi's"]
    assert dict(zip(first.columns, first.rows[2], strict=True))["energy dropped"] == "0.12%"
    every = matrix.per_seed(run)
    assert len(every.rows) == len(run.summary["rows"])
    assert every.rows[0][:4] == ("megatron", "qwen, loss 0.1", "0", "yes")
    assert titles[-2:] == [f"Fairness: what each system was given, {model}" for model in ("qwen", "glm")]


def test_a_terminal_has_times_and_steps_alone(run: Run) -> None:
    brief = matrix.tables(run, brief=True)
    assert [table.title for table in brief] == [table.title for table in matrix.tables(run)]
    assert brief[-3].columns == (
        "system",
        "case",
        "seed",
        "arrived",
        "time, critical path",
        "time, wall",
        "steps",
    )
    assert "wire" not in brief[1].columns
    assert all(len(found) == len(brief[1].columns) for found in brief[1].rows)


def test_what_did_not_arrive_is_said_everywhere(tmp_path: Path) -> None:
    rows = [
        row("qwen", seed, system, 0.1, reached=system == "symi" or (system != "megatron" and seed == 0))
        for seed in (0, 1)
        for system in SYSTEMS
    ]
    run = loaded(tmp_path, summary(rows, cells_finished=2, cells_asked=3))
    cell = {found[0]: found[1] for found in matrix.headline(run).rows}
    assert cell["megatron"] == "not reached"
    assert cell["Mine"] == "0.625 (5.000 s), 1 of 2 seeds", "one pair has no standard error"
    assert "2 of 3 cells are finished." in matrix.verdict(run)
    assert "3 of 6 runs did not arrive." in matrix.verdict(run)
    assert "megatron" not in {trace["name"] for plot in matrix_plots.plots(run) for trace in plot.traces}


def test_without_a_system_to_compare_with_and_without_a_target_times_stand_alone(tmp_path: Path) -> None:
    rows = [row("qwen", seed, system, None) for seed in (0, 1) for system in SYSTEMS]
    run = loaded(tmp_path, summary(rows, against=None))
    table = matrix.headline(run)
    assert table.title == "MoE-layer time on the critical path of 300 steps"
    assert table.rows[2] == ("Mine", "4.000 s +- 25%")
    assert "Mine was fastest, 4.0 +- 1.0 s" in matrix.verdict(run)
    bars, scatter = matrix_plots.plots(run)
    assert [trace["x"] for trace in bars.traces] == [[11.0], [8.5], [4.0]]
    assert scatter.traces[2]["x"] == [120, 121]


def test_plots_hold_the_ratios_with_their_errors_and_every_seed(run: Run) -> None:
    bars, scatter = matrix_plots.plots(run)
    assert [trace["name"] for trace in bars.traces] == ["megatron", "Mine"], "the others' ratio is 1: a line"
    assert bars.traces[1]["x"][0] == pytest.approx((5 / 8 + 3 / 9) / 2)
    assert bars.traces[1]["error_x"]["array"][0] == pytest.approx(abs(5 / 8 - 3 / 9) / 2)
    [mine] = [trace for trace in scatter.traces if trace["name"] == "Mine"]
    assert mine["x"][0] == pytest.approx(120 / 110)
    assert mine["y"][0] == pytest.approx(5 / 8)
    assert len(mine["x"]) == 8
    assert mine["text"][0] == "qwen, loss 0.1, seed 0"


def test_the_page_shows_them(run: Run) -> None:
    page = html.render([run])
    for text in ("Time to loss", "Steps against time", "Every seed", "0.48 +- 0.15", "Fairness"):
        assert text in page
    assert "lrmoe compare" in page
    assert "lrmoe matrix" not in page, "no command is called so"


def test_its_figures_have_the_names_and_values_of_the_command(run: Run) -> None:
    ours = {found["name"]: found["value"] for found in of_runs([run])}
    assert ours == {found["name"]: found["value"] for found in figures(run.summary)}
    name = "compare.qwen.memorise.aux0.target0.05.megatron.time_to_loss_over_symi"
    assert ours[name] == pytest.approx((10 / 8 + 12 / 9) / 2)


def test_many_parts_are_folded_and_what_the_systems_were_given_is_not(run: Run) -> None:
    shown = sections.section(run, "run0")
    assert [table.title for table in shown.further] == [
        f"Fairness: what each system was given, {model}" for model in ("qwen", "glm")
    ]
    assert shown.folded == matrix.parts(run)
    page = html.render([run])
    assert page.count('<details class="folded">') == len(cases(run)) + 1
    assert "<details open" not in page


def test_few_parts_are_shown(tmp_path: Path) -> None:
    rows = [row("qwen", seed, system, 0.1) for seed in (0, 1) for system in SYSTEMS]
    shown = sections.section(loaded(tmp_path, summary(rows)), "run0")
    assert not shown.folded
    assert [table.title for table in shown.further][:2] == ["qwen, memorise, aux 0, loss 0.1", "Every seed"]


def test_two_grids_stand_side_by_side_and_the_rest_is_closed(run: Run) -> None:
    other = replace(run, name="other")
    both, *alone = sections.sections_of([run, other])
    assert both.beside is not None
    assert [both.headline.rows, both.beside.rows] == [matrix.headline(run).rows] * 2
    assert both.beside.title.startswith("other: MoE-layer time")
    assert [table.title for table in both.folded] == ["Figures of both"]
    assert [one.closed for one in alone] == [True, True]
    page = html.render([run, other])
    body = page.split("</style>")[1].split("<script")[0]
    assert body.count('<details class="run">') == 2
    assert body.index('class="beside"') < body.index('<details class="run">')
