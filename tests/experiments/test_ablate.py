from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lrmoe.cli import app
from lrmoe.errors import ConfigError
from lrmoe.experiments.ablate import command as ablate_command
from lrmoe.experiments.ablate.rows import between, cell_values, figures_of, rows_of
from lrmoe.experiments.ablate.rules import PRESETS, Ablation, Cell, Part, Rule, rules_of
from lrmoe.experiments.trajectories.trajectory import Trajectory
from lrmoe.report import ablate as report
from lrmoe.report.data import Run
from lrmoe.training.locks import locked

GRID: dict[str, Any] = {
    "scores": ["lrm"],
    "estimators": ["sampled"],
    "drops": [0.3],
    "quota_rules": ["variance"],
    "router_grads": ["auto"],
    "select_ins": ["backward"],
}


def test_equal_rules_are_written_equally() -> None:
    assert Rule(estimator="topk", quota_rule="variance", router_grad="full") == Rule(
        estimator="topk", quota_rule="count"
    )
    assert Rule(router_grad="retained") == Rule()
    assert Rule(router_grad="full") != Rule()
    both = rules_of(**{**GRID, "estimators": ["topk"], "quota_rules": ["variance", "count"]})
    assert len(both) == 1


def test_names_tell_rules_apart() -> None:
    rules = rules_of(
        scores=["lrm", "alpha"],
        estimators=["sampled", "topk"],
        drops=[0.2, 0.5],
        quota_rules=["variance", "count"],
        router_grads=["full", "retained"],
        select_ins=["backward", "forward"],
    )
    assert len({rule.name for rule in rules}) == len(rules) == len({(r.label, r.drop) for r in rules})
    assert Rule().name == "lrm.sampled.drop0.3"
    assert (
        Rule(score="alpha", select_in="forward", quota_rule="count").name
        == "alpha.sampled-forward-count.drop0.3"
    )


def test_forward_leaves_out_scores_that_need_a_gradient() -> None:
    forward = {**GRID, "scores": ["lrm", "alpha"], "select_ins": ["forward"]}
    assert [rule.score for rule in rules_of(**forward)] == ["alpha"]
    with pytest.raises(ConfigError, match="only alpha, alpha_phi, random"):
        rules_of(**{**forward, "scores": ["lrm"]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scores": ["phi"]}, "score='phi'"),
        ({"drops": [1.0]}, "max_drop=1.0"),
        ({"drops": [0.0]}, "drop=0.0"),
        ({"quota_rules": ["size"]}, "quota_rule='size'"),
    ],
)
def test_values_that_no_rule_can_have_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rules_of(**{**GRID, **change})


def test_every_cell_comes_once_and_nothing_dropped_first() -> None:
    part = Part(regime="memorise", seeds=(0, 1), rules=(Rule(), Rule(drop=0.5)))
    cells = list(Ablation(parts=(part, part)).cells())
    assert len(cells) == 6
    assert cells[0].rule is None
    assert [cell.seed for cell in cells] == [0, 0, 0, 1, 1, 1]


def test_presets_hold_the_published_table_and_all_regimes() -> None:
    (published,) = PRESETS["published"]
    scores = {rule.score for rule in published.rules if rule.estimator == "topk" and rule.drop == 0.3}
    assert scores == {"lrm", "grad_norm", "abs_grad", "alpha_grad", "alpha", "random"}
    assert [part.regime for part in PRESETS["full"]] == ["memorise", "continued", "scratch"]
    assert all(len(part.seeds) >= 5 for part in PRESETS["full"])


def trajectory(final: float, reached: int = 20) -> Trajectory:
    """40 steps that end at a loss; below .05 from step `reached` on."""
    lines = [
        {
            "loss": final,
            "smoothed_loss": 0.04 if step >= reached else 0.06,
            "kept_share": 0.7,
            "dropped_energy": 0.01,
            "added_variance": 0.1,
        }
        for step in range(1, 41)
    ]
    return Trajectory(Path("nowhere"), lines, {0: np.zeros((40, 8, 4), dtype=np.int64)})


