"""Whole runs in their folders: what they leave behind, and how one goes on."""

from __future__ import annotations

import json
import logging
import re
import sys
import types
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lrmoe.errors import CheckpointError, ConfigError, MissingExtraError
from lrmoe.report.load import load_run
from lrmoe.training.config import TrainConfig
from lrmoe.training.figures import figures
from lrmoe.training.folder import hold
from lrmoe.training.loop import Trainer
from lrmoe.training.observed import observed_table
from lrmoe.training.process import Process
from lrmoe.training.resume import resumed_config
from lrmoe.training.run import train
from tests.distributed.pool import Pool
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


def test_fewer_steps_than_a_run_has_done_are_refused_and_change_nothing(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"steps": 2, "checkpoint_every": 1})
    run(config, resume=False)
    before = (config.folder / "config.toml").read_bytes()
    with pytest.raises(
        ConfigError, match=r"train.steps=1: the run's checkpoint has done 2; must be at least"
    ):
        run(config.replace(train={"steps": 1}), resume=True)
    assert (config.folder / "config.toml").read_bytes() == before


def test_skipped_steps_are_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Trainer._losses

    def losses(trainer: Trainer, *args: Any) -> Any:
        loss, balance = plain(trainer, *args)
        return loss * float("nan"), balance

    monkeypatch.setattr(Trainer, "_losses", losses)
    run(tiny_config(tmp_path, train={"steps": 2}))
    assert "2 of 2 steps were skipped: a gradient was not finite" in caplog.text


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_another_process_trains_is_left_alone(tmp_path: Path, resume: bool) -> None:
    config = tiny_config(tmp_path, train={"steps": 2, "checkpoint_every": 2, "timeout_s": 1.0})
    if resume:
        run(config)
        config = config.replace(train={"steps": 3})
    at_work = ExitStack()
    hold(config, at_work)
    before = {path.name: path.read_bytes() for path in config.folder.iterdir() if path.is_file()}
    with at_work, pytest.raises(ConfigError, match="another `lrmoe train` is at work in"):
        run(config, resume=resume)
    assert {path.name: path.read_bytes() for path in config.folder.iterdir() if path.is_file()} == before
    run(config, resume=resume)


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


def test_a_run_is_shown_live_under_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged: dict[int, dict[str, Any]] = {}
    run_there = types.SimpleNamespace(
        id="there", log=lambda values, step: logged.update({step: values}), finish=lambda: None
    )
    fake = types.ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None)  # accelerate looks for one
    fake.init = lambda **options: run_there  # type: ignore[attr-defined]  # a module made here
    fake.Histogram = lambda values: tuple(values)  # type: ignore[attr-defined]  # the same
    monkeypatch.setitem(sys.modules, "wandb", fake)
    lrmoe = {"max_drop": 0.3, "warmup_steps": 0, "check_every": 2}
    config = tiny_config(tmp_path, train={"steps": 4, "log_every": 2, "wandb": "proj"}, lrmoe=lrmoe)
    run(config)
    events = EventAccumulator(str(config.folder / "tensorboard"), {"histograms": 0, "scalars": 0}).Reload()
    scalars, histograms = events.Tags()["scalars"], events.Tags()["histograms"]
    assert [e.step for e in events.Histograms("lrmoe/layer1/counts_E")] == [1, 2, 4]
    assert [e.step for e in events.Scalars("lrmoe/check_layer")] == [2, 4]
    assert [e.value for e in events.Scalars("lrmoe/check_layer")] == [0, 1]
    assert logged[2].keys() == {*scalars, *histograms}
    assert sum(logged[2]["lrmoe/layer1/counts_E"]) == 2 * 16 * 2
    assert sum(logged[2]["lrmoe/layer1/quota_E"]) == round(0.7 * 2 * 16 * 2)
    assert logged[3].keys() == set(scalars) - {name for name in scalars if "check" in name}
    for line in lines(config.folder):
        numbers = {name for name, value in line.items() if isinstance(value, int | float) and name != "step"}
        assert numbers == {name for name in logged[line["step"]] if name in scalars}
        assert [load["layer"] for load in line["loads"]] == [0, 1]


def test_without_wandb_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny_config(tmp_path, train={"wandb": "proj"})
    with pytest.raises(MissingExtraError, match=r"\[wandb\]"):
        run(config)
    assert not config.folder.exists()


def saved(tmp_path: Path) -> TrainConfig:
    """A run with a checkpoint, in the folder `run`."""
    config = tiny_config(tmp_path, train={"steps": 1, "checkpoint_every": 1}, optim={"lr": 0.01})
    run(config)
    return config


def where(tmp_path: Path) -> list[str]:
    return [f"train.runs={json.dumps(str(tmp_path))}", "train.name=run"]


def test_a_resumed_run_starts_from_its_own_configuration(tmp_path: Path) -> None:
    config = saved(tmp_path)
    assert resumed_config(None, where(tmp_path)) == config
    file = tmp_path / "more.toml"
    file.write_text("[optim]\nlr = 0.02\nclip_norm = 0.5\n[lrmoe]\nseed = 7\n")
    found = resumed_config(file, [*where(tmp_path), "optim.lr=0.03", "train.steps=9"])
    assert found == config.replace(
        optim={"lr": 0.03, "clip_norm": 0.5}, lrmoe={"seed": 7}, train={"steps": 9}
    )


