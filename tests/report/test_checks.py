"""What `check_every` found, on the page of a training run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrmoe.report import sections, tables
from lrmoe.report.checks import checks
from lrmoe.report.load import load_run
from lrmoe.report.pair import pair
from tests.report.synthetic import train_run


def test_checks_have_a_plot_and_a_row_each_of_cosine_and_error(tmp_path: Path) -> None:
    run = load_run(train_run(tmp_path / "run", check=10))
    plot = checks(run)
    assert plot is not None
    cosine, error = plot.traces
    assert (cosine["name"], cosine["x"]) == ("cosine", [10, 20, 30])
    assert cosine["y"] == pytest.approx([0.91, 0.92, 0.93])
    assert (error["name"], error["y"]) == ("relative error", [0.4, 0.4, 0.4])
    assert plot.table.rows[1] == ("run", "20", "1", "0.9200", "0.400")
    assert "checks" in [found.name for found in sections.section(run, "run0").plots]
    rows = {row[0]: row[1] for row in tables.headline(run).rows}
    assert rows["cosine to the exact gradient, mean of the checks"] == "0.9200"
    assert rows["relative error of the gradient, mean of the checks"] == "0.400"


def test_a_run_without_checks_says_nothing_of_them(tmp_path: Path) -> None:
    run = load_run(train_run(tmp_path / "run"))
    assert checks(run) is None
    assert not any("exact gradient" in row[0] for row in tables.headline(run).rows)


def test_two_runs_of_which_one_was_checked(tmp_path: Path) -> None:
    runs = [load_run(train_run(tmp_path / name, check=check)) for name, check in (("one", 0), ("two", 10))]
    plot = checks(pair(*runs).both)
    assert plot is not None
    assert {row[0] for row in plot.table.rows} == {"two"}
