"""Pages of everything that a command leaves, two of a kind side by side, and clear errors for what is no run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lrmoe.errors import ConfigError
from lrmoe.report import html, sections
from lrmoe.report.commands import report
from lrmoe.report.load import load_run
from tests.report.synthetic import (
    STEPS,
    compare_run,
    headline_lines,
    plan_csv,
    plan_lines,
    replay_run,
    train_run,
)


def test_a_plan_shows_memory_loads_and_phases(tmp_path: Path) -> None:
    run = load_run(plan_lines(tmp_path / "plan.jsonl"))
    shown = sections.section(run, "run0")
    assert shown.verdict == "Tiny on 2 x h100: fits, 20 MiB of 64 MiB on the fullest rank."
    assert [plot.name for plot in shown.plots] == ["memory", "heat", "phases"]
    memory, heat, phases = shown.plots
    assert "device 64 MiB" in memory.label
    assert heat.title == "Load per rank and expert", "one call has no steps"
    assert "wire" in [row[0] for row in phases.table.rows]
    assert ("call bytes", "12 MiB", "") in shown.headline.rows


def test_a_sweep_is_a_table_of_its_cases(tmp_path: Path) -> None:
    run = load_run(plan_csv(tmp_path / "plan" / "capacity.csv").parent)
    shown = sections.section(run, "run0")
    assert shown.verdict == "1 of 2 cases fit their device."
    assert [row[:5] for row in shown.headline.rows] == [
        ("gpus 8", "yes", "2", "50 GiB", "72 GiB"),
        ("gpus 16", "no", "0", "90 GiB", "72 GiB"),
    ], "ranks and nodes follow from the GPUs"
    assert "gpus 16: needs 90 GiB" in shown.headline.note
    assert [plot.name for plot in shown.plots] == ["memory", "time"]


def test_headline_figures_keep_dots_in_their_case(tmp_path: Path) -> None:
    run = load_run(headline_lines(tmp_path / "headline"))
    shown = sections.section(run, "run0")
    assert shown.headline.rows[1] == (
        "qwen3-moe-tiny, memorise, aux 0.001",
        "lrmoe-sampled50",
        "0.490 +- 0.012",
    )
    assert "0.49 to 0.51 of SYMI" in shown.verdict
    (plot,) = shown.plots
    assert plot.traces[0]["x"] == [0.51, 0.49]
    assert shown.further[0].rows == [("memorise.lrm.topk", "drop0.3", "0.004000")]


@pytest.mark.parametrize("made", [replay_run, headline_lines])
def test_two_of_a_kind_share_a_table_of_figures(made: Callable[[Path], Path], tmp_path: Path) -> None:
    first, second = (made(tmp_path / name) for name in ("one", "two"))
    page = html.render([load_run(first), load_run(second)])
    body = page.split("</style>")[1].split("<script")[0]
    assert "figures in common" in body
    assert body.count("<h1") == 3, "both together, then each alone"
    assert 'id="run0-' in body
    assert 'id="run1-' in body


def test_two_plans_side_by_side(tmp_path: Path) -> None:
    left, right = plan_lines(tmp_path / "a.jsonl"), plan_lines(tmp_path / "b.jsonl")
    both = sections.sections_of([load_run(left), load_run(right)])
    assert len(both[0].headline.rows) == 3
    assert {row[3] for row in both[0].headline.rows} == {"1.000"}


def test_runs_without_a_figure_in_common_are_refused(tmp_path: Path) -> None:
    plan = load_run(plan_lines(tmp_path / "plan.jsonl"))
    sweep = load_run(plan_csv(tmp_path / "capacity.csv"))
    with pytest.raises(ConfigError, match="no figure in common"):
        sections.sections_of([plan, sweep])


def test_mixed_kinds_are_refused_by_name(tmp_path: Path) -> None:
    trained, replayed = load_run(train_run(tmp_path / "mine")), load_run(replay_run(tmp_path / "call"))
    with pytest.raises(ConfigError, match=r"'mine' is of `train` and 'call' of `replay`"):
        html.render([trained, replayed])


def test_a_stopped_comparison_is_shown_as_far_as_it_came(tmp_path: Path) -> None:
    folder = compare_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as out:
        out.write('{"system": "lrmoe", "step"')
    run = load_run(folder)
    shown = sections.section(run, "run0")
    assert shown.verdict.startswith(
        f"This run did not finish: it has no summary, and {STEPS} steps were written."
    )
    assert shown.headline.rows[0] == ("steps done", "NO", "NO")
    assert "loss-steps" in [plot.name for plot in shown.plots]
    html.render([run])


def test_a_stopped_training_run_is_shown_too(tmp_path: Path) -> None:
    folder = train_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    run = load_run(folder)
    assert run.systems[0].number("steps") == 30
    assert run.unfinished


def test_a_run_that_stopped_before_its_first_step_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[train]\nseed = 0\n")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="stopped before its first step"):
        load_run(tmp_path)


def test_a_run_of_parts_that_goes_on_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[train]\nseed = 0\n")
    (tmp_path / "cells").mkdir()
    with pytest.raises(ConfigError, match="several parts has no summary"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "x,y\n1,2\n", "no column 'model'"),
        ("a.csv", "model,hardware,gpus,fits\nTiny\n", "line 2: has not as many cells"),
        ("a.csv", "model,hardware\n", "no rows"),
        ("a.jsonl", '{"name": "layer.x", "value": 1}\n', "a file must be what `lrmoe plan` wrote"),
        ("a.txt", "words", "a file must be what `lrmoe plan` wrote"),
        ("a.jsonl", '{"name": "plan.x", "value": 1}\n', "figures of a sweep"),
        ("a.jsonl", "{", "line 1: not valid JSON"),
    ],
)
def test_files_that_are_no_plan_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_run(tmp_path / name)


def test_other_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder or file"):
        load_run(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no summary\.json there"):
        load_run(tmp_path)
    (tmp_path / "summary.json").write_text('{"kind": "dance"}')
    with pytest.raises(ConfigError, match="kind='dance' is not one that this version shows"):
        load_run(tmp_path)
    (tmp_path / "summary.json").write_text('{"kind": "matrix", "rows": []}')
    with pytest.raises(ConfigError, match="nothing was finished yet"):
        load_run(tmp_path)
    (tmp_path / "headline.jsonl").write_text('{"value": 1}\n')
    with pytest.raises(ConfigError, match="not the figures that `make headline` writes"):
        load_run(tmp_path)


def test_the_page_of_a_file_lies_beside_it(tmp_path: Path) -> None:
    report(runs=[plan_lines(tmp_path / "plan.jsonl")])
    assert (tmp_path / "plan.html").is_file()


def test_figures_go_to_stdout_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(runs=[compare_run(tmp_path / "run")], as_json=True)
    out, err = capsys.readouterr()
    names = [json.loads(line)["name"] for line in out.splitlines()]
    assert "compare.lrmoe.moe_time_critical_s" in names
    assert "report.html" in err
