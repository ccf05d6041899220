"""Models from transformers: by preset, configuration or local checkpoint, with this rank's experts only.

one device       experts.gate_up_proj (E, 2I, H)
EP over R ranks  experts.gate_up_proj (E/R, 2I, H) on each, home blocks in rank order; all else replicated
sharded          experts.gate_up_proj (E, P) on each: its part of every expert
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lrmoe.checkpoint.agree import rank_of, size_of
from lrmoe.checkpoint.hf.folder import (
    Source,
    is_own,
    newest_usable,
    own_fields,
    own_source,
    refuse_quantised,
    transformers_source,
)
from lrmoe.checkpoint.hf.names import FAMILIES, QWEN
from lrmoe.checkpoint.hf.outline import config_of
from lrmoe.checkpoint.hf.tensors import Chunk, Reader
from lrmoe.checkpoint.manifest import verify
from lrmoe.distributed.sharded import cut_experts
from lrmoe.errors import CheckpointError, ConfigError, LRMoEError, UnsupportedError, require_extra
from lrmoe.planning.shards import Cut
from lrmoe.training.config import ModelConfig
from lrmoe.training.presets import get_preset


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
    if field == "checkpoint":
        return _read_checkpoint_config(hf, Path(name))
    try:
        return hf.AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.{field}={name!r}: no transformers configuration there: {error}") from error


def _read_checkpoint_config(hf: Any, folder: Path) -> Any:
    try:
        if is_own(folder):
            found = newest_usable(folder)
            return config_of(own_fields(found), str(found))
        if not (folder / "config.json").is_file():
            raise ConfigError("no directory with a config.json, and no checkpoint of lrmoe train")
        refuse_quantised(folder)
        return hf.AutoConfig.from_pretrained(folder)
    except UnsupportedError:
        raise
    except (LRMoEError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.checkpoint={str(folder)!r}: {error}") from error


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
    """Build without memory, then read exactly the tensors and parts of experts that this rank holds."""
    model = meta_model(config, group, storage)
    spans = expert_spans(model)
    model.to_empty(device=device)
    for name, span in spans.items():
        model.get_parameter(name).lrmoe_expert = span  # to_empty made new parameters
    model.tie_weights()
    _fill_rotary(model)
    try:
        _fill(model, spans, _source(folder, config, group), rank_of(group))
    except CheckpointError as error:
        raise ConfigError(f"model.checkpoint={str(folder)!r}: {error}") from error
    return model


def meta_model(config: Any, group: dist.ProcessGroup | None, storage: str) -> Any:
    """The model of a transformers configuration, as this rank holds it, on the meta device."""
    hf = require_extra("transformers", "transformers")
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _shard(model, group, storage)
    return model


def _source(folder: Path, config: Any, group: dist.ProcessGroup | None) -> Source:
    """Its weights; the ranks verify a checkpoint of this package together, each its part of the files."""
    if is_own(folder):
        found = newest_usable(folder)
        verify(found, part=rank_of(group), parts=size_of(group))
        return own_source(found)
    return transformers_source(folder, FAMILIES.get(config.model_type, QWEN))


@torch.no_grad()
def _fill(model: nn.Module, spans: dict[str, tuple[int, int]], source: Source, rank: int) -> None:
    """Look everything up, then read it file by file."""
    cuts = expert_cuts(model)
    found: list[tuple[Tensor, Chunk]] = []
    for name, tensor in _persistent(model):
        if name in cuts:
            found += _shards(source, name, tensor, cuts[name], rank)
        elif name in spans:
            found += _experts(source, name, tensor, *spans[name])
        else:
            chunks = source.chunks(name, tuple(tensor.shape), None)
            found += [(tensor.detach().view(-1), chunk) for _, chunk in chunks]
    with Reader.opened() as reader:
        for target, chunk in sorted(found, key=lambda pair: (pair[1].stored.file, pair[1].stored.start)):
            reader.fill(target, chunk)


def _experts(
    source: Source, name: str, tensor: Tensor, first: int, experts: int
) -> Iterator[tuple[Tensor, Chunk]]:
    """Whole experts (E_local, rows, columns), the first of them `first`."""
    for number, whole in enumerate(tensor.detach()):
        for piece, chunk in source.chunks(name, tuple(whole.shape), first + number, experts):
            yield whole.view(-1)[piece.first : piece.first + piece.count], chunk


def _shards(source: Source, name: str, tensor: Tensor, cut: Cut, rank: int) -> Iterator[tuple[Tensor, Chunk]]:
    """This rank's elements of every expert, (E, P), padding zero."""
    held = cut.span(rank)
    tensor.detach()[:, held.stop - held.start :] = 0.0
    for expert, shard in enumerate(tensor.detach()):
        for piece, chunk in source.chunks(name, (cut.rows, cut.columns), expert, tensor.shape[0]):
            begin, end = max(piece.first, held.start), min(piece.first + piece.count, held.stop)
            if begin < end:
                first = chunk.first + begin - piece.first
                part = dataclasses.replace(chunk, first=first, count=end - begin)
                yield shard[begin - held.start : end - held.start], part


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
