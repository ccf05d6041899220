"""Loss scaling over several ranks: an overflow on one of them is an overflow on all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed import ProcessGroup

from lrmoe.distributed.peers import waiting
from lrmoe.errors import ConfigError
from lrmoe.integrations.transformers._handle import Handle
from lrmoe.integrations.transformers._spread import local_part


@torch.no_grad()
def agree_on_overflow(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    handle: Handle | None = None,
    *,
    group: ProcessGroup | None = None,
) -> bool:
    """Unscale the gradients and let `scaler.step(optimizer)` skip on every rank where one has an inf or NaN.

    By itself a GradScaler looks at the gradients of its own rank, or at those of one device mesh: under expert
    parallelism a rank would step while another skips, and their scales would drift apart. Every rank calls it, once per
    optimizer step, after backward and before clipping:

        scaler.scale(loss).backward()
        lrmoe_hf.agree_on_overflow(scaler, optimizer, handle)
        lrmoe_hf.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()

    Args:
        scaler: any of torch's; nothing happens where it is not enabled.
        optimizer: the one whose `step` the scaler calls; gradients may be plain tensors, DTensors of any meshes, or
            both. They may be unscaled by `scaler.unscale_` already.
        handle: counts the skipped step (`handle.steps_skipped`, also in `summary()`). An attached handle's clock goes
            on, as the training step is over; else call `handle.step()` as after any other step.
        group: the ranks that train together; default all.

    Returns:
        Whether the step will be skipped, the same on all ranks of the group.

    Raises:
        ConfigError: the scaler has scaled no loss yet, or has stepped this optimizer already.
        RankError: another rank was lost, or did not come in time.
    """
    if not scaler.is_enabled():
        return False
    flags = _flags(scaler, optimizer)
    # Where the scale is, and with it the ranks' communication: gradients may be offloaded.
    home = scaler._scale.device if scaler._scale is not None else flags[0].device
    found = torch.stack([flag.to(home) for flag in flags]).amax()
    if dist.is_available() and dist.is_initialized():
        with waiting("agreeing on an overflow"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    for flag in flags:
        flag.copy_(found)
    skipped = bool(found.item())
    if skipped and handle is not None:
        # A fused optimizer is called all the same, and skips by itself.
        handle.skip(counted=getattr(optimizer, "_step_supports_amp_scaling", False))
    return skipped


def _flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What the scaler found on this rank, 0-dim fp32 a device, not zero where a gradient is not finite.

    They are the scaler's own: what is written to them decides its step and its next scale.
    """
    states: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    if scaler._scale is None:
        raise ConfigError("scaler: it has scaled no loss yet; call scaler.scale(loss).backward() first")
    if states[id(optimizer)]["stage"] is OptState.STEPPED:
        raise ConfigError(
            "scaler: it has stepped this optimizer already; call agree_on_overflow before scaler.step"
        )
    if states[id(optimizer)]["stage"] is OptState.READY:
        local = _local_view(optimizer)
        scaler.unscale_(local)  # type: ignore[arg-type]  # reads the parameters' gradients and nothing else
        states[id(optimizer)] = states.pop(id(local))
    found: dict[torch.device, Tensor] = states[id(optimizer)]["found_inf_per_device"]
    if not found:  # no gradients on this rank: its peers may have some
        found[scaler._scale.device] = torch.zeros_like(scaler._scale)
    return list(found.values())


def _local_view(optimizer: torch.optim.Optimizer) -> SimpleNamespace:
    """What a scaler reads of an optimizer, with this rank's parts for DTensors: it takes no two kinds together."""
    parameters = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                part = local_part(parameter.detach())
                part.grad = local_part(parameter.grad)
                parameters.append(part)
    return SimpleNamespace(param_groups=[{"params": parameters}])
