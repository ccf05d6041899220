"""Whole runs in their folders: what they leave behind, and how one goes on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lrmoe.report.load import load_run
from lrmoe.training.config import TrainConfig
from lrmoe.training.process import Process
from lrmoe.training.run import figures, train
from tests.training.tiny import CPU, tiny_config

ALONE = Process(group=None, device=CPU, rank=0, world_size=1)


def run(config: TrainConfig, **options: Any) -> dict[str, Any]:
    return train(config, ALONE, show_progress=options.pop("show_progress", False), **options)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_sums_over_all_its_steps(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"steps": 3, "checkpoint_every": 3, "eval_every": 2})
    first = run(config)
    resumed = run(config.replace(train={"steps": 5}), resume=True)
    found = lines(config.folder)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
    assert resumed["tokens"] == sum(line["tokens"] for line in found) == 5 * 2 * 16
    assert resumed["train_time_s"] == pytest.approx(sum(line["step_ms"] for line in found) / 1e3)
    assert resumed["train_time_s"] > first["train_time_s"]
    assert resumed["kept_share"] == pytest.approx(sum(line["lrmoe/kept_share"] for line in found) / 5)
    assert [entry["step"] for entry in resumed["eval_losses"]] == [2, 3, 4, 5]
    drawn = load_run(config.folder).systems[0]
    assert drawn.series.wall_s[-1] == pytest.approx(drawn.number("moe_time_wall_s"))


def test_resuming_a_finished_run_keeps_its_figures(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"steps": 2, "checkpoint_every": 2})
    assert run(config, resume=False) == run(config, resume=True)


def test_evaluation_losses_are_logged_and_summed_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config(tmp_path, train={"steps": 3, "eval_every": 2})
    with caplog.at_level(logging.INFO):
        summary = run(config, show_progress=True)
    losses = {line["step"]: line["eval_loss"] for line in lines(config.folder) if "eval_loss" in line}
    assert list(losses) == [2, 3]
    assert summary["eval_losses"] == [{"step": step, "loss": loss} for step, loss in losses.items()]
    assert summary["eval_loss"] == losses[3]
    said = [message for message in caplog.messages if "eval loss" in message]
    assert said == [f"step {step}/3  eval loss {loss:.4f}" for step, loss in losses.items()]
    assert json.loads((config.folder / "summary.json").read_text()) == summary
    assert "train.run.eval_loss" in {line["name"] for line in figures(summary)}
