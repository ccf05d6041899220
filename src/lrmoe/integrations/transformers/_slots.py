"""A spread model's parameters as checkpoints hold them: whole where they are dense, row by row where they are experts.

fsdp_size=4, ep_size=2, 8 experts   rank 0      rank 1      rank 2      rank 3
this rank holds                     E0, E1      E4, E5      E2, E3      E6, E7
this rank writes                    the same
under DDP it holds                  E0..E7      E0..E7      E0..E7      E0..E7
and writes                          E0, E1      E2, E3      E4, E5      E6, E7

Shapes: E experts of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lrmoe.checkpoint import ExpertTensor
from lrmoe.checkpoint.agree import rank_of, size_of
from lrmoe.checkpoint.load import TensorReader
from lrmoe.checkpoint.save import expert_key
from lrmoe.errors import CheckpointError, UnsupportedError
from lrmoe.integrations.transformers._experts import PROJECTIONS, is_experts, plain_name
from lrmoe.integrations.transformers._sharded import ShardedExperts
from lrmoe.integrations.transformers._spread import Spread, local_part, spreads_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """One parameter, and which part of it, or of any tensor of its shape, this rank writes and reads.

    Attributes:
        name: in the model itself, whatever wraps it.
        parameter: as the model holds it.
        experts: E, where each row is an expert's; 0 for a dense parameter.
        held: global id of the first expert that this rank holds.
        rows: those of the held ones that this rank writes.
    """

    name: str
    parameter: nn.Parameter
    experts: int = 0
    held: int = 0
    rows: range = range(0)

    def take(self, tensor: Tensor) -> Tensor | ExpertTensor:
        """What this rank gives to a checkpoint. A sharded dense tensor is gathered: every rank calls it."""
        if self.experts:
            begin, end = self.rows.start, self.rows.stop
            return ExpertTensor(values=local_part(tensor)[begin:end], first=self.held + begin)
        whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole

    def all_keys(self, key: str) -> list[str]:
        """The keys under which a checkpoint has a tensor of this parameter's shape."""
        return [expert_key(key, expert) for expert in range(self.experts)] if self.experts else [key]

    def fill(self, key: str, tensor: Tensor, reader: TensorReader) -> None:
        """Read this rank's part of a tensor of this parameter's shape.

        Raises:
            CheckpointError: it is not there, or of another shape.
        """
        target = local_part(tensor)
        if self.experts:
            if target.shape[0]:
                target.copy_(_checked(key, reader.experts(key, self.held, target.shape[0]), target.shape))
            return
        whole = _checked(key, reader.dense(key), tensor.shape)
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            whole = whole.to(mesh.device_type)
            whole = local_part(distribute_tensor(whole, mesh, tensor.placements, src_data_rank=None))
        target.copy_(whole)


def _checked(key: str, values: Tensor, shape: torch.Size) -> Tensor:
    if values.shape != shape:
        raise CheckpointError(f"{key}: has shape {tuple(values.shape)}, the model's is {tuple(shape)}")
    return values


def slots_of(model: nn.Module, group: dist.ProcessGroup | None) -> list[Slot]:
    """All parameters of a model, each once, in the same order on every rank of the group that saves it.

    Raises:
        UnsupportedError: experts kept as shards, or parameters cut in a way that has no expert per row; names them.
    """
    return list(_slots(model, group))


def _slots(model: nn.Module, group: dist.ProcessGroup | None) -> Iterator[Slot]:
    experts = {id(getattr(m, name)) for m in model.modules() if is_experts(m) for name in PROJECTIONS}
    shards = {id(p) for m in model.modules() if isinstance(m, ShardedExperts) for p in m.parameters()}
    for spread in spreads_of(model):
        parameter, name = spread.parameter, plain_name(spread.name)
        if id(parameter) in shards:
            raise UnsupportedError(
                f"{name}: shards of experts are saved by the trainer of `lrmoe train` only"
            )
        if id(parameter) in experts:
            yield _expert_slot(name, spread, group)
        elif spread.groups and not isinstance(parameter, DTensor):
            raise UnsupportedError(f"{name}: adapters around experts cut by shard_experts cannot be saved")
        else:
            yield Slot(name=name, parameter=parameter)


def _expert_slot(name: str, spread: Spread, group: dist.ProcessGroup | None) -> Slot:
    parameter = spread.parameter
    if isinstance(parameter, DTensor):
        return _mesh_slot(name, parameter)
    count = parameter.shape[0]
    if not spread.groups:  # every rank holds all: they share the writing
        rank, ranks = rank_of(group), size_of(group)
        rows = range(count * rank // ranks, count * (rank + 1) // ranks)
        return Slot(name=name, parameter=parameter, experts=count, rows=rows)
    (spread_over,) = spread.groups
    first = 0 in dist.get_process_group_ranks(spread_over)  # of several groups that hold the same
    return Slot(
        name=name,
        parameter=parameter,
        experts=count * spread_over.size(),
        held=count * dist.get_rank(spread_over),
        rows=range(count if first else 0),
    )


def _mesh_slot(name: str, parameter: DTensor) -> Slot:
    mesh, placements = parameter.device_mesh, parameter.placements
    first, count = True, local_part(parameter).shape[0]
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            first = first and mesh.get_local_rank(dim) == 0
        elif getattr(placement, "dim", None) != 0:
            raise UnsupportedError(
                f"{name}: its experts are cut inside ({placement}); a checkpoint needs whole ones on a rank"
            )
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return Slot(
        name=name,
        parameter=parameter,  # type: ignore[arg-type]  # a Parameter, which torch types as a DTensor
        experts=parameter.shape[0],
        held=offset[0],
        rows=range(count if first else 0),
    )
