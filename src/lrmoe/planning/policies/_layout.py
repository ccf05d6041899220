"""What the compared systems share: layouts of copies, plans built from them, options and history read safely.

A layout is `copies_RE`, int64 (R, E): how many weight slots of rank r hold expert e.
Shape letters: R ranks, E experts, J instances, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lrmoe.errors import PlanError
from lrmoe.planning.plan import LayerPlan, Traffic
from lrmoe.planning.problem import IntArray, Problem, Topology

# (expert, its hosts ascending) -> pairs of each source to each host, int64 (R, hosts)
Split = Callable[[int, IntArray], IntArray]


def check_option(ok: bool, name: str, value: object, valid: str) -> None:
    """Raise PlanError naming the option, its value and what is valid, unless `ok`."""
    if not ok:
        raise PlanError(f"{name}={value!r}: must be {valid}")


def check_slots(slots: int | None) -> None:
    """Raise PlanError where a policy's own slot number is not a count."""
    check_option(
        slots is None or (isinstance(slots, int) and not isinstance(slots, bool) and slots >= 0),
        "slots",
        slots,
        "None (the problem's) or an integer >= 0",
    )


def slots_of(problem: Problem, slots: int | None) -> int:
    """A policy's own slot number where it has one, the problem's otherwise."""
    return problem.slots if slots is None else slots


def home_layout(topology: Topology) -> IntArray:
    """Every expert at home once, int64 (R, E)."""
    copies_RE = np.zeros((topology.ranks, topology.experts), dtype=np.int64)
    copies_RE[topology.home_E, np.arange(topology.experts)] = 1
    return copies_RE


