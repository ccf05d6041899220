"""Cutting a whole model's experts over a group, for trainers that build the model themselves.

group rank      0          1          2          3
experts      E0..E1     E2..E3     E4..E5     E6..E7      gate_up_proj (E_local, 2I, H)

Shapes: E experts of all ranks, E_local of this one, H hidden, I expert width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lrmoe.errors import ConfigError
from lrmoe.integrations.transformers._binding import Binding, dispatch_here, make_binding
from lrmoe.integrations.transformers._enable import register
from lrmoe.integrations.transformers._experts import (
    PROJECTIONS,
    find_experts,
    inner_experts,
    read_spec,
    refuse_adapters,
)


def shard_experts(model: nn.Module, group: ProcessGroup) -> None:
    """Keep this rank's contiguous block of every experts module's parameters; the forward becomes expert-parallel.

    Each kept parameter is marked `param.lrmoe_expert = (first global id, number of experts of all ranks)`; what modules
    share they go on sharing. The forward is exact until `enable`. Call it before making the optimizer or wrapping the
    model, on every rank.

    Raises:
        UnsupportedError: an experts module that lrmoe does not execute, or that an adapter is around. Nothing has been
            changed then.
        ConfigError: the number of experts is not a multiple of the group's size.
    """
    modules = find_experts(model)
    refuse_adapters(model, spread=True)
    ranks, rank = group.size(), dist.get_rank(group)
    for name, module in modules.items():
        experts = make_binding(module, name).spec.local_experts
        if experts % ranks:
            raise ConfigError(f"{name}: {experts} experts cannot be spread evenly over {ranks} ranks")
    register()
    part_of: dict[nn.Parameter, nn.Parameter | None] = dict.fromkeys(_tied(modules.values()))
    for name, module in modules.items():
        _cut(module, name, rank, group, part_of)


def _tied(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Projections that several modules share."""
    uses = Counter(getattr(module, projection) for module in modules for projection in PROJECTIONS)
    return [parameter for parameter, count in uses.items() if count > 1]


def _cut(
    module: nn.Module,
    name: str,
    rank: int,
    group: ProcessGroup,
    part_of: dict[nn.Parameter, nn.Parameter | None],
) -> None:
    """Cut one module; `part_of` has the shared projections, and the kept part of those that were cut before."""
    total = int(module.num_experts)  # type: ignore[arg-type]  # a module holds tensors and modules only, to mypy
    local = total // group.size()
    first = rank * local
    for projection in PROJECTIONS:
        whole: nn.Parameter = getattr(module, projection)
        part = part_of.get(whole)
        if part is None:
            values = whole.detach()[first : first + local].clone()
            part = nn.Parameter(values, requires_grad=whole.requires_grad)
            part.lrmoe_expert = (first, total)  # type: ignore[attr-defined]  # a mark of this package
        if whole in part_of:
            part_of[whole] = part
        setattr(module, projection, part)
    module.num_experts = local  # type: ignore[assignment]  # a module holds tensors and modules only, to mypy
    module._is_expert_parallel = True  # type: ignore[assignment]  # a module holds tensors and modules only, to mypy
    module._lrmoe = Binding(read_spec(module, name), group)  # type: ignore[assignment]  # a module holds tensors and modules only, to mypy
    dispatch_here(module)


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of experts modules and of adapters around them, each once.

    Under expert parallelism every rank holds others.
    """
    seen: set[int] = set()
    for module in model.modules():
        if inner_experts(module) is not None:
            for parameter in module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


def dense_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """All other parameters, each once: routers, shared experts, attention, embeddings. Every rank holds the same."""
    experts = {id(parameter) for parameter in expert_parameters(model)}
    return (parameter for parameter in model.parameters() if id(parameter) not in experts)
