"""What a capacity question is about: the model by name or file, sizes people type, and memory that is not MoE."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError, PlanError, require_extra
from lrmoe.planning.model_config import SIZE_NAMES, MissingSizeError, shape_from_config
from lrmoe.planning.model_memory import OPTIMIZERS, Training
from lrmoe.planning.shapes import Attention, ModelShape, get_shape
from lrmoe.training.presets import PRESETS

LOSS_TOKENS = 4096  # tokens whose logits are alive together


def find_model(name: str) -> ModelShape:
    """The sizes of a model.

    Args:
        name: a published name (shapes.SHAPES), a preset of `lrmoe train`, or the path of a transformers config.json
            or of the folder that holds one. A file that leaves out what its class has defaults for is completed by
            transformers, where that is installed.

    Raises:
        ConfigError: no such model or file, or a configuration without experts.
        MissingExtraError: the file has to be completed and transformers is not installed.
    """
    try:
        if name in PRESETS:
            preset = PRESETS[name]
            return shape_from_config(_complete({"model_type": preset.model_type, **preset.fields}), name)
        path = Path(name)
        if path.suffix == ".json" or path.exists():
            return _from_file(path)
        return get_shape(name)
    except PlanError as error:
        raise ConfigError(str(error)) from error


def _from_file(path: Path) -> ModelShape:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model={str(file)!r}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"model={str(file)!r}: not JSON ({error})") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"model={str(file)!r}: must hold one JSON object, a transformers configuration")
    named = file.parent.name if file.name == "config.json" else file.stem
    name = str(config.get("_name_or_path") or "") or named
    try:
        shape = shape_from_config(config, name)
    except MissingSizeError:
        if "model_type" not in config:
            raise
        full = _complete(config)
        return dataclasses.replace(shape_from_config(full, name), defaults=_filled(config, full))
    return dataclasses.replace(shape, defaults=_taken(config, shape))


def _filled(config: Mapping[str, Any], full: Mapping[str, Any]) -> tuple[str, ...]:
    """What the class filled in, of the sizes that are read."""
    given, made = _text(config), _text(full)
    return tuple(
        f"{name}={made[name]}" for name in SIZE_NAMES if isinstance(made.get(name), int) and name not in given
    )


def _taken(config: Mapping[str, Any], shape: ModelShape) -> tuple[str, ...]:
    """What is taken for granted where a file names every size that it must."""
    taken: dict[str, object] = {"tie_word_embeddings": False}
    if isinstance(shape.attention, Attention):
        taken |= {"num_key_value_heads": shape.attention.kv_heads, "head_dim": shape.attention.head_dim}
    return tuple(f"{name}={value}" for name, value in taken.items() if _text(config).get(name) is None)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with its class's defaults filled in."""
    transformers = require_extra("transformers", "transformers")
    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        full: Mapping[str, Any] = transformers.AutoConfig.for_model(config["model_type"], **fields).to_dict()
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"model: transformers refuses the configuration: {str(error).splitlines()[0]}"
        ) from error
    return full


def reserved_estimate(
    model: ModelShape, *, tokens: int, gpus: int, training: Training, element_bytes: int = 2
) -> dict[str, int]:
    """Bytes per rank of all that is not routed experts: an estimate, by part.

    Everything but the experts is taken to be fully sharded over all GPUs (FSDP), with one layer gathered at a time;
    activations as a fused attention keeps them, or with checkpointing the layers' inputs and one layer in full;
    logits for at most LOSS_TOKENS tokens at a time.

    Args:
        tokens: of a rank's micro-batch. gpus: all of the job. training: gradient size, optimizer, checkpointing.
    """
    share = -(-model.other_params // gpus)
    layer = model.attention.params(model.hidden) + 3 * model.hidden * max(
        model.shared_width, model.dense_width
    )
    kept = model.token_elements
    if training.checkpointing:
        kept = model.layers * model.hidden + -(-model.token_elements // model.layers)
    return {
        "weights": share * element_bytes,
        "grads": share * training.gradient_bytes,
        "optimizer": share * OPTIMIZERS[training.optimizer],
        "gathered layer": 2 * max(layer, model.vocab * model.hidden) * element_bytes,
        "activations": tokens * kept * element_bytes,
        "logits": min(tokens, LOSS_TOKENS) * model.vocab * (4 + element_bytes),
    }
