"""Checkpoints of the Trainer that cannot be written or read, and runs that go on otherwise than they began."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from lrmoe import CheckpointError, ConfigError, LRMoEConfig, UnsupportedError
from lrmoe.checkpoint import find_steps
from lrmoe.integrations import transformers as lrmoe_hf
from tests.integrations.models import Tokens, make_model
from tests.integrations.trainers import Look, alone, arguments, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore::FutureWarning")
save_module = importlib.import_module("lrmoe.checkpoint.save")  # not the function of that name


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


class Hold(TrainerCallback):
    """Lets the thread of a checkpoint write once training is at a later step, and notes which were there before."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, until: int, error: Exception | None = None
    ) -> None:
        self.folder, self.until, self.error, self.go = folder / "checkpoints", until, error, threading.Event()
        self.right, self.seen = save_module.save_file, dict[int, list[int]]()
        patch.setattr(save_module, "save_file", self._write)

    def _write(self, *given: Any) -> Any:
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return self.right(*given)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen[state.global_step] = find_steps(self.folder)
        if state.global_step == self.until:
            self.go.set()


def test_training_goes_on_while_a_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Hold(tmp_path, monkeypatch, 5)
    alone(tmp_path, held, max_steps=6, checkpoint_async=True)
    assert held.seen[4] == held.seen[5] == [], "step 3 is still being written"
    assert find_steps(tmp_path / "checkpoints") == [3, 6]
    trainer, _ = alone(tmp_path, max_steps=8, checkpoint_async=True)
    assert trainer._initial_global_step == 6


def test_what_a_thread_could_not_write_is_raised_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Hold(tmp_path, monkeypatch, 4, OSError(28, "No space left on device"))
    with pytest.raises(CheckpointError, match="No space left"):
        alone(tmp_path, held, max_steps=6, checkpoint_async=True)
    assert 3 in held.seen
    assert list((tmp_path / "checkpoints").iterdir()) == []


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
