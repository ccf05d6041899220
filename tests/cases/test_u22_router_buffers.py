"""U22: a router's selection bias, a buffer, survives everything in fp32; controllers' counters survive a checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from lrmoe.training.config import ModelConfig, TrainConfig
from lrmoe.training.loop import Trainer
from lrmoe.training.model import build_model
from tests.cases.common import poison_memory
from tests.distributed.pool import Pool
from tests.training.tiny import CPU, GLM_SHAPE, tiny_config

NAME = "model.layers.1.mlp.gate.e_score_correction_bias"
BIAS = torch.tensor([5 + 2.0**-20, 0.0, 0.0, 0.0])  # bf16 has no such number
MODEL: dict[str, Any] = {"preset": "glm4-moe-tiny", "overrides": GLM_SHAPE}


def config_of(folder: Path, dtype: str = "float32", storage: str = "owned", **model: Any) -> TrainConfig:
    return tiny_config(
        folder, model=model or MODEL, train={"dtype": dtype}, lrmoe={"storage": storage, "max_drop": 0.3}
    )


def bias_of(model: Any) -> Tensor:
    found = dict(model.named_buffers())[NAME]
    assert isinstance(found, Tensor)
    return found


def intact(model: Any) -> bool:
    """In full precision, a buffer, and in the state dict."""
    found = bias_of(model)
    return (
        found.dtype == torch.float32
        and torch.equal(found, BIAS)
        and torch.equal(model.state_dict()[NAME], BIAS)
    )


def with_bias(model: Any) -> Any:
    bias_of(model).copy_(BIAS)
    return model


def built(**model: Any) -> Any:
    return build_model(ModelConfig(**(model or MODEL)), seed=0, device=CPU)


def saved(folder: Path) -> str:
    with_bias(built()).save_pretrained(folder)
    return str(folder)


def test_it_begins_at_zero() -> None:
    poison_memory()
    for storage in ("owned", "sharded"):
        model = build_model(ModelConfig(**MODEL), seed=0, device=CPU, storage=storage)
        assert bias_of(model).tolist() == [0.0] * 4


def test_enabling_disabling_and_training_leave_it() -> None:
    model = with_bias(built())
    lrmoe_hf.register()
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.3, warmup_steps=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle.attach(optimizer)
    tokens = torch.arange(32).view(2, 16)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert intact(model)
    assert intact(copy.deepcopy(model))
    handle.disable()
    assert intact(model)


@pytest.mark.parametrize("storage", ["owned", "sharded"])
def test_weights_from_a_file_overwrite_what_the_meta_device_left(tmp_path: Path, storage: str) -> None:
    """The model is built without memory: what is not read from the file stays as uninitialised memory."""
    folder = saved(tmp_path)
    poison_memory()
    model = build_model(ModelConfig(checkpoint=folder), seed=0, device=CPU, storage=storage)
    assert intact(model)
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_in_either_dtype_keeps_and_saves_it(tmp_path: Path, dtype: str) -> None:
    trainer = Trainer(config_of(tmp_path, dtype))
    with_bias(trainer.model)
    for _ in range(2):
        assert trainer.step().records[0].counts_E[0] == 2 * 16, "every token chooses expert 0"
    assert intact(trainer.model)
    trainer.save()
    again = Trainer(config_of(tmp_path, dtype))
    assert bias_of(again.model).tolist() == [0.0] * 4
    again.resume()
    assert intact(again.model)
    assert again.handle.state_dict() == trainer.handle.state_dict()


def save_biased(config: TrainConfig) -> dict[str, Any]:
    trainer = Trainer(config, dist.group.WORLD)
    with_bias(trainer.model)
    trainer.step()
    trainer.save()
    return counters(trainer)


def resume_biased(config: TrainConfig, ranks: int) -> tuple[bool, dict[str, Any]]:
    trainer = Trainer(config, dist.group.WORLD if ranks > 1 else None)
    poison_memory()
    trainer.resume()
    found = intact(trainer.model), counters(trainer)
    trainer.step()
    return found[0] and intact(trainer.model), found[1]


def counters(trainer: Trainer) -> dict[str, Any]:
    """What every rank counts alike."""
    layers = trainer.handle.state_dict()["layers"]
    return {
        "step": trainer.handle.clock.step,
        **{
            name: [state[key] for key in ("step", "calls_in_step", "calls")] for name, state in layers.items()
        },
    }


@pytest.mark.distributed
@pytest.mark.parametrize("storage", ["owned", "sharded"])
def test_checkpoints_carry_it_to_other_ranks_and_storages(pool2: Pool, tmp_path: Path, storage: str) -> None:
    told = pool2.run(save_biased, config_of(tmp_path, storage=storage))[0]
    assert told["step"] == 1
    for other in ("owned", "sharded"):
        config = config_of(tmp_path, "bfloat16", other)
        assert resume_biased(config, 1) == (True, told)
        assert pool2.run(resume_biased, config, 2) == [(True, told)] * 2


def test_controllers_state_is_plain_json_and_begins_at_zero() -> None:
    model = built()
    lrmoe_hf.register()
    handle = lrmoe_hf.enable(model, LRMoEConfig(max_drop=0.3))
    state = handle.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert counters_of(state) == [0] * len(counters_of(state))
    assert not any("lrmoe" in name for name in model.state_dict()), (
        "transient in the model, kept by the handle"
    )


def counters_of(state: dict[str, Any]) -> list[int]:
    layers = state["layers"].values()
    return [state["step"], *(layer[key] for layer in layers for key in ("step", "calls_in_step", "calls"))]
