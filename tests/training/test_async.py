"""`train.checkpoint_async`: the same checkpoints as without it, and training that none of it touches."""

from __future__ import annotations

import errno
import importlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from lrmoe.checkpoint import find_steps
from lrmoe.errors import CheckpointError
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from lrmoe.training.process import Process
from lrmoe.training.run import train
from lrmoe.training.state import checkpoint_root, saved_tensors
from tests.distributed.pool import Pool
from tests.training.tiny import CPU, tiny_config

SAVING: Any = importlib.import_module("lrmoe.checkpoint.save")  # the package has a function of that name
ALONE = Process(group=None, device=CPU, rank=0, world_size=1)
ASYNC = {"checkpoint_async": True}


def everything(trainer: Trainer) -> dict[str, Any]:
    """All that a checkpoint holds of this rank, copied."""
    return {
        **{name: tensor.detach().clone() for name, _, tensor in saved_tensors(trainer)},
        "layers": trainer.handle.state_dict(),
        "counters": (trainer.steps_done, trainer.steps_skipped, trainer.optimizer.updates),
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name]
        for name in a
    )


def interrupted(config: TrainConfig, ranks: int) -> bool:
    """Whether a run that saved in the background, and one that went on from there, end where a plain one does."""
    group = dist.group.WORLD if ranks > 1 else None
    plain = Trainer(config, group)
    for _ in range(4):
        plain.step()
    saving = Trainer(config.replace(train=ASYNC), group)
    for step in range(4):
        saving.step()
        if step == 1:
            saving.save()
    saving.finish_saving()
    resumed = Trainer(config, group)
    assert resumed.resume() == 2
    for _ in range(2):
        resumed.step()
    return same(everything(plain), everything(saving)) and same(everything(plain), everything(resumed))


def test_alone_it_changes_no_bit(tmp_path: Path) -> None:
    assert interrupted(tiny_config(tmp_path), 1)


@pytest.mark.distributed
@pytest.mark.parametrize("storage", ["owned", "sharded"])
def test_on_two_ranks_it_changes_no_bit(pool2: Pool, tmp_path: Path, storage: str) -> None:
    config = tiny_config(tmp_path, lrmoe={"storage": storage})
    assert pool2.run(interrupted, config, 2) == [True, True]


def test_a_run_leaves_what_it_leaves_without(tmp_path: Path) -> None:
    plain = tiny_config(tmp_path, train={"steps": 5, "checkpoint_every": 2, "trace": False})
    other = plain.replace(train={**ASYNC, "name": "async"})
    found = [train(config, ALONE, show_progress=False) for config in (plain, other)]
    names = [[Path(path).name for path in summary["checkpoints"]] for summary in found]
    assert names == [["step-00000004", "step-00000005"]] * 2
    files = [
        sorted(p for p in (config.folder / "checkpoints").rglob("*.safetensors")) for config in (plain, other)
    ]
    assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]
    assert train(other.replace(train={"steps": 6}), ALONE, resume=True, show_progress=False)["steps"] == 6


def test_a_run_that_is_asked_to_stop_waits_for_its_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, train={**ASYNC, "steps": 4, "checkpoint_every": 3, "trace": False})

    def slow(tensors: dict[str, torch.Tensor], path: Path) -> None:
        time.sleep(0.2)
        save_file(tensors, path)

    monkeypatch.setattr(SAVING, "save_file", slow)
    summary = train(config, ALONE, show_progress=False, stop_asked=lambda: True)
    assert (summary["steps"], summary["finished"]) == (1, False)
    assert [Path(path).name for path in summary["checkpoints"]] == ["step-00000001"]
    assert Trainer(config).resume() == 1


def test_a_full_disk_ends_the_step_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tiny_config(tmp_path, train=ASYNC))
    trainer.step()
    trainer.save()
    trainer.step()
    trainer.finish_saving()
    monkeypatch.setattr(SAVING, "save_file", no_room)
    trainer.save()
    before = everything(trainer)
    with pytest.raises(CheckpointError, match=r"step-00000002.*cannot be written: .*No space left"):
        trainer.finish_saving()
    trainer.save()
    assert trainer.background._pending is not None
    assert trainer.background._pending.files.exception(20) is not None
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.step()
    assert same(everything(trainer), before)
    monkeypatch.undo()
    assert trainer.step().step == 3
    trainer.save()
    trainer.finish_saving()
    assert find_steps(checkpoint_root(trainer)) == [1, 3]
    assert sorted(p.name for p in checkpoint_root(trainer).iterdir()) == ["step-00000001", "step-00000003"]


def no_room(tensors: dict[str, torch.Tensor], path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_run_that_fails_leaves_no_half_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, train={**ASYNC, "steps": 4, "checkpoint_every": 2, "trace": False})
    failed, step = threading.Event(), Trainer.step

    def slow(tensors: dict[str, torch.Tensor], path: Path) -> None:
        failed.wait(2.0)
        save_file(tensors, path)

    def fail(trainer: Trainer) -> Any:
        if trainer.steps_done == 3:
            failed.set()
            raise ZeroDivisionError
        return step(trainer)

    monkeypatch.setattr(SAVING, "save_file", slow)
    monkeypatch.setattr(Trainer, "step", fail)
    with pytest.raises(ZeroDivisionError):
        train(config, ALONE, show_progress=False)
    assert list((config.folder / "checkpoints").iterdir()) == []
