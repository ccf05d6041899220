"""Runs that are asked to stop, lose a rank, or meet a gradient that is not finite: what is saved, and who is told."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.checkpoint import find_steps, folder_of, open_checkpoint
from lrmoe.errors import ConfigError, RankError
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from lrmoe.training.process import Process
from lrmoe.training.resume import resume_or_start
from lrmoe.training.run import run_rank, train
from lrmoe.training.stop import StopRequest, stop_on_sigterm
from tests.distributed.pool import Pool
from tests.training.tiny import CPU, tiny_config


def before_step(number: int, action: Callable[[], object]) -> Callable[[Trainer], Any]:
    """`Trainer.step` that does something on rank 1 before the step of that number, counted from 0."""
    whole = Trainer.step

    def step(trainer: Trainer) -> Any:
        if trainer.steps_done == number and trainer.rank == trainer.world_size - 1:
            action()
        return whole(trainer)

    return step


def ranks_of(config: TrainConfig, action: str | None, resume: bool = False) -> dict[str, Any]:
    """Worker: a whole run of this rank; something happens to the last rank in step 3."""
    actions: dict[str, Callable[[], object]] = {
        "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "raises": _raise_and_leave,
    }
    with pytest.MonkeyPatch.context() as patch:
        if action is not None:
            patch.setattr(Trainer, "step", before_step(2, actions[action]))
        return run_rank(config.to_dict(), resume, False)


def _raise_and_leave() -> None:
    from lrmoe.distributed.peers import tell

    tell(OSError("the disk is gone"))  # as any rank does whose run raises
    os._exit(1)


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    """All tensors of a run's newest checkpoint."""
    root = config.folder / "checkpoints"
    checkpoint = open_checkpoint(folder_of(root, find_steps(root)[-1]))
    with checkpoint.reader() as reader:
        return {key: reader.dense(key) for key in checkpoint.manifest.file_of()}


@pytest.mark.distributed
@pytest.mark.parametrize("in_background", [False, True])
def test_sigterm_to_one_rank_saves_on_all_and_the_run_goes_on(
    pool2: Pool, tmp_path: Path, in_background: bool
) -> None:
    every = {"steps": 6, "checkpoint_every": 5, "eval_every": 3, "checkpoint_async": in_background}
    config = tiny_config(tmp_path, train=every)
    stopped = pool2.run(ranks_of, config, "SIGTERM")
    assert [(s["steps"], s["finished"]) for s in stopped] == [(3, False)] * 2
    assert find_steps(config.folder / "checkpoints") == [3]
    assert json.loads((config.folder / "summary.json").read_text())["finished"] is False
    resumed = pool2.run(ranks_of, config, None, True)[0]
    whole = config.replace(train={"name": "whole"})
    wanted = pool2.run(ranks_of, whole, None)[0]
    assert resumed["finished"]
    assert wanted["finished"]
    assert resumed["eval_losses"] == wanted["eval_losses"]
    ours, theirs = weights(config), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("action", "said"),
    [("SIGKILL", "some rank was lost"), ("raises", "rank 1 failed: OSError: the disk is gone")],
)
def test_with_a_rank_lost_nothing_is_saved(pool: Pool, tmp_path: Path, action: str, said: str) -> None:
    config = tiny_config(tmp_path, train={"steps": 6, "checkpoint_every": 1})
    error = pool.outcomes(ranks_of, config, action)[0].error
    assert isinstance(error, RankError)
    assert "MoE layer 0: waiting for all ranks at training call 1 of step 2" in str(error)
    assert said in str(error)
    assert find_steps(config.folder / "checkpoints") == [1, 2]
    assert not list((config.folder / "checkpoints").glob(".*"))