def cells(losses: dict[Rule | None, list[float]]) -> list[dict[str, Any]]:
    return [
        cell_values(
            Cell(regime="memorise", seed=seed, rule=rule), trajectory(loss, 20 + 2 * (rule is not None))
        )
        for rule, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]


GOOD, BAD = Rule(estimator="topk"), Rule(estimator="topk", score="random")


def test_rows_pair_with_nothing_dropped_by_seed() -> None:
    (row,) = rows_of(cells({None: [0.1, 0.5], GOOD: [0.11, 0.53]}))
    assert row["dloss"] == pytest.approx(0.02)
    assert row["dloss_se"] == pytest.approx(0.01)
    assert row["dppl"] == pytest.approx((math.exp(0.01) + math.exp(0.03)) / 2 - 1)
    assert row["steps_ratio"] == pytest.approx(1.1)
    assert row["seeds"] == [0, 1]
    assert row["loss"] == pytest.approx(0.32)


def test_a_run_without_a_finite_loss_makes_its_row_say_so() -> None:
    (row,) = rows_of(cells({None: [0.1, 0.5], GOOD: [0.11, math.nan]}))
    assert row["dloss"] is row["dloss_se"] is row["dppl"] is row["loss"] is None


def test_gaps_between_rules_are_paired_and_said_to_be_resolved_or_not() -> None:
    (gap,) = between(cells({None: [0.1] * 3, BAD: [0.2, 0.41, 0.6], GOOD: [0.1, 0.3, 0.5]}))
    assert (gap["better"], gap["worse"]) == (GOOD.name, BAD.name)
    assert gap["gap"] == pytest.approx(0.31 / 3)
    assert gap["resolved"]
    (gap,) = between(cells({BAD: [0.2, 0.3], GOOD: [0.3, 0.19]}))
    assert not gap["resolved"]


def summary(losses: dict[Rule | None, list[float]]) -> dict[str, Any]:
    values = cells(losses)
    return {
        "kind": "ablate",
        "model": "m",
        "aux": 0.0,
        "regimes": {"memorise": {"about": "by heart", "target_loss": 0.05}},
        "rows": rows_of(values),
        "between": between(values),
        "cells": values,
    }


def test_figures_have_stable_names_and_their_errors() -> None:
    found = {
        name: (value, own)
        for name, value, _, own in figures_of(summary({None: [0.1, 0.5], GOOD: [0.11, 0.53]}))
    }
    value, context = found["ablate.memorise.lrm.topk.drop0.3.dloss"]
    assert value == pytest.approx(0.02)
    assert context["standard_error"] == pytest.approx(0.01)
    assert context["seeds"] == [0, 1]
    assert "ablate.memorise.lrm.topk.drop0.3.dppl" in found


def test_the_table_has_rules_in_rows_and_regime_with_drop_in_columns() -> None:
    losses = {
        None: [0.1, 0.5],
        GOOD: [0.11, 0.54],
        Rule(estimator="topk", drop=0.5): [0.2, 0.6],
        BAD: [0.3, 0.7],
    }
    run = Run(name="r", kind="ablate", summary=summary(losses), config={}, systems=())
    first = report.tables(run)[0]
    assert list(first.columns) == ["rule", "memorise 30%", "memorise 50%"]
    assert [row[0] for row in first.rows] == ["topk lrm", "topk random"]
    assert first.rows[0][1] == "+0.0250 +- 0.0150"
    assert first.rows[1][2] == ""
    assert "no loss above two standard errors with topk lrm at 30%" in report.verdict(run)
    assert report.tables(run)[2].title == "memorise: by heart"
    plot = report.plots(run)[0]
    assert [trace["name"] for trace in plot.traces] == ["30% dropped", "50% dropped"]


