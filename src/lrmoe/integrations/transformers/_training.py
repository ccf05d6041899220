"""All that a training run under Transformers' Trainer is made of, as one checkpoint of `lrmoe.checkpoint`.

model/<name>[/expert/<id>]             weights, and persistent buffers
optim/<name>/<moment>[/expert/<id>]    the optimizer's tensors
state.json                             Trainer, optimizer, schedule, loss scale, controllers, random generators
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lrmoe.checkpoint import Checkpoint, Content, ExpertTensor, agreed, gathered
from lrmoe.checkpoint.hf.outline import model_fields
from lrmoe.checkpoint.layers import gather_layers, layers_of
from lrmoe.errors import CheckpointError, UnsupportedError
from lrmoe.integrations.transformers._experts import plain_name
from lrmoe.integrations.transformers._handle import Handle
from lrmoe.integrations.transformers._optimizer import (
    describe_optimizer,
    groups_then,
    inner_optimizer,
    moment_keys,
    moments,
    restore_optimizer,
)
from lrmoe.integrations.transformers._random import random_state, restore_random
from lrmoe.integrations.transformers._slots import Slot, slots_of

KIND = "transformers-trainer"
# state.json: name -> type
FIELDS: dict[str, type] = {
    "model": dict,
    "trainer": dict,
    "optimizer": dict,
    "schedule": dict,
    "scaler": dict,
    "layers_by_group": list,
    "random_by_rank": list,
}


def world() -> dist.ProcessGroup | None:
    """All ranks; None for a single process."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Running:
    """What the Trainer tells its callbacks of a run.

    Attributes:
        model: as the Trainer was given it.
        optimizer, schedule: as Accelerate wraps them.
        handle: of the enabled model.
    """

    model: nn.Module
    optimizer: Any
    schedule: Any
    handle: Handle

    def content(self, trainer_state: Any) -> Content:
        """What a checkpoint of the step that is done consists of; every rank calls it.

        Raises:
            UnsupportedError: the optimizer or the schedule holds what cannot be saved.
        """
        group = world()
        slots = agreed(group, lambda: slots_of(self.model, group))
        dense: dict[str, Tensor] = dict(buffers_of(self.model))
        experts: dict[str, ExpertTensor] = {}
        for key, slot, tensor in self._tensors(slots):
            part = slot.take(tensor.detach())
            if isinstance(part, Tensor):
                if group is None or dist.get_rank() == 0:  # who writes it; the others gave their part
                    dense[key] = part.cpu()
            elif part.values.shape[0]:
                experts[key] = ExpertTensor(values=part.values.cpu(), first=part.first)
        state = self._state(slots, trainer_state, group)
        return Content(dense=dense, experts=experts, state=state)

    def _tensors(self, slots: list[Slot]) -> Iterator[tuple[str, Slot, Tensor]]:
        yield from ((f"model/{slot.name}", slot, slot.parameter) for slot in slots)
        yield from moments(inner_optimizer(self.optimizer), slots)

    def _state(
        self, slots: list[Slot], trainer_state: Any, group: dist.ProcessGroup | None
    ) -> dict[str, Any]:
        optimizer = agreed(group, lambda: describe_optimizer(inner_optimizer(self.optimizer), slots))
        scaler = getattr(self.optimizer, "scaler", None)
        config: Any = getattr(self.model, "config", None)
        return {
            "kind": KIND,
            "model": model_fields(config) if config is not None else {},
            # As the trainer of `lrmoe train` says it: `lrmoe export` reads either.
            "config": {"train": {"dtype": _dtype_name(slots)}},
            "trainer": _trainer_fields(trainer_state),
            "optimizer": optimizer,
            "schedule": {} if self.schedule is None else dict(self.schedule.state_dict()),
            "scaler": {} if scaler is None else dict(scaler.state_dict()),
            "layers_by_group": _gather_controllers(self.handle, group),
            "random_by_rank": gathered(group, random_state),
        }


def _trainer_fields(trainer_state: Any) -> dict[str, Any]:
    """What the Trainer keeps in trainer_state.json, without the controllers, which stand beside it."""
    fields = dataclasses.asdict(trainer_state)
    for callback in fields["stateful_callbacks"].values():
        if isinstance(callback, dict) and "saved" in callback.get("attributes", {}):
            callback["attributes"]["saved"] = None
    return fields


def buffers_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Persistent buffers, which all ranks hold alike, by key."""
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                full = f"{module_name}.{name}" if module_name else name
                yield f"model/{plain_name(full)}", buffer


def _dtype_name(slots: list[Slot]) -> str:
    sizes: dict[str, int] = {}
    for slot in slots:
        name = str(slot.parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + slot.parameter.numel()
    return max(sizes, key=lambda name: sizes[name])


def _gather_controllers(handle: Handle, group: dist.ProcessGroup | None) -> list[Any]:
    """States of all ranks' controllers: one list by rank for each expert-parallel group, in order of first rank."""
    states = gather_layers(handle.group, handle.state_dict)
    found = gathered(group, lambda: states if handle.first_rank else None)
    return [one for one in found if one is not None]


