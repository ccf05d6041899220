"""Short runs with a checkpoint, and what a folder in the Transformers layout holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from tests.training.tiny import GLM_SHAPE, SHAPE, tiny_config

PRESETS = {"qwen": ("qwen3-moe-tiny", SHAPE), "glm": ("glm4-moe-tiny", GLM_SHAPE)}
INDEX = "model.safetensors.index.json"


def config_of(folder: Path, family: str, **train: Any) -> TrainConfig:
    """A run of the tiny model of a family in `folder`."""
    preset, shape = PRESETS[family]
    return tiny_config(folder, model={"preset": preset, "overrides": shape}, train=train)


def trained(config: TrainConfig, group: Any = None, steps: int = 1) -> Trainer:
    """A trainer after some steps, saved; selection biases are float32 numbers that bfloat16 cannot hold."""
    trainer = Trainer(config, group)
    generator = torch.Generator().manual_seed(3)
    for name, buffer in trainer.model.named_buffers():
        if "bias" in name:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    for _ in range(steps):
        trainer.step()
    trainer.save()
    return trainer


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Transformers folder, by name."""
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def same_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Check names, dtypes and bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def index_of(folder: Path) -> Any:
    return json.loads((folder / INDEX).read_text())


def logits(model: Any) -> Tensor:
    """Of twelve fixed tokens, in evaluation."""
    with torch.no_grad():
        output: Tensor = model.eval()(torch.arange(12).view(1, 12)).logits
    return output


def pretrained(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")


def copied(folder: Path, target: Path) -> Path:
    """The same folder with all tensors in one file."""
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors_in(folder), target / "model.safetensors")
    index = index_of(folder)
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model.safetensors")
    (target / INDEX).write_text(json.dumps(index))
    return target
