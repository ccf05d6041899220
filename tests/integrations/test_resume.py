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
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from lrmoe import CheckpointError, ConfigError, LRMoEConfig, UnsupportedError
from lrmoe.checkpoint import export_checkpoint, find_steps
from lrmoe.integrations import transformers as lrmoe_hf
from tests.distributed.pool import Pool
from tests.integrations.models import Tokens, make_model
from tests.integrations.ranks import LIMIT_S, load, whole

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore::FutureWarning")
PRUNED = LRMoEConfig(max_drop=0.3, warmup_steps=1)
save_module = importlib.import_module("lrmoe.checkpoint.save")  # not the function of that name
EP2 = {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "lrmoe"}


class Kill(TrainerCallback):
    """Ends this process in the middle of an optimizer step, after its first micro-batch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def arguments(folder: str, **changes: Any) -> TrainingArguments:
    """Two epochs of four steps of two micro-batches on two ranks, with an evaluation in between."""
    options: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 8,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 6,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**options, **changes})


def make_trainer(
    model: Any,
    folder: str,
    *callbacks: TrainerCallback,
    every: int = 3,
    config: LRMoEConfig = PRUNED,
    **changes: Any,
) -> tuple[Trainer, lrmoe_hf.Handle]:
    handle = lrmoe_hf.enable(model, config)
    ours = lrmoe_hf.LRMoECallback(handle, checkpoints=f"{folder}/checkpoints", every=every)
    trainer = Trainer(
        model,
        arguments(folder, **changes),
        train_dataset=Tokens(32),
        eval_dataset=torch.utils.data.Subset(Tokens(32), range(4)),
        callbacks=[ours, *callbacks],
    )
    return trainer, handle


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


class Looked(Exception):
    """Training has begun, and that is all this test wants of it."""


class Look(TrainerCallback):
    """Keeps the weights and the optimizer's tensors as training begins, and ends it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model, optimizer = given["model"], given["optimizer"]
        named = list(model.named_parameters())
        self.step = state.global_step
        self.weights = {name: p.detach().clone() for name, p in named}
        self.moments = {f"{name} {m}": v for name, p in named for m, v in optimizer.state[p].items()}
        raise Looked


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


