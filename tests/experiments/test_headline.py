"""The headline from nothing to figures, small; and again, where nothing is left to do."""

from __future__ import annotations

import csv
import dataclasses
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from lrmoe.experiments.headline import run as headline_module
from lrmoe.experiments.headline.jobs import EXACT, base_config
from lrmoe.experiments.headline.question import FULL, JUDGED, QUICK, Headline
from lrmoe.experiments.headline.run import blocks_of, run
from lrmoe.experiments.stage import lines as stage_lines
from lrmoe.experiments.stage.inputs import StageSize
from lrmoe.experiments.systems.registry import SYSTEMS
from lrmoe.experiments.trajectories.virtual import ExecutionSize
from lrmoe.report import headline as report
from lrmoe.report.load import load_run

SYSTEMS_HERE = ("megatron", "symi", "lrmoe-sampled50")
STASHED_HERE = SYSTEMS_HERE[1:]


def tiny(folder: Path) -> Headline:
    """New weights, 20 steps: the loss falls below that of equal bytes."""
    return dataclasses.replace(
        QUICK,
        folder=folder,
        systems=SYSTEMS_HERE,
        stashed=STASHED_HERE,
        regime="scratch",
        target_loss=5.2,
        steps=20,
        size=StageSize(hidden=16, width=8, ranks=8, pairs_over_width=70),
    )


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.timeout(600)
def test_from_nothing_to_figures_and_nothing_twice(tmp_path: Path) -> None:
    said: list[str] = []
    headline = tiny(tmp_path / "headline")
    summary = run(headline, workers=2, say=said.append)
    assert said in (["stage: 2 steps executed"], ["stage: 3 steps executed"])
    names = [line["name"] for line in summary["figures"]]
    place = "headline.qwen3-moe-micro.scratch.0.lrmoe-sampled50"
    for quantity in ("time_to_loss_over_symi", "layer_time_over_balanced", "dloss", "steps"):
        assert f"{place}.{quantity}" in names
    assert f"{place}.stash.time_to_loss_over_symi" in names
    assert f"{place}.stash.steps" not in names
    assert [row["system"] for row in summary["rows"]] == [*SYSTEMS_HERE, *STASHED_HERE]
    assert {row["activations"] for row in summary["rows"][3:]} == {"stash"}
    assert set(summary["links"]["qwen3-moe-micro"]) == {"recompute", "stash"}
    kept = {row["system"]: row["kept_share"] for row in summary["rows"]}
    assert kept == {"megatron": 1.0, "symi": 1.0, "lrmoe-sampled50": pytest.approx(0.5, abs=0.01)}

    calls = stage_lines.read(headline.folder / "stage.jsonl")
    assert {call.step for call in calls} <= {10, 20}
    fixed, ours = (summary["rows"][place]["steps"] for place in (0, 2))
    assert 10 <= fixed <= 20
    assert 10 <= ours <= 20

    written = (headline.folder / "headline.jsonl").read_text()
    again = run(headline, workers=2, say=said.append)
    assert said[1:] == ["trajectories: all 2 done before", "stage: done before"]
    assert again["rows"] == summary["rows"]
    assert [json.loads(line)["value"] for line in written.splitlines()] == [
        line["value"] for line in summary["figures"]
    ]
    with (headline.folder / "rows.csv").open() as table:
        assert [line["system"] for line in csv.DictReader(table)] == [*SYSTEMS_HERE, *STASHED_HERE]
    shown = load_run(headline.folder)
    assert [system.key for system in shown.systems] == list(SYSTEMS_HERE)
    titles = [
        table.title.partition(":")[0] for table in report.tables(shown)
    ]  # of one case the title names it
    assert titles == ["Time to loss", "With stashed activations", "Every seed"]


def test_every_system_is_in_the_headline_and_the_quick_one_is_part_of_it() -> None:
    places = list(FULL.places())
    assert len(places) == 2 * 2 * 3
    assert set(JUDGED) | set(FULL.others) == set(SYSTEMS)
    everything = [place for place in places if len(place[3]) == len(SYSTEMS)]
    assert [place[:3] for place in everything] == [(model, 0.0, 0) for model in FULL.models]
    (model, aux, seed, systems) = next(QUICK.places())
    assert (model, aux, seed) == places[0][:3]
    assert set(systems) == {"megatron", "symi", "ultraep", "lrmoe-sampled50"}


def test_exact_systems_share_a_trajectory_and_pruning_ones_have_their_own() -> None:
    shared = {FULL.trajectory("m", 0.0, 1, name) for name in ("megatron", "symi", "eplb", EXACT)}
    assert len(shared) == 1
    assert len({FULL.trajectory("m", 0.0, 1, name) for name in ("megatron", "lrmoe", "lrmoe-topk20")}) == 3


def test_a_trajectory_is_planned_with_the_stages_settings() -> None:
    for system, drop in ((EXACT, 0.0), ("lrmoe", 0.3), ("lrmoe-topk20", 0.2)):
        config = base_config("glm4-moe-micro", 0.001, system, 2)
        assert config.lrmoe.max_drop == drop
        assert (config.lrmoe.lean_wire, config.lrmoe.replica_slots, config.lrmoe.warmup_steps) == (
            False,
            2,
            0,
        )
        assert config.train.router_aux_loss == 0.001


def test_a_trajectory_is_planned_for_the_size_that_the_stage_executes(tmp_path: Path) -> None:
    headline = tiny(tmp_path)
    tasks = list(headline_module._trajectories(headline))
    (size,) = {task.size for task in tasks}
    assert {task.system for task in tasks} == {EXACT, "lrmoe-sampled50"}
    assert not any(task.finished for task in tasks)
    job = headline_module._job(headline, tasks[0])
    assert (job.name, job.steps, pickle.loads(pickle.dumps(job.args))) == (
        tasks[0].folder.name,
        20,
        (tasks[0],),
    )
    assert (size.hidden, size.width, size.ranks, size.pairs) == (16, 8, 8, 560)
    assert StageSize().execution == ExecutionSize()


def test_others_run_seldom_and_a_stash_stands_beside_the_first_of_each_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached = SimpleNamespace(recorded=(10,), losses=[0.0] * 300, steps_to=lambda _: 250)
    monkeypatch.setattr(headline_module, "Trajectory", SimpleNamespace(load=lambda _: reached))
    blocks = blocks_of(FULL)
    main, stashed = blocks[:12], blocks[12:]
    assert {block.activations for block in main} == {"recompute"}
    assert [(block.model, block.aux, block.seed, block.activations) for block in stashed] == [
        (model, 0.0, 0, "stash") for model in FULL.models
    ]
    assert list(stashed[0].last_step) == list(JUDGED)
    assert set(JUDGED) <= set(main[0].systems_at(20, 1))
    assert not set(FULL.others) & set(main[0].systems_at(20, 1))
    assert set(FULL.others) < set(main[0].systems_at(40, 3))
    assert stashed[0].systems_at(20, 1) == []
    assert [block.activations for block in blocks_of(QUICK)] == ["recompute"]


def test_a_regime_without_a_target_needs_one() -> None:
    with pytest.raises(ValueError, match="target_loss"):
        _ = Headline(regime="scratch").target
    assert FULL.target == 0.05
