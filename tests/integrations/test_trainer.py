"""Transformers' Trainer with the callback: clock, logs, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback

from lrmoe import ConfigError, LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from tests.integrations.models import Tokens, make_model
from tests.integrations.trainers import four_steps as arguments

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore::FutureWarning")


def test_callback_steps_the_clock_and_logs(tmp_path: Path) -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=2))
    seen: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    callbacks = [lrmoe_hf.LRMoECallback(handle), Reporter()]
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Tokens(64), callbacks=callbacks)
    trainer.train()
    assert handle.clock.step == 4  # per optimizer step, not per micro-batch
    steps = [logs for logs in seen if "loss" in logs]
    assert [logs["lrmoe/kept_share"] for logs in steps] == pytest.approx([1.0, 1.0, 0.5, 0.5])
    assert [(logs.get("lrmoe/calls_warmup"), logs.get("lrmoe/calls_always")) for logs in steps] == [
        (2 * len(handle.layers), None)
    ] * 2 + [(None, 2 * len(handle.layers))] * 2
    assert all(0 < logs["lrmoe/moe_time_share"] < 1 for logs in steps)
    ours = {name for logs in steps for name in logs if name.startswith("lrmoe/")}
    assert len(ours) <= 16, "a log that a person reads"
    assert not any("_ms_" in name or "bytes_" in name for name in ours), "phases are for log='layers'"
    assert trainer.state.log_history[3]["lrmoe/kept_share"] == pytest.approx(0.5)
    assert handle.summary()["calls"] == 4 * 2 * len(handle.layers)


def test_reporters_of_the_callback_see_figures_and_histograms(tmp_path: Path) -> None:
    class Reporter:
        def __init__(self) -> None:
            self.seen: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
            self.closed = 0

        def write(self, step: int, values: Any, histograms: Any) -> None:
            self.seen.append((step, dict(values), dict(histograms)))

        def close(self) -> None:
            self.closed += 1

    model, reporter = make_model("qwen3"), Reporter()
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=0))
    callbacks = [lrmoe_hf.LRMoECallback(handle, [reporter], log="layers")]
    Trainer(
        model,
        arguments(tmp_path, max_steps=4, logging_steps=2),
        train_dataset=Tokens(64),
        callbacks=callbacks,
    ).train()
    assert [step for step, *_ in reporter.seen] == [2, 4]
    assert reporter.closed == 1
    for _, values, histograms in reporter.seen:
        assert values["lrmoe/kept_share_worst"] == pytest.approx(0.5)
        assert values["lrmoe/calls_always"] == 2 * 2 * len(handle.layers)
        assert values["lrmoe/ms_experts_backward"] > 0
        assert values["loss"] > 0
        # two steps of two micro-batches of 2 x 8 tokens
        assert sum(histograms["lrmoe/layer0/counts_E"]) == 2 * 2 * 2 * 8 * model.config.num_experts_per_tok
        assert histograms["lrmoe/kept_share_by_layer"] == pytest.approx([0.5] * len(handle.layers))


def test_the_callback_names_the_logs_it_has() -> None:
    with pytest.raises(
        ConfigError, match=r"log='layer' \(did you mean 'layers'\?\): must be one of totals, layers"
    ):
        lrmoe_hf.LRMoECallback(log="layer")


def test_the_callback_keeps_its_log_where_the_trainer_rebuilds_it() -> None:
    saved = lrmoe_hf.LRMoECallback(log="layers").state()
    assert lrmoe_hf.LRMoECallback.from_state(saved).log == "layers"


def test_the_callback_waits_for_the_end_of_a_long_step(tmp_path: Path) -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=1))
    options = {"max_steps": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 70}
    Trainer(
        model,
        arguments(tmp_path, **options),
        train_dataset=torch.utils.data.ConcatDataset([Tokens(64)] * 3),
        callbacks=[lrmoe_hf.LRMoECallback(handle)],
    ).train()  # warnings are errors
    assert handle.summary()["drop_reasons"] == {"warmup": 70, "always": 70}


def test_an_attached_optimizer_is_not_counted_twice(tmp_path: Path) -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    handle.attach(optimizer)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    Trainer(
        model,
        arguments(tmp_path, max_steps=3),
        train_dataset=Tokens(64),
        callbacks=[lrmoe_hf.LRMoECallback(handle)],
        optimizers=(optimizer, schedule),
    ).train()
    assert handle.clock.step == 3


@pytest.mark.parametrize("restore_callbacks", [False, True])
def test_resume_goes_on_with_clock_and_controllers(tmp_path: Path, restore_callbacks: bool) -> None:
    config = LRMoEConfig(max_drop=0.5, warmup_steps=3)

    def train(
        model: PreTrainedModel, folder: Path, steps: int, *, resume: bool = False
    ) -> tuple[lrmoe_hf.Handle, Trainer]:
        handle = lrmoe_hf.enable(model, config)
        options = {"save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "constant"}
        restore = {"restore_callback_states_from_checkpoint": restore_callbacks}
        trainer = Trainer(
            model,
            arguments(folder, max_steps=steps, **options, **restore),
            train_dataset=Tokens(64),
            callbacks=[lrmoe_hf.LRMoECallback(handle)],
        )
        trainer.train(resume_from_checkpoint=resume or None)
        return handle, trainer

    whole, unbroken = train(make_model("qwen3"), tmp_path / "whole", 6)
    train(make_model("qwen3"), tmp_path / "broken", 4)
    # The Trainer itself does not read fused experts back (transformers issue 48805): load them first.
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "broken" / "checkpoint-4", attn_implementation="eager", experts_implementation="eager"
    )
    resumed, trainer = train(model, tmp_path / "broken", 6, resume=True)
    assert resumed.clock.step == whole.clock.step == 6
    assert resumed.summary()["drop_reasons"] == {"always": 2 * 2 * len(resumed.layers)}
    for ours, theirs in zip(trainer.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_callback_finds_the_handle_and_says_when_there_is_none(tmp_path: Path) -> None:
    model = make_model("qwen3")
    trainer = Trainer(
        model,
        arguments(tmp_path, max_steps=1),
        train_dataset=Tokens(64),
        callbacks=[lrmoe_hf.LRMoECallback()],
    )
    with pytest.raises(ConfigError, match="call enable first"):
        trainer.train()
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0))
    trainer.train()
    assert handle.clock.step == 1


def test_evaluation_inside_training_leaves_the_controllers_alone(tmp_path: Path) -> None:
    model = make_model("qwen3")
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.5, warmup_steps=0))
    Trainer(
        model,
        arguments(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1),
        train_dataset=Tokens(64),
        eval_dataset=Tokens(64),
        callbacks=[lrmoe_hf.LRMoECallback(handle)],
    ).train()
    assert handle.summary()["calls"] == 2 * 2 * len(handle.layers)
