"""The budget ladder: what one layer call does, rung by rung, until every rank's rows fit; pure arithmetic on a plan.

    0 it fits                        3 saved activations too large: recompute from the token input
    1 replicas lower the peak        4 each rank's rows in even chunks
    2 backward drops the deficiency  5 an error with the numbers, before any compute, the same on every rank

The forward is complete: whatever backward drops, forward needs at least one mean load, or chunks.
The deficiency of rung 2 is max over sets D of ranks of f(D) - B |D| (section on quotas in prices.py).

Shape letters: R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.errors import InfeasibleError
from lrmoe.planning.problem import IntArray, Problem


@dataclass(frozen=True, kw_only=True)
class Rungs:
    """Means that a call uses to fit its budget.

    Attributes:
        replicas: foreign experts placed. dropped: pairs that backward leaves out.
        recompute: whether activations are not saved. forward_chunks, backward_chunks: parts of each rank's rows.
    """

    replicas: int
    dropped: int
    recompute: bool
    forward_chunks: int
    backward_chunks: int

    @property
    def highest(self) -> int:
        """The highest rung in use, 0 to 4."""
        if max(self.forward_chunks, self.backward_chunks) > 1:
            return 4
        return 3 if self.recompute else 2 if self.dropped else 1 if self.replicas else 0


def kept_caps(problem: Problem, replicas_R: IntArray) -> IntArray | None:
    """Most pairs that each rank may keep in backward without recompute or chunks, int64 (R,); None without budget."""
    if problem.budget_rows is None:
        return None
    return np.maximum(problem.budget_rows - problem.replica_rows * replicas_R, 0)


def climb(problem: Problem, replicas_R: IntArray, forward_R: IntArray, kept_R: IntArray) -> Rungs:
    """The rungs that a placement and its quotas need under the budget.

    Args:
        problem: `budget_rows` fit a rank with saved activations, `recompute_rows` without; `max_chunks` is the limit.
        replicas_R, forward_R, kept_R: int64 (R,), replicas held, pairs run in forward, pairs kept in backward.

    Raises:
        InfeasibleError: not even `max_chunks` chunks fit; names rank, needed, available, cap, the smallest budget and
            the largest micro-batch that would do.
    """
    replicas, dropped = int(replicas_R.sum()), int(forward_R.sum() - kept_R.sum())
    if problem.budget_rows is None:
        return Rungs(replicas=replicas, dropped=dropped, recompute=False, forward_chunks=1, backward_chunks=1)
    charge_R = problem.replica_rows * replicas_R
    budget, recompute = problem.budget_rows, False
    if (forward_R + charge_R).max() > budget and (problem.recompute_rows or 0) > budget:
        budget, recompute = problem.recompute_rows or budget, True
    room_R = budget - charge_R
    most_R = np.maximum(forward_R, kept_R)
    if room_R.min() < 1 or _chunks(most_R, room_R) > problem.max_chunks:
        raise InfeasibleError(_explain(problem, most_R, charge_R, budget))
    return Rungs(
        replicas=replicas,
        dropped=dropped,
        recompute=recompute,
        forward_chunks=_chunks(forward_R, room_R),
        backward_chunks=_chunks(kept_R, room_R),
    )


def _chunks(load_R: IntArray, room_R: IntArray) -> int:
    return max(1, int((-(-load_R // room_R)).max()))


def _explain(problem: Problem, load_R: IntArray, charge_R: IntArray, budget: int) -> str:
    """The numbers a user needs: who lacks what, and what would do."""
    parts = problem.max_chunks
    least_R = -(-load_R // parts) + charge_R
    rank = int(np.argmax(least_R))
    needed, smallest = int(load_R[rank] + charge_R[rank]), int(least_R.max())
    # Python integers: room times pairs may leave int64.
    share = [
        (max(budget - c, 0) * parts * problem.pairs) // f
        for f, c in zip(load_R.tolist(), charge_R.tolist(), strict=True)
        if f
    ]
    largest = min(problem.pairs, *share)
    return (
        f"rank {rank} needs {needed} rows ({int(charge_R[rank])} of them for replicas) and {budget} are available; "
        f"{parts} chunks are the limit, and backward may leave out {problem.drop_cap} of {problem.pairs} pairs, "
        f"forward none. The smallest budget is {smallest} rows a rank; with {budget}, the largest micro-batch has "
        f"{largest} pairs ({100 * largest / max(problem.pairs, 1):.1f} % of this one)"
    )
