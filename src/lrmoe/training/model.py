"""Models from transformers: by preset, configuration or local checkpoint, with this rank's experts only.

one device       experts.gate_up_proj (E, 2I, H)
EP over R ranks  experts.gate_up_proj (E/R, 2I, H) on each, home blocks in rank order; all else replicated
sharded          experts.gate_up_proj (E, P) on each: its part of every expert
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lrmoe.checkpoint.agree import rank_of, size_of
from lrmoe.distributed.sharded import cut_experts
from lrmoe.errors import ConfigError, require_extra
from lrmoe.planning.shards import Cut
from lrmoe.training.config import ModelConfig
from lrmoe.training.presets import get_preset

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def build_model(
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    storage: str = "owned",
) -> nn.Module:
    """A causal language model in float32, in train mode, holding this rank's experts or its part of all of them.

    New weights are drawn from `seed`, the same on every rank, at every number of ranks and in every `storage`.

    Raises:
        ConfigError: the configuration or the weights cannot be read, or do not fit together; names the path.
    """
    hf = require_extra("transformers", "transformers")
    model_config = read_config(config)
    _check_ranks(model_config, size_of(group))
    if config.checkpoint is not None:
        return _load(Path(config.checkpoint), model_config, device, group, storage).train()
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    _shard(model, group, storage)
    return model.to(device).train()


def _check_ranks(config: Any, ranks: int) -> None:
    experts = getattr(config, "num_local_experts", None)
    if experts and experts % ranks:
        valid = [str(n) for n in range(1, experts + 1) if experts % n == 0]
        raise ConfigError(
            f"--ep {ranks}: {experts} experts cannot be spread evenly over {ranks} ranks; valid: {', '.join(valid)}"
        )


def read_config(config: ModelConfig) -> Any:
    """The transformers configuration, overrides applied.

    Raises:
        ConfigError: it cannot be read, an override is unknown, or its values contradict each other.
    """
    hf = require_extra("transformers", "transformers")
    if config.preset is not None:
        preset = get_preset(config.preset)
        fields = {**preset.fields, **config.overrides}
        found = hf.AutoConfig.for_model(preset.model_type)
        # Some fields are read by the model and not declared by its configuration, as head_dim.
        known = set(preset.fields)
    else:
        fields = dict(config.overrides)
        found = _read_config_file(hf, config)
        known = set()
    unknown = [name for name in config.overrides if name not in known and not hasattr(found, name)]
    if unknown:
        raise ConfigError(f"model.overrides.{unknown[0]}: no such field of {type(found).__name__}")
    try:
        stored = type(found).attribute_map  # num_experts is an alias, to_dict gives num_local_experts
        values = {**found.to_dict(), **{stored.get(name, name): value for name, value in fields.items()}}
        for name in ("transformers_version", "_name_or_path"):
            values.pop(name, None)
        return type(found).from_dict(values)
    except Exception as error:  # the validators of huggingface_hub raise classes of their own
        raise ConfigError(f"model.overrides: {type(found).__name__} refuses them: {error}") from error


def _read_config_file(hf: Any, config: ModelConfig) -> Any:
    field = "config" if config.config is not None else "checkpoint"
    name = getattr(config, field)
    if field == "checkpoint" and not (Path(name) / "config.json").is_file():
        raise ConfigError(f"model.checkpoint={name!r}: no directory with a config.json")
    try:
        return hf.AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.{field}={name!r}: no transformers configuration there: {error}") from error


def _shard(model: nn.Module, group: dist.ProcessGroup | None, storage: str) -> None:
    from lrmoe.integrations import transformers as lrmoe_hf

    if storage == "sharded":
        lrmoe_hf.install_sharded_experts(model, group)
    elif group is not None:
        lrmoe_hf.shard_experts(model, group)


def expert_spans(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Name of every experts parameter -> (first global expert id on this rank, number of experts of all ranks)."""
    from lrmoe.integrations import transformers as lrmoe_hf

    experts = {id(parameter) for parameter in lrmoe_hf.expert_parameters(model)}
    return {
        name: getattr(parameter, "lrmoe_expert", (0, parameter.shape[0]))
        for name, parameter in model.named_parameters()
        if id(parameter) in experts
    }