def killed_after(config: TrainConfig, steps: int | None, seconds: float = 0.0) -> tuple[int, bool]:
    """Worker: go on or start; so many steps and seconds later the last rank is killed, whatever it is doing."""
    resume, overwrite = resume_or_start(None, overrides(Path(config.train.runs), checkpoint_every=2))
    whole, begun = Trainer.step, []

    def step(trainer: Trainer) -> Any:
        begun.append(trainer.steps_done)
        if len(begun) == steps and trainer.rank == trainer.world_size - 1:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return whole(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        summary = run_rank(config.to_dict(), resume, False, overwrite)
    return summary["steps"], summary["finished"]


@pytest.mark.distributed
def test_a_run_that_is_killed_again_and_again_ends_at_the_same_weights(pool: Pool, tmp_path: Path) -> None:
    constant = {"warmup_steps": 2, "min_lr_ratio": 1.0}  # whatever the number of steps
    config = tiny_config(
        tmp_path, train={"steps": 500, "checkpoint_every": 2, "trace": False}, optim=constant
    )
    saved, moments, reached = config.folder / "checkpoints", random.Random(0), 0
    for kill in range(6):
        config = config.replace(train={"checkpoint_async": kill % 2 == 1})
        outcomes = pool.outcomes(killed_after, config, moments.randint(1, 5), moments.uniform(0, 0.1))
        assert all(one.error is not None for one in outcomes)
        steps = find_steps(saved)
        assert max(steps, default=0) >= reached, "no checkpoint is lost"
        reached = max(steps, default=0)
    assert reached > 0
    config = config.replace(train={"steps": reached + 3})
    assert pool.run(killed_after, config, None) == [(reached + 3, True)] * 2
    whole = config.replace(train={"name": "whole"})
    pool.run(ranks_of, whole, None)
    ours, theirs = weights(config), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def poisoned(config: TrainConfig) -> tuple[dict[str, Any], list[float], list[Any]]:
    """Worker: a run in which one rank's loss is not finite in step 3; its summary, losses and controllers' states."""
    states, losses, plain, whole = [], [], Trainer._losses, Trainer.step

    def losses_of(trainer: Trainer, *args: Any) -> Any:
        loss, balance = plain(trainer, *args)
        bad = trainer.steps_done == 2 and trainer.rank == 1 and trainer.model.training
        return loss * math.nan if bad else loss, balance

    def step(trainer: Trainer) -> Any:
        metrics = whole(trainer)
        losses.append(metrics.loss)
        states.append(trainer.handle.state_dict())
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_losses", losses_of)
        patch.setattr(Trainer, "step", step)
        process = Process(group=dist.group.WORLD, device=CPU, rank=dist.get_rank(), world_size=2)
        return train(config, process, show_progress=False), losses, states


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("estimator", "drop"), [("sampled", "always"), ("sampled", "auto"), ("topk", "always")]
)
def test_a_loss_that_is_not_finite_on_one_rank(
    pool2: Pool, tmp_path: Path, drop: str, estimator: str
) -> None:
    lrmoe = {"max_drop": 0.5, "warmup_steps": 0, "drop": drop, "estimator": estimator}
    config = tiny_config(tmp_path, train={"steps": 6, "checkpoint_every": 6}, lrmoe=lrmoe)
    for summary, losses, states in pool2.run(poisoned, config):
        assert (summary["steps"], summary["steps_skipped"]) == (6, 1)
        assert [math.isfinite(loss) for loss in losses] == [step != 2 for step in range(6)]
        json.dumps(states, allow_nan=False)  # controllers learn nothing that is not finite
    assert all(bool(tensor.isfinite().all()) for tensor in weights(config).values())


def test_a_second_sigterm_ends_at_once_unless_it_is_the_first_one_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, calls = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    request = StopRequest(lambda: calls.append("first"), lambda: calls.append("again"))
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm(request):
        assert not request.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert (request.asked, calls) == (True, ["first"])
        now[0] = 1.9
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == ["first"]
        now[0] = 2.1
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == ["first", "again"]
    with stop_on_sigterm(request, wanted=False):
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGTERM) is before


def overrides(folder: Path, **train: Any) -> list[str]:
    named = {"runs": str(folder), "name": "run", **train}
    return [f"train.{key}={json.dumps(value)}" for key, value in named.items()]


def test_a_command_that_may_be_run_again_starts_or_goes_on(tmp_path: Path) -> None:
    given = overrides(tmp_path, checkpoint_every=2)
    assert resume_or_start(None, given) == (False, True)
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert resume_or_start(None, given) == (True, False)
    assert resume_or_start(None, overrides(tmp_path)) == (True, False), (
        "its own configuration says how often it saves"
    )
    (folder / "checkpoints" / "step-00000002").rename(folder / "checkpoints" / ".removed-step-00000002")
    (folder / "summary.json").write_text("{}")
    assert resume_or_start(None, given) == (False, False), "a finished run is not overwritten"
    with pytest.raises(ConfigError, match=r"train.checkpoint_every=0 with --auto-resume"):
        resume_or_start(None, overrides(tmp_path))


def one_sees_checkpoints(config: TrainConfig) -> str:
    try:
        return str(run_rank(config.to_dict(), dist.get_rank() == 1, False)["steps"])
    except ConfigError as error:
        return str(error)


@pytest.mark.distributed
def test_ranks_that_see_different_checkpoints_are_told(pool2: Pool, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"checkpoint_every": 2})
    for said in pool2.run(one_sees_checkpoints, config):
        assert "only rank 1 of 2 ranks sees checkpoints" in said
    assert not config.folder.exists()
