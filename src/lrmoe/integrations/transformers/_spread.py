"""How a model's parameters lie over the ranks, whatever spread them: DDP, FSDP2, expert parallelism, several at once.

kind                          this rank holds          the ranks of these groups hold disjoint parts
plain, DDP                    all of it                none
DTensor (FSDP2, EP, both)     its local tensor         those of the mesh dimensions that shard it
experts of `shard_experts`    its experts              the expert-parallel group
`ShardedExperts`              its part of each expert  the expert-parallel group
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lrmoe.integrations.transformers._binding import Binding
from lrmoe.integrations.transformers._experts import inner_experts


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread:
    """One parameter, once, under its first name.

    Attributes:
        name: in the model.
        parameter: as the model holds it.
        groups: in each of them the ranks hold disjoint parts of it, which make up the whole; of ranks that are in
            none together, all hold the same.
    """

    name: str
    parameter: nn.Parameter
    groups: tuple[ProcessGroup, ...]


def spreads_of(model: nn.Module) -> Iterator[Spread]:
    """All parameters of a model, in the same order on every rank, trained or not."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without backward leaves some modules with whole weights in their place
    cut = _cut_by_hand(model)
    for name, parameter in model.named_parameters():
        groups = _mesh_groups(parameter) if isinstance(parameter, DTensor) else cut.get(id(parameter), ())
        yield Spread(name=name, parameter=parameter, groups=groups)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def _mesh_groups(parameter: DTensor) -> tuple[ProcessGroup, ...]:
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )


def _cut_by_hand(model: nn.Module) -> dict[int, tuple[ProcessGroup, ...]]:
    """Identities of plain parameters of experts that are spread over a group, and of adapters around such experts."""
    found: dict[int, tuple[ProcessGroup, ...]] = {}
    for module in model.modules():
        experts = inner_experts(module)
        binding: Binding | None = getattr(experts, "_lrmoe", None)
        if experts is None or binding is None or binding.group is None or binding.group.size() == 1:
            continue
        if any(isinstance(parameter, DTensor) for parameter in experts.parameters()):
            continue  # an adapter beside them is as wide as all experts, and the same on every rank
        found.update((id(parameter), (binding.group,)) for parameter in module.parameters())
    return found
