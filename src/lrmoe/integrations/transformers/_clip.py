"""One norm for the whole gradient, and the same factor on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lrmoe.errors import ConfigError, UnsupportedError
from lrmoe.integrations.transformers._handle import Handle
from lrmoe.integrations.transformers._spread import Spread, local_part, spreads_of


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module | Handle, max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients of a model so that the norm of the whole gradient is at most `max_norm`.

    What `torch.nn.utils.clip_grad_norm_` does, for any layout: every logical parameter counts once, wherever its parts
    lie, and every rank scales by the same factor. Every rank calls it, after the gradients are reduced over data
    parallelism, and with a GradScaler after `agree_on_overflow`. It reads nothing back to the host.

    Args:
        model: whole, sharded or wrapped; or the handle of one that is enabled.
        max_norm: at least 0; `float("inf")` measures only.
        error_if_nonfinite: raise, on every rank, where the norm is not finite.

    Returns:
        The norm before clipping, 0-dim, fp32 (fp64 where a gradient is), the same on all ranks.

    Raises:
        ConfigError: `max_norm` is negative or no number.
        UnsupportedError: a gradient lies otherwise over the ranks than its parameter, say not reduced yet.
        RuntimeError: the norm is not finite, where asked for.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise ConfigError(f"max_norm={max_norm!r}: must be a number of at least 0")
    spreads = list(spreads_of(model.model if isinstance(model, Handle) else model))
    grads = [grad for spread in spreads for grad in _gradient(spread)]
    norm = _total_squares(spreads).sqrt()
    if not any(grad.dtype == torch.float64 for grad in grads):
        norm = norm.float()
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the gradient's norm is {norm.item()}: not finite, so nothing was clipped")
    if max_norm != float("inf"):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for (device, _), part in _by_kind(grads).items():
            torch._foreach_mul_(
                part, factor.to(device=device, dtype=torch.promote_types(factor.dtype, part[0].dtype))
            )
    return norm


def _gradient(spread: Spread) -> list[Tensor]:
    """This rank's part of a gradient, in a list that is empty where there is none.

    Raises:
        UnsupportedError: it lies otherwise over the ranks than its parameter.
    """
    parameter, grad = spread.parameter, spread.parameter.grad
    if grad is None:
        return []
    placed = [tuple(t.placements) if isinstance(t, DTensor) else () for t in (grad, parameter)]
    if placed[0] != placed[1]:
        raise UnsupportedError(
            f"{spread.name}: its gradient is placed {placed[0] or 'whole on every rank'}, the parameter "
            f"{placed[1] or 'whole on every rank'}: reduce the gradients first"
        )
    return [local_part(grad)]


def _total_squares(spreads: Sequence[Spread]) -> Tensor:
    """The sum of squares of the whole gradient, 0-dim fp64: a small all-reduce per group of ranks that shares parts.

    Groups come from the parameters and not from the gradients, of which a rank may lack some.
    """
    own: dict[tuple[ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    device: dict[tuple[ProcessGroup, ...], torch.device] = {}
    for spread in spreads:
        if spread.parameter.requires_grad:
            own[spread.groups].extend(_gradient(spread))
            device.setdefault(spread.groups, _device(spread))
    home = next(iter(device.values()), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=home)
    for groups, grads in own.items():
        squares = _squares(grads, device[groups])
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares.to(home)
    return total


def _device(spread: Spread) -> torch.device:
    """Where the ranks talk about this parameter: its mesh's device, also while it is offloaded."""
    parameter = spread.parameter
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != parameter.device.type:
        return torch.device(parameter.device_mesh.device_type)
    return parameter.device


def _squares(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    norms = [
        norm.to(device)
        for (_, dtype), part in _by_kind(grads).items()
        for norm in torch._foreach_norm(part, 2, dtype=torch.promote_types(dtype, torch.float32))
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _by_kind(grads: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        found[grad.device, grad.dtype].append(grad)
    return found