def even_layout(topology: Topology, slots: int) -> IntArray:
    """Every expert at home, and the extra slots of rank r filled with the experts of the ranks after it, int64 (R, E).

    The k-th extra slot of a rank holds local expert k % n of the (1 + k // n)-th next rank (n experts per rank), so
    copies are spread evenly and no rank holds an expert twice while slots <= E - n.
    """
    copies_RE = home_layout(topology)
    n, ranks = topology.experts_per_rank, topology.ranks
    rank_R = np.arange(ranks)
    for k in range(slots):
        np.add.at(copies_RE, (rank_R, (rank_R + 1 + k // n) % ranks * n + k % n), 1)
    return copies_RE


def previous_layout(problem: Problem, per_rank: int) -> IntArray | None:
    """The layout of the last call's plan, int64 (R, E), or None where there is none of this size.

    A plan of another layout of ranks, one that misses an expert, or one that fills more than `per_rank` slots of a
    rank (after a change of settings) does not count.
    """
    plan = problem.history.previous if problem.history is not None else None
    if plan is None or plan.topology != problem.topology:
        return None
    copies_RE = np.zeros_like(problem.counts_RE)
    copies_J = 1 if plan.copies_J is None else plan.copies_J
    np.add.at(copies_RE, (plan.instance_rank_J, plan.instance_expert_J), copies_J)
    if (copies_RE.sum(axis=0) == 0).any() or (copies_RE.sum(axis=1) > per_rank).any():
        return None
    return copies_RE


def past_counts(problem: Problem, window: int) -> IntArray | None:
    """Sum of the last `window` calls' counts, int64 (R, E), or None without history.

    Raises:
        PlanError: history of another shape.
    """
    history = problem.history
    if history is None or not history.counts:
        return None
    recent: Sequence[IntArray] = history.counts[-window:]
    for counts in recent:
        if counts.shape != problem.counts_RE.shape:
            raise PlanError(f"history.counts has shape {counts.shape}: must be {problem.counts_RE.shape}")
    return np.sum(recent, axis=0, dtype=np.int64)


def due(problem: Problem, interval: int, first: int) -> bool:
    """Whether call number `history.step` is one of first, first + interval, first + 2 interval, ..."""
    step = problem.history.step if problem.history is not None else 0
    return step >= first and (step - first) % interval == 0


def slot_loads(load_E: IntArray, copies_RE: IntArray) -> IntArray:
    """Load of every rank when each expert's pairs are spread evenly over its copies, rounded up, int64 (R,)."""
    total_E = np.maximum(copies_RE.sum(axis=0), 1)
    whole_E, rest_E = np.divmod(load_E, total_E)
    return (whole_E * copies_RE - (-rest_E * copies_RE) // total_E).sum(axis=1)


def split_each(sent_RE: IntArray, copies_RE: IntArray, split: Split) -> IntArray:
    """Pairs of each source to each instance, expert by expert: `split` decides where there are several hosts.

    Args:
        sent_RE: int64 (R, E), pairs to place. copies_RE: int64 (R, E), at least one copy of every expert.
        split: its rows sum to the expert's column of `sent_RE`.

    Returns:
        int64 (R, J), instances in the order (rank, expert).
    """
    rank_J, expert_J = np.nonzero(copies_RE)
    assign_RJ = sent_RE[:, expert_J]
    order = np.argsort(expert_J, kind="stable")
    hosts_E = np.bincount(expert_J, minlength=copies_RE.shape[1])
    starts_E = np.cumsum(hosts_E) - hosts_E
    for expert in np.flatnonzero(hosts_E > 1).tolist():
        columns = order[starts_E[expert] : starts_E[expert] + hosts_E[expert]]
        assign_RJ[:, columns] = split(expert, rank_J[columns])
    return assign_RJ


def split_evenly(sent_RE: IntArray, copies_RE: IntArray, node_R: IntArray | None = None) -> IntArray:
    """Every source spreads each expert evenly over its copies, the rest from copy (source mod copies) on.

    With `node_R` only over the copies in the source's own node, where it has any. Equals `split.even` and
    `split.node_even` over slots, copies on one rank added up, for all experts at once.

    Args:
        sent_RE: int64 (R, E). copies_RE: int64 (R, E), at least one copy of every expert.
        node_R: int64 (R,), non-decreasing, or None.

    Returns:
        int64 (R, J), instances in the order (rank, expert).
    """
    rank_J, expert_J = np.nonzero(copies_RE)
    copies_J = copies_RE[rank_J, expert_J]
    before_J = (np.cumsum(copies_RE, axis=0) - copies_RE)[rank_J, expert_J]
    if node_R is None:
        node_R = np.zeros(sent_RE.shape[0], dtype=np.int64)
    assign_RJ = sent_RE[:, expert_J]
    several_J = np.count_nonzero(copies_RE, axis=0)[expert_J] > 1
    assign_RJ[:, several_J] = 0
    total_E = copies_RE.sum(axis=0)
    for node in np.unique(node_R).tolist():
        sources = np.flatnonzero(node_R == node)
        inside_E = copies_RE[sources].sum(axis=0)
        lower_E = copies_RE[: sources[0]].sum(axis=0)
        local_J = inside_E[expert_J] > 0
        used = np.flatnonzero(several_J & (~local_J | (node_R[rank_J] == node)))
        local, expert = local_J[used], expert_J[used]
        size = np.where(local, inside_E[expert], total_E[expert])
        start = before_J[used] - np.where(local, lower_E[expert], 0)
        end = start + copies_J[used]
        base, extra = np.divmod(sent_RE[np.ix_(sources, expert)], size)
        first = (
            sources[:, None] % size
        )  # copies first .. first + extra - 1 get one more, past the end from 0 on
        more = np.minimum(end, first + extra) - np.maximum(start, first)
        wrapped = np.minimum(end, first + extra - size) - start
        assign_RJ[np.ix_(sources, used)] = (
            base * copies_J[used] + np.maximum(more, 0) + np.maximum(wrapped, 0)
        )
    return assign_RJ


def make_plan(
    problem: Problem,
    copies_RE: IntArray,
    assign_RJ: IntArray,
    *,
    traffic: Traffic | None = None,
    overflow_RE: IntArray | None = None,
) -> LayerPlan:
    """The plan of a layout that keeps every computed pair and runs backward where forward ran.

    Args:
        problem: the question.
        copies_RE: int64 (R, E). assign_RJ: int64 (R, J), instances in the order (rank, expert).
        traffic: what moves besides rows; None as in LayerPlan.
        overflow_RE: int64 (R, E), pairs that are not computed at all, or None.
    """
    rank_J, expert_J = np.nonzero(copies_RE)
    copies_J = copies_RE[rank_J, expert_J]
    quota_E = problem.counts_E if overflow_RE is None else problem.counts_E - overflow_RE.sum(axis=0)
    return LayerPlan(
        topology=problem.topology,
        counts_RE=problem.counts_RE,
        instance_expert_J=expert_J.astype(np.int64),
        instance_rank_J=rank_J.astype(np.int64),
        assign_RJ=assign_RJ,
        quota_E=quota_E,
        backward_J=assign_RJ.sum(axis=0),
        overflow_RE=overflow_RE,
        copies_J=copies_J if (copies_J > 1).any() else None,
        traffic=traffic,
    )


def foreign_copies(problem: Problem, copies_RE: IntArray) -> IntArray:
    """Experts that each rank holds away from their homes, int64 (R,)."""
    away_RE = copies_RE > 0
    away_RE[problem.topology.home_E, np.arange(problem.topology.experts)] = False
    return away_RE.sum(axis=1).astype(np.int64)


def held_traffic(problem: Problem, copies_RE: IntArray) -> Traffic:
    """Replicas fetched for the call, kept until its backward, their gradients returned."""
    foreign_R = foreign_copies(problem, copies_RE)
    none_R = np.zeros_like(foreign_R)
    return Traffic(fetch_R=foreign_R, refetch_R=none_R, return_R=foreign_R, state_R=none_R, resident_R=none_R)


def resident_traffic(old_RE: IntArray, new_RE: IntArray, *, slots: int) -> Traffic:
    """Layouts that stay: weights and optimizer states move when a slot changes, replicas' gradients are summed.

    An all-reduce among k ranks moves 2 (k - 1) gradients; each host beyond an expert's first counts two returns.

    Args:
        old_RE, new_RE: int64 (R, E), the layouts before and now.
        slots: slots of every rank beyond those of fixed ownership, filled or not.
    """
    arrived_R = ((new_RE > 0) & (old_RE == 0)).sum(axis=1).astype(np.int64)
    held_RE = new_RE > 0
    extra_RE = held_RE & (np.cumsum(held_RE, axis=0) > 1)
    none_R = np.zeros_like(arrived_R)
    return Traffic(
        fetch_R=arrived_R,
        refetch_R=none_R,
        return_R=2 * extra_RE.sum(axis=1).astype(np.int64),
        state_R=arrived_R,
        resident_R=np.full_like(arrived_R, slots),
    )
