"""Where kept rows travel in backward, as far as a plan fixes it: expectations for the memory and the cost model.

Shape letters: R ranks, E experts, J instances.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """Rows that a plan sends in backward, float64 (R, J) each: source rank to instance.

    How many kept pairs each source has in each place is known only after selection; expectations stand for it.

    Attributes:
        rows_RJ: kept gradient rows. moved_RJ: those of them that run elsewhere than their forward did.
    """

    rows_RJ: FloatArray
    moved_RJ: FloatArray


def backward_moves(plan: LayerPlan) -> Moves:
    """Expected kept rows from each source to each instance in backward.

    Kept pairs stay where their forward ran as far as the plan's backward places allow; those that have to leave come
    from the sources of the instances that they leave.
    """
    expert_J, experts = plan.instance_expert_J, plan.topology.experts
    if plan.backward_J is None:
        to_J = np.where(plan.foreign_J, 0, plan.quota_E[expert_J]).astype(np.float64)
    else:
        to_J = plan.backward_J.astype(np.float64)
    forward_J = plan.assign_RJ.sum(axis=0).astype(np.float64)
    computed_E = np.bincount(expert_J, weights=forward_J, minlength=experts)
    in_place_J = forward_J * ratio(plan.quota_E, computed_E)[expert_J]
    stay_J = np.minimum(to_J, in_place_J)
    left_RJ = plan.assign_RJ * ratio(stay_J, forward_J)
    leaving_J = in_place_J - stay_J
    leaving_RE = np.zeros((plan.topology.ranks, experts))
    for j in np.flatnonzero(leaving_J):  # few: most instances keep what they ran
        leaving_RE[:, expert_J[j]] += plan.assign_RJ[:, j] * (leaving_J[j] / forward_J[j])
    share_RE = ratio(leaving_RE, leaving_RE.sum(axis=0))
    moved_RJ = share_RE[:, expert_J] * (to_J - stay_J)
    return Moves(rows_RJ=left_RJ + moved_RJ, moved_RJ=moved_RJ)


def ratio(part: IntArray | FloatArray, whole: IntArray | FloatArray) -> FloatArray:
    """part / whole, 0 where whole is 0."""
    return np.divide(part, whole, out=np.zeros(np.broadcast(part, whole).shape), where=whole != 0)