def _own_controllers(handle: Handle, saved: list[Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """This rank's state: its own where there were as many expert-parallel groups of this size, else by the first's."""
    first = gathered(group, lambda: handle.first_rank)
    ranks = 1 if handle.group is None else handle.group.size()
    rank = 0 if handle.group is None else dist.get_rank(handle.group)
    lead = 0 if handle.group is None else dist.get_process_group_ranks(handle.group)[0]
    lead = dist.get_rank() if handle.group is None and group is not None else lead
    number = sum(first[:lead])
    same = len(saved) == sum(first) and len(saved[0]) == ranks
    return layers_of(saved[number if same else 0], rank, ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class Saved:
    """A checkpoint that a run goes on from, read in the order in which the Trainer asks for its parts."""

    checkpoint: Checkpoint

    @property
    def state(self) -> dict[str, Any]:
        """The JSON state."""
        return self.checkpoint.state

    def load_model(self, model: nn.Module) -> None:
        """Fill parameters and buffers; every rank calls it."""
        group = world()
        agreed(group, lambda: self._load_model(model, group))

    @torch.no_grad()
    def _load_model(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        with self.checkpoint.reader() as reader:
            for slot in slots_of(model, group):
                slot.fill(f"model/{slot.name}", slot.parameter, reader)
            for key, buffer in buffers_of(model):
                buffer.copy_(reader.dense(key))

    def load_optimizer(self, model: nn.Module, optimizer: Any, schedule: Any) -> None:
        """Fill the optimizer's state, and put the schedule where it was; every rank calls it."""
        group = world()
        agreed(group, lambda: self._load_optimizer(model, inner_optimizer(optimizer), schedule, group))

    @torch.no_grad()
    def _load_optimizer(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        group: dist.ProcessGroup | None,
    ) -> None:
        slots, described = slots_of(model, group), self.state["optimizer"]
        with self.checkpoint.reader() as reader:
            for key, slot, tensor in restore_optimizer(optimizer, described, slots):
                slot.fill(key, tensor, reader)
        if schedule is not None and self.state["schedule"]:
            names = {id(slot.parameter): slot.name for slot in slots}
            order = groups_then(optimizer, described["groups"], names)
            schedule.load_state_dict(_by_group(self.state["schedule"], order, len(described["groups"])))

    def load_scaler(self, scaler: Any) -> None:
        """Put the loss scale back, where there is one."""
        if scaler is not None and self.state["scaler"]:
            scaler.load_state_dict(self.state["scaler"])

    def load_controllers(self, handle: Handle) -> None:
        """Put clock and controllers back; every rank calls it."""
        own = _own_controllers(handle, self.state["layers_by_group"], world())
        agreed(world(), lambda: handle.load_state_dict(own))

    def load_random(self) -> None:
        """Put the generators back, where this rank was there when the checkpoint was saved."""
        saved, rank = self.state["random_by_rank"], 0 if world() is None else dist.get_rank()
        if rank < len(saved):
            restore_random(saved[rank])


def _by_group(state: Mapping[str, Any], order: list[int], groups: int) -> dict[str, Any]:
    """A schedule's state, its lists of one value per parameter group in the order of the groups there are now."""
    return {
        name: [value[i] for i in order] if isinstance(value, list) and len(value) == groups else value
        for name, value in state.items()
    }


def check_saved(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Look at a checkpoint before anything of a run changes.

    Raises:
        CheckpointError: it is of another kind or model, or lacks something.
    """
    state, where = checkpoint.state, checkpoint.folder / "state.json"
    if state.get("kind") != KIND:
        raise CheckpointError(f"{where}: is not of a run under Transformers' Trainer")
    for name, kind in FIELDS.items():
        if not isinstance(state.get(name), kind):
            raise CheckpointError(
                f"{where}: {name} is a {type(state.get(name)).__name__}: must be a {kind.__name__}"
            )
    slots = slots_of(model, world())
    known = checkpoint.manifest.file_of()
    wanted = {key for slot in slots for key in slot.all_keys(f"model/{slot.name}")}
    wanted |= {key for key, _ in buffers_of(model)}
    odd = sorted(wanted ^ {key for key in known if key.startswith("model/")})
    if odd:
        raise CheckpointError(
            f"{checkpoint.folder}: is of another model: {len(odd)} tensors are only on one side, first {odd[0]!r}"
        )
    missing = [key for key in moment_keys(state["optimizer"], slots) if key not in known]
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder}: holds no tensor {missing[0]!r} ({len(missing)} are missing)"
        )


def refuse_other_wrappers(trainer: Any) -> None:
    """Refuse Trainers whose model others wrap, and whose checkpoints are others' too.

    Raises:
        UnsupportedError: names what wraps it, and what to do.
    """
    for name, wraps in (("DeepSpeed", "is_deepspeed_enabled"), ("Accelerate's FSDP", "is_fsdp_enabled")):
        if getattr(trainer, wraps, False):
            raise UnsupportedError(
                f"{name} wraps this Trainer's model: use the Trainer's own checkpoints (save_strategy='steps') there"
            )
