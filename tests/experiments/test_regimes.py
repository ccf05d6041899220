from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from lrmoe.errors import ConfigError
from lrmoe.experiments.trajectories import regimes
from lrmoe.experiments.trajectories.regimes import REGIMES, regime_config, start_model
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from tests.training.tiny import tiny_config

SHORT = {**regimes._START, "train": {**regimes._START["train"], "steps": 3}, "data": {"seq_len": 16}}


@pytest.fixture(autouse=True)
def short_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start checkpoint of three steps."""
    monkeypatch.setattr(regimes, "_START", SHORT)


def base(folder: Path, **tables: Any) -> TrainConfig:
    return tiny_config(folder, **tables)


def test_scratch_starts_from_the_bases_model(tmp_path: Path) -> None:
    given = base(tmp_path, train={"router_aux_loss": 0.001})
    run = regime_config(given, "scratch", 7, tmp_path / "cache")
    assert run.model == given.model
    assert (run.train.steps, run.train.seed, run.lrmoe.seed, run.train.router_aux_loss) == (400, 7, 7, 0.001)
    assert run.lrmoe.warmup_steps == given.lrmoe.warmup_steps
    assert not (tmp_path / "cache").exists()


def test_memorise_reads_little_text_and_scores_what_can_be_known(tmp_path: Path) -> None:
    run = regime_config(base(tmp_path), "memorise", 2, tmp_path / "cache")
    assert (run.data.limit, run.data.seq_len, run.train.batch_size) == (8192, 128, 8)
    assert (run.train.skip_positions, run.lrmoe.warmup_steps, run.optim.lr) == (16, 0, 3e-3)
    assert REGIMES["memorise"].target_loss == 0.05


def test_the_start_checkpoint_is_made_once_and_holds_the_trained_weights(tmp_path: Path) -> None:
    cache, steps = tmp_path / "cache", []
    first = regime_config(base(tmp_path), "continued", 0, cache, lambda step, of: steps.append((step, of)))
    again = regime_config(base(tmp_path), "memorise", 5, cache, lambda step, of: steps.append((step, of)))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert first.model.checkpoint == again.model.checkpoint
    folders = [path.name for path in cache.iterdir() if path.is_dir()]
    assert folders == [Path(str(first.model.checkpoint)).name]
    train = {**SHORT["train"], "seed": 0}
    trainer = Trainer(
        base(tmp_path, data=SHORT["data"], optim=SHORT["optim"], train=train, lrmoe={"max_drop": 0.0})
    )
    for _ in range(3):
        trainer.step()
    loaded = Trainer(dataclasses.replace(base(tmp_path), model=first.model)).model.state_dict()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"router_aux_loss": 0.01}},
        {"model": {"overrides": {**tiny_config("/tmp").model.overrides, "num_experts": 8}}},
    ],
)
def test_what_changes_the_weights_makes_another_checkpoint(tmp_path: Path, change: dict[str, Any]) -> None:
    one = start_model(base(tmp_path), tmp_path / "cache")
    other = start_model(base(tmp_path).replace(**change), tmp_path / "cache")
    assert one.checkpoint != other.checkpoint


def test_what_does_not_change_the_weights_makes_none(tmp_path: Path) -> None:
    one = start_model(base(tmp_path), tmp_path / "cache")
    other = base(tmp_path, lrmoe={"max_drop": 0.5}, train={"seed": 9, "steps": 77}, optim={"lr": 0.5})
    assert start_model(other, tmp_path / "cache") == one


def test_new_text_makes_another_checkpoint(tmp_path: Path) -> None:
    one = start_model(base(tmp_path), tmp_path / "cache")
    (tmp_path / "corpus.txt").write_text("other words " * 900)
    regimes._corpus.cache_clear()  # as in a new process
    assert start_model(base(tmp_path), tmp_path / "cache") != one


def test_a_making_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(step: int, steps: int) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        start_model(base(tmp_path), tmp_path / "cache", fail)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def make(folder: Path, made: Any) -> None:
    """What two processes do at once."""
    regimes._START = SHORT
    start_model(base(folder), folder / "cache", lambda step, steps: made.put(step))


def test_two_processes_make_one_checkpoint(tmp_path: Path) -> None:
    base(tmp_path)
    context = multiprocessing.get_context("spawn")
    made = context.Queue()
    both = [context.Process(target=make, args=(tmp_path, made)) for _ in range(2)]
    for process in both:
        process.start()
    steps = [made.get(timeout=110) for _ in range(3)]
    for process in both:
        process.join(110)
    assert [process.exitcode for process in both] == [0, 0]
    assert steps == [1, 2, 3]
    assert made.empty()


def test_a_base_with_weights_starts_from_them(tmp_path: Path) -> None:
    started = start_model(base(tmp_path), tmp_path / "cache")
    given = dataclasses.replace(base(tmp_path), model=started)
    assert regime_config(given, "continued", 0, tmp_path / "other").model == started
    assert not (tmp_path / "other").exists()
    with pytest.raises(ConfigError, match="'scratch' starts from new weights"):
        regime_config(given, "scratch", 0)


def test_an_unknown_regime_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"regime='memorize'.*did you mean 'memorise'.*scratch, continued"):
        regime_config(base(tmp_path), "memorize", 0)
