"""A plan that every rank makes for itself, held to be the same everywhere: for policies that are not this package's.

Ranks that followed different plans, or waited for one that has none, would wait for each other until a time limit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lrmoe.distributed import Comm
from lrmoe.errors import PlanError, RankError
from lrmoe.planning import LayerPlan

_NONE = -1  # in place of a fingerprint: no plan


def agreed_plan(comm: Comm, device: torch.device, who: str, make: Callable[[], LayerPlan]) -> LayerPlan:
    """What `make` gives here and on all other ranks. One integer per rank crosses.

    Args:
        device: where that integer lies. who: names the policy in errors.

    Raises:
        PlanError: the plans differ. Raised on every rank.
        RankError: another rank has no plan; on that rank what `make` raised.
    """
    if comm.size == 1:
        return make()
    plan: LayerPlan | None = None
    error: Exception | None = None
    try:
        plan = make()
    except Exception as caught:
        error = caught
    mine = torch.tensor([_NONE if plan is None else plan.fingerprint()], dtype=torch.int64, device=device)
    prints = comm.all_gather_ints(mine).view(-1).tolist()
    if error is not None:
        raise error
    missing = [str(rank) for rank, one in enumerate(prints) if one == _NONE]
    if missing:
        raise RankError(f"{who}: failed on rank {', '.join(missing)} (this is rank {comm.rank})")
    assert plan is not None, "no error, so a plan"
    if len(set(prints)) > 1:
        unlike = [str(rank) for rank, one in enumerate(prints) if one != prints[0]]
        raise PlanError(
            f"{who}: its plans of one call differ between ranks (rank 0 and rank {', '.join(unlike)}): must depend on "
            "the Problem alone"
        )
    return plan
