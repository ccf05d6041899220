"""A plan that every rank makes for itself, held to be the same everywhere: for policies that are not this package's.

Ranks that followed different plans, or waited for one that has none, would wait for each other until a time limit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import torch

from lrmoe.distributed import Comm
from lrmoe.errors import PlanError, RankError
from lrmoe.planning import LayerPlan

_NONE = -1  # in place of a digest: no plan


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
    mine = torch.tensor([_NONE if plan is None else _digest(plan)], dtype=torch.int64, device=device)
    digests = comm.all_gather_ints(mine).view(-1).tolist()
    if error is not None:
        raise error
    missing = [str(rank) for rank, digest in enumerate(digests) if digest == _NONE]
    if missing:
        raise RankError(f"{who}: failed on rank {', '.join(missing)} (this is rank {comm.rank})")
    assert plan is not None, "no error, so a plan"
    if len(set(digests)) > 1:
        unlike = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
        raise PlanError(
            f"{who}: its plans of one call differ between ranks (rank 0 and rank {', '.join(unlike)}): must depend on "
            "the Problem alone"
        )
    return plan


def _digest(plan: LayerPlan) -> int:
    """A number of at least 0 that tells plans apart by what a call does with them."""
    arrays = (plan.instance_expert_J, plan.instance_rank_J, plan.assign_RJ, plan.quota_E, plan.backward_J)
    found = zlib.crc32(repr((plan.forward_chunks, plan.backward_chunks, plan.recompute)).encode())
    for array in arrays:
        if array is None:
            found = zlib.crc32(b"none", found)
        else:
            found = zlib.crc32(
                np.ascontiguousarray(array).tobytes(), zlib.crc32(repr(array.shape).encode(), found)
            )
    return found
