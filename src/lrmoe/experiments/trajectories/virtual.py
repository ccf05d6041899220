"""Expert parallelism without its ranks: a policy for one rank that chooses quotas as it would for many.

    counts of the call (E,) --spread evenly--> (R, E) --policy--> plan of R ranks --its quotas--> plan of one rank

Quality depends on what backward keeps, and that on quotas. With the kept set chosen over all ranks it is that of one
process, so a trajectory trained in one process stands for one trained over R ranks.

Shape letters: R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from lrmoe.config import LRMoEConfig
from lrmoe.planning import LayerPlan, Topology
from lrmoe.planning.policies import Policy
from lrmoe.planning.problem import IntArray, Problem
from lrmoe.planning.rates import CPU, Sizes, copy_price

RANKS = 8
PAIRS_OVER_WIDTH = 170  # of a rank and call, in expert widths: what makes GEMMs most of a call
QUOTA_RULES = ("variance", "count")  # from past scores, as policies do; by_count


@dataclass(frozen=True, kw_only=True)
class ExecutionSize:
    """Size of the layers whose time counts, which decides whether copies of experts pay.

    Attributes:
        hidden, width: H and I. ranks: that share the experts. pairs: of a rank and call.
    """

    hidden: int = 128
    width: int = 128
    ranks: int = RANKS
    pairs: int = PAIRS_OVER_WIDTH * 128

    def prices(self, config: LRMoEConfig, pairs: int) -> tuple[float, float]:
        """(`copy_rows`, `cross_rows`) of a call of `pairs` pairs per rank, that copies pay here as in execution.

        A call with a tenth of the pairs gains a tenth by a copy, so a copy has a tenth of its price.
        """
        lean = config.lean and not (config.full_router_grad and config.max_drop > 0)
        sizes = Sizes(hidden=self.hidden, width=self.width, ranks=self.ranks, element_bytes=4, lean=lean)
        copy_rows, cross_rows = copy_price(CPU, sizes)
        return copy_rows * pairs / self.pairs, cross_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class StandIn(LayerPlan):
    """A plan of one rank that stands for one of several: its loads are the one rank's, its peaks are theirs."""

    peaks: tuple[int, int]

    @property
    def peak_rows(self) -> tuple[int, int]:
        """Rows that the most loaded of the ranks would run, forward and backward."""
        return self.peaks

    @classmethod
    def of(cls, plan: LayerPlan, peaks: tuple[int, int]) -> StandIn:
        """The plan with the peaks of another."""
        return cls(**{item.name: getattr(plan, item.name) for item in fields(LayerPlan)}, peaks=peaks)


def spread(policy: Policy, ranks: int, slots: int, prices: tuple[float, float]) -> Policy:
    """A policy for one rank with the quotas of `policy` for `ranks` ranks that hold equal shares of the call.

    Args:
        policy: plans for the ranks.
        ranks: must divide the number of experts.
        slots: foreign expert copies that each may hold.
        prices: of a copy and of a crossing row, in rows of compute.

    Returns:
        The policy; its plans run every pair at its home, which is the one rank, and tell the ranks' peaks.

    Raises:
        PlanError: in planning, where experts cannot be spread over the ranks.
    """

    def plan(problem: Problem) -> LayerPlan:
        found = policy(widened(problem, ranks, slots, prices))
        return StandIn.of(LayerPlan.at_home(problem, found.quota_E, found.reason), found.peak_rows)

    return plan


def widened(problem: Problem, ranks: int, slots: int, prices: tuple[float, float]) -> Problem:
    """The question of one rank, put to `ranks` ranks; see `spread`."""
    topology = Topology(ranks=ranks, experts=problem.topology.experts)
    return replace(
        problem,
        counts_RE=evenly(problem.counts_E, ranks),
        topology=topology,
        slots=min(slots, topology.experts - topology.experts_per_rank),
        copy_rows=prices[0],
        cross_rows=prices[1],
    )


def evenly(counts_E: IntArray, ranks: int) -> IntArray:
    """Counts of sources that hold equal shares of every expert's pairs, int64 (R, E); what is left over goes round."""
    whole_E, rest_E = np.divmod(counts_E, ranks)
    first_E = (np.cumsum(rest_E) - rest_E) % ranks
    turn_RE = (np.arange(ranks)[:, None] - first_E) % ranks
    return np.ascontiguousarray(whole_E + (turn_RE < rest_E), dtype=np.int64)


def by_count(policy: Policy) -> Policy:
    """The policy without what past scores teach: where it spreads a drop, every expert loses the same share."""

    def plan(problem: Problem) -> LayerPlan:
        return policy(replace(problem, score_mean_E=None, score_bins=None))

    return plan
