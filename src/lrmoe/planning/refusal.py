"""The error of a budget that nothing fits: who lacks what, the smallest budget that would do, the largest micro-batch.

Shape letters: R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lrmoe.errors import InfeasibleError

if TYPE_CHECKING:
    from lrmoe.planning.fit import Fitted, Ladder

_MICRO_STEPS = 1000  # shares of a micro-batch that are told apart in the error


def refusal(ladder: Ladder, first: Fitted, found: Fitted, name: str) -> InfeasibleError:
    """The error to raise.

    Args:
        ladder: under the budget. first: the policy's own plan. found: what its scan found to need least.
        name: what the budget is called.
    """
    smallest, least = _smallest(ladder, found)
    return InfeasibleError(f"{name}: {_explain(ladder, first, smallest, least)}", smallest=smallest)


def _smallest(ladder: Ladder, least: Fitted) -> tuple[int, Fitted]:
    """A budget that is accepted where one byte less is refused, and the call under it.

    Args:
        least: what the scan found, so that its need is accepted; a search may know how to need less.
    """
    accepted = least.need
    while (found := replace(ladder, budget=accepted - 1).climb()) is not None:
        again = replace(ladder, budget=found.need).climb()
        if again is None:  # the search takes another path under its own result
            return _between(ladder, found.need, accepted - 1, found)
        accepted, least = found.need, again
    return accepted, least


def _between(ladder: Ladder, refused: int, accepted: int, least: Fitted) -> tuple[int, Fitted]:
    while accepted - refused > 1:
        middle = (refused + accepted) // 2
        one = replace(ladder, budget=middle).climb()
        if one is None:
            refused = middle
        else:
            accepted, least = middle, one
    return accepted, least


def _explain(ladder: Ladder, first: Fitted, smallest: int, least: Fitted) -> str:
    """The numbers a user needs: who lacks what, and what would do."""
    problem, budget = ladder.problem, ladder.limit
    need_R = np.maximum(least.forward_R, least.backward_R)
    rank = int(np.argmax(need_R))
    asked = int(max(first.forward_R[rank], first.backward_R[rank]))
    fits = _micro_batch(ladder, least)
    share = 100 * fits / max(problem.pairs, 1)
    plan = least.plan
    saved = "recomputed" if plan.recompute or plan.forward_chunks > 1 else "saved"
    micro_batch = (
        f"with {budget}, the largest micro-batch has about {fits} pairs ({share:.1f} % of this one)"
        if fits
        else f"with {budget} not even the smallest micro-batch fits"
    )
    return (
        f"rank {rank} needs {asked} bytes as planned and {int(need_R[rank])} with every means "
        f"({int(plan.replicas_R.sum())} replicas, {plan.forward_chunks} chunks in forward, {plan.backward_chunks} in "
        f"backward, activations {saved}); {budget} ({_mib(budget)}) are available. Backward may leave out "
        f"{problem.drop_cap} of {problem.pairs} pairs, forward none. For this call the smallest budget is {smallest} "
        f"bytes ({_mib(smallest)}) a rank, for another routing it may be more; {micro_batch}"
    )


def _mib(size: int) -> str:
    """Bytes for a reader."""
    return f"{size / 2**20:.1f} MiB"


def _micro_batch(ladder: Ladder, least: Fitted) -> int:
    """Pairs of the largest share of this call that would fit, run like the plan of least bytes."""
    low, high, fits = 0, _MICRO_STEPS, 0
    while high - low > 1:
        middle = (low + high) // 2
        counts_RE = ladder.problem.counts_RE * middle // _MICRO_STEPS
        slots = ladder.problem.slots if least.plan.replicas_R.any() else 0
        plan = ladder.policy(replace(ladder.problem, counts_RE=counts_RE, slots=slots))
        plan = replace(
            plan,
            forward_chunks=least.plan.forward_chunks,
            backward_chunks=least.plan.backward_chunks,
            recompute=least.plan.recompute,
        )
        forward_R, backward_R = ladder.predict(plan)
        if max(int(forward_R.max()), int(backward_R.max())) <= ladder.limit:
            low, fits = middle, plan.pairs
        else:
            high = middle
    return fits
