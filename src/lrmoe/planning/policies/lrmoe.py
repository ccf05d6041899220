"""LRMoE: replicas for the complete forward, quotas that lower the most loaded rank first, kept pairs re-balanced.

Source: the published account of the method (dynamic experts and tokens orchestration), with algorithms of this project
where it is silent: excess-room matching for replicas (where copies have a price: only where they pay), prices for
quotas, exact least-peak routing of kept pairs.
Inputs: the current counts; per-expert score means of past calls (never past counts) for how quotas share the drop.
Acts at every call.
Moves: replica weights out, again for backward, gradients back; rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lrmoe.errors import InfeasibleError
from lrmoe.planning.cuts import local_rows
from lrmoe.planning.ladder import Rungs, climb, kept_caps
from lrmoe.planning.placement import Placement, place
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.prices import Quotas, replica_quotas
from lrmoe.planning.problem import IntArray, Problem
from lrmoe.planning.quotas import home_quotas, overload_goal
from lrmoe.planning.routing import Limits, Routing, route
from lrmoe.planning.split import split_instances
from lrmoe.planning.wires import wired, wired_quotas
from lrmoe.planning.worth import worthwhile


def plan(problem: Problem) -> LayerPlan:
    """Least forward peak under slots and budget, least backward peak under the drop cap, then least loss and few moves.

    Raises:
        InfeasibleError: the budget cannot be met even in chunks, or `wire_rows` not even with the whole drop.
    """
    if problem.slots == 0:
        return _at_home(problem)
    placement = _place(problem)
    if placement is None or not placement.replicas_R.any():
        return _at_home(problem)
    quotas = (wired_quotas if wired(problem) else replica_quotas)(
        problem,
        placement.expert_J,
        placement.rank_J,
        placement.pairs_J,
        kept_caps(problem, placement.replicas_R),
    )
    routing = _route(problem, placement, quotas)
    try:
        rungs = climb(problem, placement.replicas_R, placement.load_R, routing.load_R)
    except InfeasibleError:  # replicas take room that chunks cannot give back: without them it may fit
        return _at_home(problem)
    if rungs.forward_chunks > 1 and (home := _at_home(problem)).forward_chunks < rungs.forward_chunks:
        return home
    return _spread(problem, placement, quotas, routing, rungs)


def _place(problem: Problem) -> Placement | None:
    """Replicas: what the budget needs first; where every expert fits at home, what pays. None: all stay at home."""
    if problem.copy_rows == 0:
        return place(problem, level=_aim(problem))
    budget = problem.budget_rows
    if (
        budget is not None
        and int(problem.counts_E.reshape(problem.topology.ranks, -1).sum(axis=1).max()) > budget
    ):
        return place(problem, level=_aim(problem))
    return worthwhile(problem, _aim(problem))


def _aim(problem: Problem) -> int | None:
    """Load that placement need not go below: what the budget allows, where `overload` asks for no better peak."""
    goal = overload_goal(problem)
    if problem.budget_rows is None or not goal:
        return goal or None
    return min(goal, problem.budget_rows)


def _at_home(problem: Problem) -> LayerPlan:
    none_R = np.zeros(problem.topology.ranks, dtype=np.int64)
    caps = kept_caps(problem, none_R)
    quota_E = _wired_at_home(problem, caps) if wired(problem) else home_quotas(problem, caps)
    plan = LayerPlan.at_home(problem, quota_E, _reason(problem, quota_E, caps))
    if caps is None:
        return plan
    rungs = climb(problem, none_R, plan.forward_load_R, plan.backward_load_R)
    return replace(
        plan,
        forward_chunks=rungs.forward_chunks,
        backward_chunks=rungs.backward_chunks,
        recompute=rungs.recompute,
    )


def _wired_at_home(problem: Problem, caps: IntArray | None) -> IntArray:
    """Quotas where every expert runs at home and the network is a limit, int64 (E,)."""
    topology = problem.topology
    experts = np.arange(topology.experts, dtype=np.int64)
    return wired_quotas(problem, experts, topology.home_E, problem.counts_E, caps).quota_E


def _route(problem: Problem, placement: Placement, quotas: Quotas) -> Routing:
    """Backward places: within the wires, and within the caps of ranks where both can be met."""
    caps = kept_caps(problem, placement.replicas_R)

    def within(cap_R: IntArray | None) -> Routing:
        limits = Limits(cap_R=cap_R)
        if quotas.wire_rows is not None:
            wire_R = np.full(problem.topology.ranks, quotas.wire_rows, dtype=np.int64)
            local_J = local_rows(problem, placement.expert_J, placement.rank_J, quotas.quota_E)
            limits = Limits(cap_R=cap_R, wire_R=wire_R, local_J=local_J)
        return route(
            placement.expert_J,
            placement.rank_J,
            quotas.stay_J,
            problem.topology.ranks,
            limits=limits,
            move_rows=problem.move_rows,
        )

    # No rank needs to run more than in forward, where pairs stay; only wires can ask for that.
    wider = [None] if caps is None else [caps, np.maximum(caps, placement.load_R), None]
    for cap_R in wider[:-1]:
        try:
            return within(cap_R)
        except InfeasibleError:
            continue
    return within(wider[-1])


def _reason(problem: Problem, quota_E: IntArray, caps: IntArray | None) -> str:
    if int(quota_E.sum()) == problem.pairs:
        return "off"
    goal = overload_goal(problem)
    return "budget" if goal and caps is not None and int(caps.min()) < goal else problem.drop


def _spread(
    problem: Problem, placement: Placement, quotas: Quotas, routing: Routing, rungs: Rungs
) -> LayerPlan:
    caps = kept_caps(problem, placement.replicas_R)
    return LayerPlan(
        topology=problem.topology,
        counts_RE=problem.counts_RE,
        instance_expert_J=placement.expert_J,
        instance_rank_J=placement.rank_J,
        assign_RJ=split_instances(
            problem.counts_RE,
            placement.expert_J,
            placement.rank_J,
            placement.pairs_J,
            problem.topology.node_R,
        ),
        quota_E=quotas.quota_E,
        reason=_reason(problem, quotas.quota_E, caps),
        backward_J=routing.pairs_J,
        forward_chunks=rungs.forward_chunks,
        backward_chunks=rungs.backward_chunks,
        recompute=rungs.recompute,
    )