def test_a_moved_run_is_found_where_it_is(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    found = resumed_config(None, [f"train.runs={json.dumps(str(tmp_path))}", "train.name=moved"])
    assert found.folder == tmp_path / "moved"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.overrides.hidden_size=64", r"model\.overrides\.hidden_size=64: .* has 32"),
        ("model.overrides.rms_norm_eps=0.1", r"model\.overrides\.rms_norm_eps=0\.1: .* has unset"),
        ("model.preset=glm4-moe-tiny", r"model\.preset='glm4-moe-tiny': .* has 'qwen3-moe-tiny'"),
        ("model.checkpoint=elsewhere", r"model\.preset=unset: .* has 'qwen3-moe-tiny'"),
        ("model=3", "must look like"),
    ],
)
def test_another_model_is_refused_before_anything_is_read(tmp_path: Path, override: str, said: str) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match=said):
        resumed_config(None, [*where(tmp_path), override])


def test_other_text_is_refused_and_the_configuration_kept(tmp_path: Path) -> None:
    config = saved(tmp_path)
    before = (config.folder / "config.toml").read_text()
    other = tmp_path / "other.txt"
    other.write_text("other text " * 300)
    path = config.data.path
    with pytest.raises(ConfigError, match=re.escape(f"data.path={str(other)!r}: ") + f".* has {path!r}"):
        run(config.replace(data={"path": str(other)}, train={"steps": 5}), resume=True)
    with pytest.raises(ConfigError, match=r"data\.held_out=0\.5: .* has 0\.05"):
        run(config.replace(data={"held_out": 0.5}), resume=True)
    assert (config.folder / "config.toml").read_text() == before
    other.write_bytes(Path(str(path)).read_bytes())
    assert run(config.replace(data={"path": str(other)}), resume=True)["steps"] == 1, "the same text, moved"


def test_a_comparison_cannot_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("[compare]\nep = 2\n")
    with pytest.raises(ConfigError, match="holds a comparison"):
        resumed_config(None, where(tmp_path))


def test_a_run_without_checkpoints_cannot_be_resumed(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"steps": 1})
    run(config)
    before = {path.name: path.read_bytes() for path in config.folder.iterdir() if path.is_file()}
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        run(config.replace(train={"steps": 2}), resume=True)
    assert {path.name: path.read_bytes() for path in config.folder.iterdir() if path.is_file()} == before


def test_a_folder_that_cannot_be_made_is_named_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = tiny_config(tmp_path, train={"runs": str(tmp_path / "file" / "runs")})
    with pytest.raises(ConfigError, match=rf"cannot write to .*: {tmp_path / 'file'} is not a directory"):
        run(config.replace(data={"path": "no-such"}))


def test_what_a_failed_start_left_is_no_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"steps": 1})
    config.folder.mkdir()
    (config.folder / "metrics.jsonl").touch()
    assert run(config)["steps"] == 1


def test_an_observing_run_says_what_would_have_been_saved(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        train={"steps": 2, "checkpoint_every": 2},
        lrmoe={"observe": True, "max_drop": 0.2, "warmup_steps": 0},
    )
    found = run(config)["observed"]
    assert list(found) == ["0.1", "0.2", "0.3", "0.5"]
    calls, pairs = 2 * 2, 2 * 16 * 2
    assert found["0.5"]["rows_saved"] == calls * pairs // 2
    assert found["0.5"]["backward_peak"] == pytest.approx(0.5)
    assert found["0.5"]["bytes_saved"] == 0, "one rank sends nothing"
    variances = [entry["added_variance"] for entry in found.values()]
    assert variances == sorted(variances)
    assert 0 < variances[0] < variances[-1] < 1
    assert (
        run(config.replace(train={"steps": 3}), resume=True)["observed"]["0.5"]["rows_saved"]
        == 6 * pairs // 2
    )


def observing(config: TrainConfig) -> dict[str, Any]:
    rank = dist.get_rank()
    process = Process(group=dist.group.WORLD, device=CPU, rank=rank, world_size=2)
    return train(config, process, show_progress=False)


@pytest.mark.distributed
def test_observations_of_all_ranks_are_summed(pool2: Pool, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"steps": 2}, lrmoe={"observe": True, "warmup_steps": 0})
    found = [summary["observed"] for summary in pool2.run(observing, config)]
    assert found[0] == found[1]
    half = found[0]["0.5"]
    assert half["rows_saved"] == 4 * (2 * 2 * 16 * 2) // 2
    assert half["bytes_saved"] > found[0]["0.1"]["bytes_saved"] > 0
    assert 0 < half["added_variance"] < 1


def test_the_table_of_observations() -> None:
    entry = {"backward_peak": 1.25, "rows_saved": 12345, "added_variance": 0.0123, "bytes_saved": 1_000_000}
    lines_ = observed_table({"0.1": entry}).splitlines()
    assert lines_[1].split("  ")[-1] == "bytes saved"
    assert lines_[2].split() == ["0.1", "1.250", "12,345", "1.23%", "1,000,000"]
    assert len(lines_[1]) == len(lines_[2])
