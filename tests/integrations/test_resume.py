"""The Trainer with checkpoints by the callback: killed, started again, the same bits; other layouts; refusals."""

from __future__ import annotations

import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from lrmoe.checkpoint import Manifest, export_checkpoint, find_steps
from lrmoe.integrations import transformers as lrmoe_hf
from tests.distributed.pool import Pool
from tests.integrations.models import make_model
from tests.integrations.ranks import LIMIT_S, load, whole
from tests.integrations.trainers import EP2, Look, Looked, Stop, alone, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore::FutureWarning")
save_module = importlib.import_module("lrmoe.checkpoint.save")  # not the function of that name


class Kill(TrainerCallback):
    """Ends this process in the middle of an optimizer step, after its first micro-batch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    path: str, folder: str, layout: dict[str, Any], kill_at: int | None = None, **changes: Any
) -> dict[str, Any]:
    """Start or go on; returns the whole weights and what else must not depend on an interruption."""
    model = load(path, torch.float32, **layout)
    killer = [Kill(kill_at)] if kill_at is not None and dist.get_rank() == dist.get_world_size() - 1 else []
    trainer, handle = make_trainer(model, folder, *killer, **changes)
    place = lrmoe_hf.resume(trainer)
    trainer.train(resume_from_checkpoint=place)
    moments = {
        f"{name} {moment}": whole(value).clone()
        for name, parameter in model.named_parameters()
        for moment, value in trainer.optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    return {
        "weights": {name: whole(p.detach()).clone() for name, p in model.named_parameters()},
        "moments": moments,
        "clock": handle.clock.step,
        "controllers": json.dumps(handle.state_dict()["layers"], sort_keys=True),
        "losses": [losses[step] for step in sorted(losses)],
        "lr": trainer.lr_scheduler.get_last_lr(),
        "started_at": 0 if place is None else trainer._initial_global_step,
    }


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for part in ("weights", "moments"):
        for name, value in wanted[part].items():
            assert torch.equal(found[part][name], value), f"{part} {name}"
    for part in ("clock", "controllers", "losses", "lr"):
        assert found[part] == wanted[part], part


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Qwen3-MoE in float32 that draws random numbers in training."""
    folder = tmp_path_factory.mktemp("models")
    make_model("qwen3", attention_dropout=0.2).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def whole_run(pool2: Pool, saved: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run at EP 2 that nothing interrupts: its folder, and what each rank ends with."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, pool2.run(train, saved, str(folder), EP2, limit_s=LIMIT_S)


@pytest.mark.distributed
def test_killed_and_started_again_ends_with_the_same_bits(
    pool2: Pool, saved: str, whole_run: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    outcomes = pool2.outcomes(train, saved, str(tmp_path), EP2, 7, limit_s=LIMIT_S)  # in the eighth step
    assert all(outcome.error is not None for outcome in outcomes)
    assert find_steps(tmp_path / "checkpoints") == [3, 6]
    again = pool2.run(train, saved, str(tmp_path), EP2, limit_s=LIMIT_S)
    for found, wanted in zip(again, whole_run[1], strict=True):
        assert (found["started_at"], wanted["started_at"]) == (6, 0)
        assert_equal(found, wanted)
    assert find_steps(tmp_path / "checkpoints") == [6, 8]


@pytest.mark.distributed
def test_checkpoints_written_in_a_thread_are_the_same(
    pool2: Pool, saved: str, whole_run: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    first = pool2.outcomes(train_async, saved, str(tmp_path), 7, limit_s=LIMIT_S)
    assert all(outcome.error is not None for outcome in first)
    assert find_steps(tmp_path / "checkpoints")[-1] in (3, 6), "the newest may still have been on its way"
    again = pool2.run(train_async, saved, str(tmp_path), limit_s=LIMIT_S)
    for found, wanted in zip(again, whole_run[1], strict=True):
        assert_equal(found, wanted)
    for entry in Manifest.read(whole_run[0] / "checkpoints" / "step-00000008").files:
        one, other = (
            folder / "checkpoints" / "step-00000008" / entry.name for folder in (whole_run[0], tmp_path)
        )
        assert entry.name == "state.json" or one.read_bytes() == other.read_bytes(), entry.name


def train_async(path: str, folder: str, kill_at: int | None = None) -> dict[str, Any]:
    """Worker."""
    return train(path, folder, EP2, kill_at, checkpoint_async=True)


def train_dying(path: str, folder: str, step: int, part: str) -> None:
    """Worker: one rank is killed while it writes its files of a step's checkpoint, or the first while it publishes."""
    right, dies = getattr(save_module, part), 0 if part == "_publish" else 1

    def write(place: Path, *rest: Any) -> Any:
        if dist.get_rank() == dies and place.name.startswith(f".partial-step-{step:08}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return right(place, *rest)

    setattr(save_module, part, write)  # for the rest of these processes, which end here
    train(path, folder, EP2)


@pytest.mark.distributed
@pytest.mark.parametrize("part", ["_write_rank", "_publish"])
def test_killed_while_saving_the_checkpoint_before_is_gone_on_with(
    pool2: Pool, saved: str, whole_run: tuple[Path, list[Any]], tmp_path: Path, part: str
) -> None:
    outcomes = pool2.outcomes(train_dying, saved, str(tmp_path), 6, part, limit_s=LIMIT_S)
    assert all(outcome.error is not None for outcome in outcomes)
    pool2.stop()
    assert find_steps(tmp_path / "checkpoints") == [3]
    again = pool2.run(train, saved, str(tmp_path), EP2, limit_s=LIMIT_S)
    for found, wanted in zip(again, whole_run[1], strict=True):
        assert found["started_at"] == 3
        assert_equal(found, wanted)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000006",
        "step-00000008",
    ]


def assert_read_by_one_process(saved: str, folder: Path, wanted: dict[str, Any], step: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    look = Look()
    trainer, handle = make_trainer(model, str(folder), look, max_steps=step + 2)
    with pytest.raises(Looked):
        trainer.train(resume_from_checkpoint=lrmoe_hf.resume(trainer))
    assert (look.step, handle.clock.step) == (step, step)
    for part in ("weights", "moments"):
        found = getattr(look, part)
        assert found.keys() == wanted[part].keys()
        for name, value in wanted[part].items():
            assert torch.equal(found[name], value), name


@pytest.mark.distributed
def test_one_process_goes_on_with_what_two_ranks_saved(saved: str, whole_run: tuple[Path, list[Any]]) -> None:
    folder, results = whole_run
    assert_read_by_one_process(saved, folder, results[0], 8)


@pytest.mark.distributed
def test_a_checkpoint_of_the_trainer_can_be_exported(
    saved: str, whole_run: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    folder, results = whole_run
    export_checkpoint(folder / "checkpoints", tmp_path / "out", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in model.named_parameters():
        assert torch.equal(value, results[0]["weights"][name]), name


@pytest.mark.distributed
def test_groups_smaller_than_the_world_save_and_go_on(pool4: Pool, saved: str, tmp_path: Path) -> None:
    layout = {"fsdp_size": 4, "ep_size": 2, "ep_implementation": "lrmoe"}
    options = {"eval_strategy": "no", "gradient_accumulation_steps": 1}
    first = pool4.run(train_some, saved, str(tmp_path), layout, 3, options, limit_s=LIMIT_S)
    assert_read_by_one_process(saved, tmp_path, first[0], 3)
    whole = pool4.run(train_some, saved, str(tmp_path / "whole"), layout, 4, options, limit_s=LIMIT_S)
    again = pool4.run(train_some, saved, str(tmp_path), layout, 4, options, limit_s=LIMIT_S)
    for found, wanted in zip(again, whole, strict=True):
        assert (found["started_at"], wanted["started_at"]) == (3, 0)
        assert_equal(found, wanted)


def train_some(
    path: str, folder: str, layout: dict[str, Any], steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    return train(path, folder, layout, max_steps=steps, lr_scheduler_type="constant", **options)


def test_a_finished_run_is_not_trained_any_further(tmp_path: Path) -> None:
    _, wanted = alone(tmp_path, every=4)
    trainer, found = alone(tmp_path, every=4)
    assert trainer.state.global_step == 10
    assert find_steps(tmp_path / "checkpoints") == [8, 10]
    assert found["controllers"] == wanted["controllers"]
    for name, value in wanted["weights"].items():
        assert torch.equal(found["weights"][name], value), name
    trainer, _ = alone(tmp_path, every=4, max_steps=11)
    assert trainer.state.global_step == 11
    assert "_run_epoch" not in vars(trainer)


# Epochs have eight steps: one run goes on inside an epoch, with callbacks made anew, the other at the end of one.
@pytest.mark.parametrize(("every", "restore_callbacks"), [(3, True), (4, False)])
def test_one_device_ends_with_the_same_bits(tmp_path: Path, every: int, restore_callbacks: bool) -> None:
    options: dict[str, Any] = {"restore_callback_states_from_checkpoint": restore_callbacks, "every": every}
    _, wanted = alone(tmp_path / "whole", **options)
    with pytest.raises(Looked):
        alone(tmp_path / "broken", Stop(2 * every), **options)
    trainer, found = alone(tmp_path / "broken", **options)
    assert trainer._initial_global_step == 2 * every
    assert found["controllers"] == wanted["controllers"]
    for name, value in wanted["weights"].items():
        assert torch.equal(found["weights"][name], value), name
    assert find_steps(tmp_path / "broken" / "checkpoints") == ([9, 10] if every == 3 else [8, 10])
    assert "_load_rng_state" not in vars(trainer), "the Trainer reads as before"
