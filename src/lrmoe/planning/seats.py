"""A plan as the runtime walks through it: every rank's seats, one beside the other.

A seat is one copy of one expert on one rank, with its row of weights. A rank's seats are its home experts first, in id
order (with no rows where the plan leaves a home without its expert), then the foreign experts it holds, in id order.

Shape letters: R ranks, E experts, J instances, Q seats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray, Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class Seats:
    """All ranks' seats.

    Attributes:
        topology: ranks, experts, homes.
        expert_Q, rank_Q: int64 (Q,), expert and rank of each seat; rank after rank.
        assign_RQ: int64 (R, Q), pairs that source rank r sends to each seat in forward.
        backward_Q: int64 (Q,), kept pairs that each seat runs in backward.
    """

    topology: Topology
    expert_Q: IntArray
    rank_Q: IntArray
    assign_RQ: IntArray
    backward_Q: IntArray

    @cached_property
    def starts_R(self) -> IntArray:
        """First seat of every rank and the number of all seats, int64 (R + 1,)."""
        return np.searchsorted(self.rank_Q, np.arange(self.topology.ranks + 1))

    def of(self, rank: int) -> slice:
        """The seats of a rank."""
        return slice(int(self.starts_R[rank]), int(self.starts_R[rank + 1]))

    @cached_property
    def foreign_Q(self) -> NDArray[np.bool_]:
        """Whether each seat lies away from its expert's home, bool (Q,)."""
        return self.topology.home_E[self.expert_Q] != self.rank_Q

    @cached_property
    def spread(self) -> bool:
        """Whether any expert runs away from home."""
        return bool(self.foreign_Q.any())

    @cached_property
    def by_expert_Q(self) -> IntArray:
        """The seats in the order (expert, rank), int64 (Q,): where a source lays its pairs of one expert."""
        return np.lexsort((self.rank_Q, self.expert_Q))


def seats_of(plan: LayerPlan, *, homes: bool = True) -> Seats:
    """The seats of a plan.

    Args:
        homes: give every home expert a seat, as a rank needs that owns its weights; False: only the plan's instances,
            and the homes of experts that the plan runs there in backward only (`backward_J` None).
    """
    topology, absent = plan.topology, _absent_homes(plan, homes)
    expert_Q = np.concatenate((plan.instance_expert_J, absent))
    rank_Q = np.concatenate((plan.instance_rank_J, topology.home_E[absent]))
    order = np.lexsort((expert_Q, topology.home_E[expert_Q] != rank_Q, rank_Q))
    expert_Q, rank_Q = expert_Q[order], rank_Q[order]
    column = _columns(plan, expert_Q, rank_Q)
    there = column >= 0
    assign_RQ = np.where(there, plan.assign_RJ[:, column] if plan.assign_RJ.shape[1] else 0, 0)
    return Seats(
        topology=topology,
        expert_Q=expert_Q,
        rank_Q=rank_Q,
        assign_RQ=np.ascontiguousarray(assign_RQ, dtype=np.int64),
        backward_Q=_backward(plan, expert_Q, rank_Q, column),
    )


def _absent_homes(plan: LayerPlan, homes: bool) -> IntArray:
    """Experts that need a seat at home and have no instance there, int64."""
    at_home = np.zeros(plan.topology.experts, dtype=np.bool_)
    at_home[plan.instance_expert_J[~plan.foreign_J]] = True
    needed = homes | ((plan.backward_J is None) & (plan.quota_E > 0))
    return np.flatnonzero(~at_home & needed)


def _columns(plan: LayerPlan, expert_Q: IntArray, rank_Q: IntArray) -> IntArray:
    """The plan's instance in each seat, -1 where there is none, int64 (Q,)."""
    experts = plan.topology.experts
    key_J = plan.instance_rank_J * experts + plan.instance_expert_J
    order_J = np.argsort(key_J, kind="stable")
    key_Q = rank_Q * experts + expert_Q
    place = np.minimum(np.searchsorted(key_J[order_J], key_Q), max(key_J.size - 1, 0))
    if not key_J.size:
        return np.full(key_Q.shape, -1, dtype=np.int64)
    found = order_J[place]
    return np.where(key_J[found] == key_Q, found, -1)


def _backward(plan: LayerPlan, expert_Q: IntArray, rank_Q: IntArray, column: IntArray) -> IntArray:
    """Kept pairs of each seat in backward, as the plan says; where it does not, all of them at home."""
    if plan.backward_J is not None:
        kept_Q = np.where(column >= 0, plan.backward_J[column] if plan.backward_J.size else 0, 0)
        return kept_Q.astype(np.int64)
    at_home = plan.topology.home_E[expert_Q] == rank_Q
    return np.where(at_home, plan.quota_E[expert_Q], 0).astype(np.int64)
