"""The plan of a call: the question put to the policy, within byte budgets and the limits on what may be dropped.

Shape letters: R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lrmoe.config import LRMoEConfig
from lrmoe.distributed import Comm
from lrmoe.errors import PlanError
from lrmoe.layer.agree import agreed_plan
from lrmoe.layer.budget import CallBudget
from lrmoe.layer.controller import Controller
from lrmoe.layer.drops import Chosen
from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.policies import Policy, UserPolicy
from lrmoe.planning.problem import History, IntArray
from lrmoe.planning.score_bins import ScoreHistory

_MOVE_ROWS = 1 / 3  # a pair that moves repeats its first projection: 4 of the 12 H I products of its backward


class CallPlanner:
    """Plans one layer's calls; the same on all ranks.

    Args:
        policy: answers the questions; one from a user's file is held to the same answer on all ranks.
    """

    def __init__(
        self, *, config: LRMoEConfig, comm: Comm, topology: Topology, controller: Controller, policy: Policy
    ) -> None:
        self._config, self._comm, self._topology = config, comm, topology
        self._controller, self._policy = controller, policy

    def choose(
        self,
        counts_RE: IntArray,
        max_drop: float,
        scores: ScoreHistory | None,
        budget: CallBudget,
        history: History | None,
        device: torch.device,
    ) -> Chosen:
        """The call's plan, within the drop limits where they are in force.

        Args:
            counts_RE: int64 (R, E). max_drop: cap on the dropped share, 0 for an exact call.
            scores: of past calls. history: past calls, for policies that plan from them.
            device: where ranks compare the plans of a user's policy.

        Raises:
            InfeasibleError: no plan fits the budget. PlanError: the plan leaves pairs out of forward.
            RankError: a user's policy answers differently on some ranks.
        """
        problem = make_problem(
            self._config,
            counts_RE,
            self._topology,
            max_drop,
            scores,
            prices=self._controller.prices,
            history=history,
        )

        def make() -> Chosen:
            return self._within_limits(problem, scores, budget)

        if not isinstance(self._policy, UserPolicy):
            return self._checked(make())
        found: list[Chosen] = []

        def compared() -> LayerPlan:
            found.append(make())
            return found[-1].plan

        who = f"policy={self._policy.name!r}, layer {self._controller.layer}"
        plan = agreed_plan(self._comm, device, who, compared)
        return self._checked(replace(found[-1], plan=plan))

    def _within_limits(self, problem: Problem, scores: ScoreHistory | None, budget: CallBudget) -> Chosen:
        adapts, drops = self._policy is get_policy("lrmoe"), self._controller.drops

        def plan_at(drop: float) -> LayerPlan:
            asked = problem if drop == problem.max_drop else replace(problem, max_drop=drop)
            return budget.plan(asked, self._policy, adapts=adapts)

        def probe(drop: float) -> LayerPlan:
            return budget.plan(replace(problem, max_drop=drop, drop="always"), self._policy, adapts=adapts)

        if problem.max_drop > 0 and drops.active:
            return drops.choose(plan_at, probe, scores)
        return Chosen(plan=plan_at(problem.max_drop), predicted=None, told={})

    def _checked(self, chosen: Chosen) -> Chosen:
        overflow_RE = chosen.plan.overflow_RE
        if overflow_RE is not None and overflow_RE.any():
            raise PlanError(
                f"policy={self._config.policy!r} leaves {int(overflow_RE.sum())} pairs out of the forward "
                "(capacity drop): the runtime computes every pair; valid: a policy without a capacity factor"
            )
        return chosen


def make_problem(
    config: LRMoEConfig,
    counts_RE: IntArray,
    topology: Topology,
    max_drop: float,
    scores: ScoreHistory | None,
    *,
    prices: tuple[float, float] = (0.0, 0.0),
    history: History | None = None,
) -> Problem:
    """The planning problem of a call. Score history serves `sampled` only: its optimum is one sampling constant.

    Args:
        scores: of past calls. prices: of a copy and of a crossing row, in rows of compute.
    """
    known = scores if config.estimator == "sampled" else None
    return Problem(
        counts_RE=counts_RE,
        topology=topology,
        slots=min(config.replica_slots, topology.experts - topology.experts_per_rank),
        copy_rows=prices[0],
        cross_rows=prices[1],
        move_rows=0.0 if config.recompute else _MOVE_ROWS,
        history=history,
        max_drop=max_drop,
        drop="always" if config.drop == "auto" else config.drop,
        min_keep=config.min_keep,
        peak_target=config.peak_target,
        score_mean_E=None if known is None else known.mean_E,
        score_bins=None if known is None else known.bins_EB2,
    )
