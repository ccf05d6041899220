"""Trainers of tiny models that save and resume by the callback, for tests of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from tests.integrations.models import Tokens, make_model

PRUNED = LRMoEConfig(max_drop=0.3, warmup_steps=1)
EP2 = {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "lrmoe"}


def four_steps(folder: str | Path, **changes: Any) -> TrainingArguments:
    """Four steps of two micro-batches that save and report nothing by themselves."""
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**options, **changes})


def arguments(folder: str, **changes: Any) -> TrainingArguments:
    """Two epochs of four steps of two micro-batches on two ranks, with an evaluation in between."""
    longer = {"max_steps": 8, "learning_rate": 3e-3, "eval_strategy": "steps", "eval_steps": 6}
    return four_steps(folder, **{**longer, **changes})


def make_trainer(
    model: Any,
    folder: str,
    *callbacks: TrainerCallback,
    every: int = 3,
    config: LRMoEConfig = PRUNED,
    checkpoint_async: bool = False,
    **changes: Any,
) -> tuple[Trainer, lrmoe_hf.Handle]:
    handle = lrmoe_hf.enable(model, config)
    ours = lrmoe_hf.LRMoECallback(
        handle, checkpoints=f"{folder}/checkpoints", every=every, checkpoint_async=checkpoint_async
    )
    trainer = Trainer(
        model,
        arguments(folder, **changes),
        train_dataset=Tokens(32),
        eval_dataset=torch.utils.data.Subset(Tokens(32), range(4)),
        callbacks=[ours, *callbacks],
    )
    return trainer, handle


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
