"""This package's own experts module, whose parameters are shards: for trainers that build the model themselves.

group rank       0           1           2           3
experts       E0..E7      E0..E7      E0..E7      E0..E7      gate_up_proj (E, P), P = ceil(2I * H / ranks)
of each      1st quarter 2nd quarter 3rd quarter 4th quarter

Shapes: T tokens, K experts per token, E experts, H hidden, I expert width, P padded elements of a shard.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lrmoe.distributed.sharded import cut_experts
from lrmoe.errors import ConfigError
from lrmoe.integrations.transformers._binding import Binding, make_binding
from lrmoe.integrations.transformers._experts import PROJECTIONS, find_experts
from lrmoe.planning.shards import Cut, expert_cuts


class ShardedExperts(nn.Module):
    """Takes the place of a Transformers experts module; same signature, same names of parameters.

    Needs `enable(model, LRMoEConfig(storage="sharded", ...))` for anything but exact calls.

    Args:
        experts: the module to replace, holding all experts. It is read, not changed.
        name: its name, for messages.
        group: the ranks that share the experts; None for one rank.

    Attributes:
        gate_up_proj, down_proj: parameters (E, P), this rank's part of every expert, padded with zeros.
        cuts: how each of them is cut, by name.

    Raises:
        UnsupportedError: an experts module that the layer does not execute.
        ConfigError: the number of experts is not a multiple of the group's size.
    """

    # What Transformers' `use_experts_implementation` says of a module, so that it is found like any other.
    has_gate = is_concatenated = True
    has_bias = is_transposed = has_post_expert_norm = False

    def __init__(self, experts: nn.Module, name: str, group: ProcessGroup | None) -> None:
        super().__init__()
        spec = make_binding(experts, name).spec
        ranks, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
        if spec.local_experts % ranks:
            raise ConfigError(
                f"{name}: {spec.local_experts} experts cannot be spread evenly over {ranks} ranks"
            )
        self.config = experts.config
        self.num_experts = spec.local_experts // ranks
        self.lrmoe_spec = dataclasses.replace(spec, local_experts=self.num_experts)
        cuts = expert_cuts(spec.hidden_size, spec.intermediate_size, ranks)
        self.cuts: dict[str, Cut] = dict(zip(PROJECTIONS, cuts, strict=True))
        for projection, cut in self.cuts.items():
            whole: nn.Parameter = getattr(experts, projection)
            shards = nn.Parameter(cut_experts(whole, cut, rank), requires_grad=whole.requires_grad)
            setattr(self, projection, shards)
        self._lrmoe = Binding(self.lrmoe_spec, group, storage="sharded")

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(T, H), (T, K) int64 global ids, (T, K) -> (T, H); T may differ by rank and may be 0."""
        return self._lrmoe.run(self, hidden_states, top_k_index, top_k_weights)


def install_sharded_experts(model: nn.Module, group: ProcessGroup | None) -> None:
    """Replace every experts module by one that keeps this rank's part of all its experts.

    Call it before making the optimizer or wrapping the model, on every rank. Shards of all ranks together are the
    weights the model had, at any number of ranks. What modules share they go on sharing.

    Raises:
        UnsupportedError: an experts module that lrmoe does not execute. Nothing has been changed then.
        ConfigError: the number of experts is not a multiple of the group's size. Nothing has been changed then.
    """
    wholes = find_experts(model)
    found = {module: ShardedExperts(module, name, group) for name, module in wholes.items()}
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for module, experts in found.items():
        for projection in PROJECTIONS:
            whole: nn.Parameter = getattr(module, projection)
            setattr(experts, projection, shards.setdefault(whole, getattr(experts, projection)))
    places = list(model.named_modules(remove_duplicate=False))
    for name, place in places:
        if place in found:
            model.set_submodule(name, found[place])


def sharded_parameters(model: nn.Module) -> dict[str, Cut]:
    """Names of the parameters that are shards, and how each is cut."""
    return {
        f"{name}.{projection}": cut
        for name, module in model.named_modules()
        if isinstance(module, ShardedExperts)
        for projection, cut in module.cuts.items()
    }
