"""An optimizer's state by parameter name: tensors of a parameter's shape beside the weights, the rest as JSON.

{
    "class": "AdamW",
    "groups": [{"parameters": [names], "options": {"lr": 0.001, ...}}, ...],
    "state": {name: {"step": {"scalar": 3.0, "dtype": "float32"}, "exp_avg": {"dtype": "float32"}}, ...}
}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lrmoe.errors import CheckpointError, UnsupportedError
from lrmoe.integrations.transformers._slots import Slot


def moment_key(name: str, moment: str) -> str:
    """The key of a tensor of the optimizer's state."""
    return f"optim/{name}/{moment}"


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, where Accelerate wraps it."""
    while not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__module__.startswith(
        "accelerate"
    ):
        optimizer = optimizer.optimizer
    return optimizer


def moments(optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> Iterator[tuple[str, Slot, Tensor]]:
    """(key, slot, tensor) of all state that has the shape of its parameter."""
    for slot in slots:
        for name, value in optimizer.state.get(slot.parameter, {}).items():
            if _is_moment(value, slot):
                yield moment_key(slot.name, name), slot, value


def _is_moment(value: object, slot: Slot) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == slot.parameter.shape


def describe_optimizer(optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> dict[str, Any]:
    """The state as JSON, tensors by their dtype alone.

    Raises:
        UnsupportedError: it holds something that is neither of its parameter's shape nor a number; names it.
    """
    names = {id(slot.parameter): slot.name for slot in slots}
    groups = []
    for group in optimizer.param_groups:
        known = [names.get(id(parameter)) for parameter in group["params"]]
        if None in known:
            raise UnsupportedError(
                f"optimizer: {known.count(None)} of its parameters are none of the model's"
            )
        options = {name: _plain(f"optimizer, {name}", v) for name, v in group.items() if name != "params"}
        groups.append({"parameters": known, "options": options})
    state = {
        slot.name: {name: _described(slot, name, v) for name, v in optimizer.state[slot.parameter].items()}
        for slot in slots
        if slot.parameter in optimizer.state
    }
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}


def _described(slot: Slot, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return {"number": _plain(f"optimizer state {name} of {slot.name}", value)}
    dtype = str(value.dtype).removeprefix("torch.")
    if value.dim() == 0:
        return {"scalar": value.item(), "dtype": dtype}
    if _is_moment(value, slot):
        return {"dtype": dtype}
    raise UnsupportedError(
        f"optimizer state {name} of {slot.name} has shape {tuple(value.shape)}: only tensors of the parameter's shape "
        f"{tuple(slot.parameter.shape)} and numbers are saved (AdamW, SGD and their like)"
    )


def _plain(what: str, value: Any) -> Any:
    value = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
    try:
        json.dumps(value, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{what}: a {type(value).__name__} cannot be saved; valid are numbers and text"
        ) from error
    return value


def moment_keys(described: Mapping[str, Any], slots: Sequence[Slot]) -> Iterator[str]:
    """The keys of all tensors of parameters that the model has."""
    for slot in slots:
        for name, value in described["state"].get(slot.name, {}).items():
            if _is_like(value):
                yield from slot.all_keys(moment_key(slot.name, name))


def _is_like(value: Mapping[str, Any]) -> bool:
    return "dtype" in value and "scalar" not in value


def restore_optimizer(
    optimizer: torch.optim.Optimizer, described: Mapping[str, Any], slots: Sequence[Slot]
) -> Iterator[tuple[str, Slot, Tensor]]:
    """Put options and numbers back, and yield (key, slot, tensor) of the tensors to fill.

    Raises:
        CheckpointError: it is of an optimizer of another class, or of other parameters.
    """
    present = type(optimizer).__name__
    if described.get("class", present) != present:
        raise CheckpointError(
            f"optimizer: the checkpoint is of {described['class']}, this run's is {present}: go on with the same, or "
            "start another run from exported weights"
        )
    by_name = {slot.name: slot for slot in slots}
    _restore_options(optimizer, described["groups"], {id(slot.parameter): slot.name for slot in slots})
    optimizer.state.clear()
    on_device = {
        id(p)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for p in group["params"]
    }
    for name, values in described["state"].items():
        slot = by_name[name]
        state = optimizer.state[slot.parameter]
        for moment, value in values.items():
            if "number" in value:
                state[moment] = value["number"]
                continue
            dtype = getattr(torch, value["dtype"])
            if _is_like(value):
                state[moment] = torch.zeros_like(slot.parameter.detach(), dtype=dtype)
                yield moment_key(name, moment), slot, state[moment]
            else:
                device = slot.parameter.device if id(slot.parameter) in on_device else "cpu"
                state[moment] = torch.tensor(value["scalar"], dtype=dtype, device=device)


def groups_then(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]
) -> list[int]:
    """For each group of the optimizer the index of a saved one that its parameters were in.

    Layouts have groups of their own: one for each device mesh. So they may have been in several of the same options.

    Raises:
        CheckpointError: a parameter was in none, or those of one group were in several of different options.
    """
    where = {name: i for i, group in enumerate(groups) for name in group["parameters"]}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        own = [where.get(names.get(id(parameter), ""), -1) for parameter in group["params"]]
        first = min(own, default=-1)
        if first < 0 or any(groups[index]["options"] != groups[first]["options"] for index in own):
            raise CheckpointError(
                f"optimizer: the parameters of its group {number} were not trained, or not with the same options, "
                "when the checkpoint was saved"
            )
        found.append(first)
    return found


def _restore_options(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]
) -> None:
    saved = groups_then(optimizer, groups, names)
    for group, index in zip(optimizer.param_groups, saved, strict=True):
        for option, value in groups[index]["options"].items():
            present = group.get(option)
            if isinstance(present, Tensor):
                present.fill_(value)
            else:
                group[option] = tuple(value) if isinstance(present, tuple) else value