def test_small_losses_keep_two_digits_of_their_error() -> None:
    losses = {None: [0.1, 0.5], GOOD: [0.10003, 0.50001]}
    run = Run(name="r", kind="ablate", summary={**summary(losses), "steps": 25}, config={}, systems=())
    tables = report.tables(run)
    assert tables[0].rows[0][1] == "+0.000020 +- 0.000010"
    assert tables[1].rows[0][1] == "+0.0020% +- 0.0010%"
    assert tables[2].title == "memorise: by heart; here 25 steps of training"
    assert report.plots(run)[0].table.rows[0][1:] == ("+0.000020", "0.000010")


def test_one_seed_tells_no_rule_from_nothing_dropped() -> None:
    run = Run(name="r", kind="ablate", summary=summary({None: [0.1], GOOD: [0.11]}), config={}, systems=())
    assert report.verdict(run) == (
        "memorise: one seed, so no standard errors; most with topk lrm at 30% (+0.01)."
    )


def run_cli(folder: Path, *more: str) -> Any:
    """A short ablation from new weights, on small text."""
    options = [
        "--regime",
        "scratch",
        "--seeds",
        "1",
        "--steps",
        "12",
        "--model",
        str(folder),
        "--workers",
        "1",
    ]
    return CliRunner().invoke(app, ["ablate", *options, *more])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the configuration of a tiny model."""
    from lrmoe.training.config import ModelConfig
    from lrmoe.training.model import read_config
    from tests.training.tiny import SHAPE

    monkeypatch.chdir(tmp_path)
    shape = {**SHAPE, "num_experts": 8}
    read_config(ModelConfig(preset="qwen3-moe-micro", overrides=shape)).save_pretrained(tmp_path / "tiny")
    return tmp_path


def test_the_command_runs_goes_on_and_refuses_another_model(place: Path) -> None:
    first = run_cli(place / "tiny", "--json")
    assert first.exit_code == 0, first.output
    names = {json.loads(line)["name"] for line in first.stdout.splitlines()}
    assert names == {f"ablate.scratch.lrm.sampled.drop0.3.{quantity}" for quantity in ("dloss", "dppl")}
    folder = place / "runs" / "ablate"
    for name in ("summary.json", "rows.csv", "report.html", "config.toml"):
        assert (folder / name).stat().st_size > 0
    (row,) = csv.DictReader((folder / "rows.csv").read_text().splitlines())
    assert (row["regime"], row["score"], row["seeds"]) == ("scratch", "lrm", "1")
    before = {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("DONE")}
    assert len(before) == 2
    more = run_cli(place / "tiny", "--estimators", "sampled,topk")
    assert more.exit_code == 0, more.output
    after = {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("DONE")}
    assert len(after) == 3
    assert {path: after[path] for path in before} == before
    other = run_cli(place / "tiny", "--aux", "0.01")
    assert isinstance(other.exception, ConfigError)
    assert "aux was 0.0, now 0.01; pass --overwrite" in str(other.exception)
    with locked(folder / ".lock"):
        beside = run_cli(place / "tiny")
    assert isinstance(beside.exception, ConfigError)
    assert "another `lrmoe ablate` is at work" in str(beside.exception)


def test_bad_options_are_refused_before_anything_runs(place: Path) -> None:
    for options, said in (
        (["--regime", "memorize"], "did you mean 'memorise'"),
        (["--preset", "pub"], "valid: published, full"),
        (["--preset", "full", "--drops", "0.3"], "--preset full with --drops"),
        (["--seeds", "0"], "--seeds '0'"),
    ):
        found = CliRunner().invoke(app, ["ablate", *options])
        assert isinstance(found.exception, ConfigError)
        assert said in str(found.exception)
    assert not (place / "runs").exists()


@pytest.mark.parametrize(("text", "seeds"), [("3", (0, 1, 2)), ("3,5", (3, 5)), (None, None)])
def test_seeds_are_a_number_or_a_list(text: str | None, seeds: tuple[int, ...] | None) -> None:
    assert ablate_command._seeds(text) == seeds