class Stop(TrainerCallback):
    """Ends training by an error, in the middle of an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Looked


def alone(folder: Path, *callbacks: TrainerCallback, **changes: Any) -> tuple[Trainer, dict[str, Any]]:
    """One process from the start, or from the newest checkpoint in `folder`."""
    model = make_model("qwen3", attention_dropout=0.2)
    options = {"max_steps": 10, "max_grad_norm": 0.5, "optim": "sgd", "optim_args": "momentum=0.9"}
    trainer, handle = make_trainer(model, str(folder), *callbacks, **{**options, **changes})
    place = lrmoe_hf.resume(trainer)
    trainer.train(resume_from_checkpoint=place)
    assert place is None or not Path(place).exists()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    controllers = json.dumps(handle.state_dict(), sort_keys=True)
    return trainer, {"weights": weights, "controllers": controllers}


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


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone(tmp_path, max_steps=6)
    newest = tmp_path / "checkpoints" / "step-00000006" / "dense.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    trainer, _ = alone(tmp_path, max_steps=7)
    assert trainer._initial_global_step == 3
    assert "step-00000006 is not usable" in caplog.text


def test_what_cannot_be_resumed_is_named(tmp_path: Path) -> None:
    alone(tmp_path, max_steps=3)
    for other in (
        make_model("qwen3", num_hidden_layers=1),
        make_model("glm4"),
        make_model("qwen3", num_experts=4),
    ):
        trainer, _ = make_trainer(other, str(tmp_path))
        with pytest.raises(CheckpointError, match="is of another model"):
            lrmoe_hf.resume(trainer)
    bare = Trainer(
        other, arguments(str(tmp_path), eval_strategy="no"), train_dataset=Tokens(32), callbacks=[]
    )
    with pytest.raises(ConfigError, match=r"callbacks=\[LRMoECallback\(handle, checkpoints=folder"):
        lrmoe_hf.resume(bare)
    trainer.is_fsdp_enabled = True
    with pytest.raises(UnsupportedError, match=r"Accelerate's FSDP.*save_strategy"):
        lrmoe_hf.resume(trainer)


def test_an_optimizer_whose_state_has_other_shapes_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"optimizer state exp_avg_sq_row of .* has shape"):
        alone(tmp_path, optim="adafactor", optim_args=None)
    assert find_steps(tmp_path / "checkpoints") == []


def test_an_optimizer_of_another_class_is_named_before_a_step(tmp_path: Path) -> None:
    alone(tmp_path, max_steps=3)
    with pytest.raises(CheckpointError, match="the checkpoint is of SGD, this run's is AdamW"):
        alone(tmp_path, max_steps=6, optim="adamw_torch", optim_args=None)
    assert find_steps(tmp_path / "checkpoints") == [3]


def test_a_folder_that_cannot_be_written_to_is_named_before_a_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file", encoding="utf-8")
    seen = Look()
    with pytest.raises(CheckpointError, match="checkpoints cannot be written there"):
        alone(tmp_path, seen)
    assert not hasattr(seen, "step"), "training has begun"


class Fill(TrainerCallback):
    """Lets no tensor be written after a step."""

    def __init__(self, step: int, patch: pytest.MonkeyPatch) -> None:
        self.step, self.patch, self.refused = step, patch, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.patch.setattr(save_module, "save_file", self._refuse)

    def _refuse(self, *_: Any) -> None:
        self.refused += 1
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_training_and_the_checkpoint_before_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, wanted = alone(tmp_path / "whole", max_steps=8)
    filled = Fill(5, monkeypatch)
    with pytest.raises(CheckpointError, match="No space left"):
        alone(tmp_path, filled, max_steps=8)
    monkeypatch.undo()
    assert filled.refused == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    trainer, found = alone(tmp_path, max_steps=8)
    assert trainer._initial_global_step == 3
    for name, value in wanted["weights"].items():
        assert torch.equal(found["weights"][name], value), name


def test_other_settings_of_the_layer_go_on_from_the_same_checkpoint(tmp_path: Path) -> None:
    alone(tmp_path, max_steps=3)
    step = 3
    for config in (
        LRMoEConfig(max_drop=0.5, estimator="topk"),
        LRMoEConfig(drop="auto", max_added_variance=0.5, warmup_steps=0),
        LRMoEConfig(max_drop=0, policy="symi"),
        LRMoEConfig(select_in="forward", score="alpha", warmup_steps=0),
    ):
        model = make_model("qwen3", attention_dropout=0.2)
        trainer, handle = make_trainer(
            model,
            str(tmp_path),
            config=config,
            every=1,
            max_steps=step + 1,
            optim="sgd",
            optim_args="momentum=0.9",
        )
        trainer.train(resume_from_checkpoint=lrmoe_hf.resume(trainer))
        assert trainer._initial_global_step == step
        step += 1
        assert (trainer.state.global_step, handle.clock.step) == (step, step)


def test_fewer_steps_than_were_done_train_nothing_and_change_nothing(tmp_path: Path) -> None:
    _, wanted = alone(tmp_path, max_steps=6)
    trainer, found = alone(tmp_path, max_steps=4)
    assert trainer.state.global_step == 6
    assert find_steps(tmp_path / "checkpoints") == [3, 6]
    for name, value in wanted["weights"].items():
        assert torch.equal(found["weights"][name], value), name


def test_frozen_weights_are_saved_and_read(tmp_path: Path) -> None:
    def freeze(model: Any, value: float) -> Any:
        for name, parameter in model.named_parameters():
            if "gate_up_proj" in name or "embed" in name:
                parameter.requires_grad_(False)
                with torch.no_grad():
                    parameter.mul_(value)
        return model

    first = freeze(make_model("qwen3"), 1.0)
    trainer, _ = make_trainer(first, str(tmp_path), max_steps=3)
    trainer.train()
    again = freeze(make_model("qwen3"), 0.0)
    trainer, _ = make_trainer(again, str(tmp_path), max_steps=3)
    trainer.train(resume_from_checkpoint=lrmoe_hf.resume(trainer))
    for (name, value), found in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(found, value), name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"checkpoints": "x"}, "every=None"),
        ({"every": 3}, "checkpoints=None"),
        ({"checkpoints": "x", "every": 0}, "every=0"),
        ({"checkpoints": "x", "every": 2, "keep_last": 0}, "keep_last=0"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        lrmoe_hf.LRMoECallback(**options)