def expert_cuts(model: nn.Module) -> dict[str, Cut]:
    """Name of every experts parameter that is a shard -> how it is cut."""
    from lrmoe.integrations import transformers as lrmoe_hf

    return lrmoe_hf.sharded_parameters(model)


def _load(
    folder: Path, config: Any, device: torch.device, group: dist.ProcessGroup | None, storage: str
) -> nn.Module:
    """Build without memory, then read exactly the tensors and slices this rank holds."""
    hf = require_extra("transformers", "transformers")
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _shard(model, group, storage)
    spans = expert_spans(model)
    model.to_empty(device=device)
    for name, span in spans.items():
        model.get_parameter(name).lrmoe_expert = span  # to_empty made new parameters
    model.tie_weights()
    _fill_rotary(model)
    cuts, rank = expert_cuts(model), rank_of(group)
    with _Shards.opened(folder) as shards, torch.no_grad():
        for name, tensor in _persistent(model):
            if name in cuts:
                fill_shards(tensor, cuts[name], rank, partial(_read_one, shards, name, cuts[name]))
            else:
                tensor.copy_(shards.read(name, tensor.shape, spans.get(name)))
    return model


def _read_one(shards: _Shards, name: str, cut: Cut, expert: int) -> Tensor:
    return shards.read(name, torch.Size((1, cut.rows, cut.columns)), (expert, 1))


def fill_shards(shards: Tensor, cut: Cut, rank: int, read: Callable[[int], Tensor]) -> None:
    """Write shards (E, P) from whole experts, read (1, rows, columns) by id, one at a time."""
    for expert in range(shards.shape[0]):
        shards[expert] = cut_experts(read(expert), cut, rank)[0]


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, tied ones once."""
    yield from model.named_parameters()
    saved = set(model.state_dict())
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _fill_rotary(model: Any) -> None:
    """Compute the buffers that no checkpoint holds; transformers does it in the initialisation of their modules."""
    for module in model.modules():
        if any(name in module._non_persistent_buffers_set for name, _ in module.named_buffers(recurse=False)):
            model._init_weights(module)


class _Shards:
    """The safetensors files of a transformers checkpoint."""

    def __init__(self, folder: Path, file_of: dict[str, str], stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._file_of = file_of
        self._stack = stack
        self._open: dict[str, Any] = {}

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Path) -> Iterator[_Shards]:
        with contextlib.ExitStack() as stack:
            try:
                yield cls(folder, _file_of(folder), stack)
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(f"model.checkpoint={str(folder)!r}: cannot be read: {error}") from error

    def read(self, name: str, shape: torch.Size, span: tuple[int, int] | None) -> Tensor:
        """The tensor `name` of the model; for an experts parameter rows span[0] .. span[0] + shape[0] - 1 of it.

        transformers 5 writes experts one by one (experts.7.gate_proj.weight); the fused three-dimensional names of its
        modules are read as well.
        """
        first = 0 if span is None else span[0]
        if name in self._file_of:
            part = self._slice(name)
            values = part[first : first + shape[0]] if span is not None else part[:] if shape else part
        else:
            values = self._stacked(name, range(first, first + shape[0]))
        if values.shape != shape:
            raise ConfigError(
                f"model.checkpoint={str(self._folder)!r}: {name} has shape {tuple(values.shape)}, the configuration "
                f"asks for {tuple(shape)}"
            )
        return values

    def _stacked(self, name: str, experts: range) -> Tensor:
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith("experts"):
            raise ConfigError(f"model.checkpoint={str(self._folder)!r}: holds no tensor {name!r}")
        parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        rows = [torch.cat([self._whole(f"{stem}.{e}.{part}.weight") for part in parts]) for e in experts]
        return torch.stack(rows)

    def _whole(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise ConfigError(f"model.checkpoint={str(self._folder)!r}: holds no tensor {name!r}")
        return self._slice(name)[:]

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._open[file].get_slice(name)


def _file_of(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    if (folder / INDEX).is_file():
        return dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / SINGLE).is_file():
        raise ConfigError(f"model.checkpoint={str(folder)!r}: neither {SINGLE} nor {INDEX} there")
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)
