"""Policies fitted to what they are compared on: the model's sizes, the stated link, the common slots, the batch.

Some systems decide with seconds, some with thresholds in pairs that were set for a GPU's batch. Left at their defaults
they would plan for another machine than the one they are compared on.
"""

from __future__ import annotations

import dataclasses

from lrmoe.planning import ExpertShape
from lrmoe.planning.calibration import Constants
from lrmoe.planning.hardware import Hardware
from lrmoe.planning.policies import LLEP, Policy, UltraEP, fit_policy

_FLOPS = 1e12  # any: only its ratio to the link's speed decides
_BATCH = (
    262_144  # pairs per rank and call of the published comparison, for which thresholds in pairs were set
)
_REACHED = Constants(gemm_efficiency=1.0, pcie_efficiency=1.0, network_efficiency=1.0, nvlink_efficiency=1.0)


def fitted(policy: Policy, expert: ExpertShape, *, ranks: int, slots: int, pairs: int) -> Policy:
    """The policy, deciding for this comparison.

    Seconds follow the rule of the modelled link: exchange takes half as long as compute, both spread evenly.

    Args:
        expert: sizes of one expert. slots: most foreign experts of a rank, also for systems without a limit of theirs.
        pairs: (token, expert) pairs of a rank and call.
    """
    policy = fit_policy(policy, expert, _hardware(expert, ranks), slots=slots, constants=_REACHED)
    least = max(1, round(1024 * pairs / _BATCH))
    if isinstance(policy, LLEP):
        return dataclasses.replace(policy, min_tokens=least)
    if isinstance(policy, UltraEP):
        return dataclasses.replace(policy, min_tokens_per_replica=least)
    return policy


def _hardware(expert: ExpertShape, ranks: int) -> Hardware:
    """A device over whose link the four rows of a pair take half the time of its three products."""
    compute_s = 3 * 2 * expert.params / _FLOPS
    link = 4 * expert.row_bytes * (ranks - 1) / ranks / (compute_s / 2)
    return Hardware(
        name="modelled",
        about="a rank of this comparison",
        memory_bytes=1,
        flops=_FLOPS,
        hbm_bytes_per_s=link,
        nvlink_bytes_per_s=None,
        pcie_bytes_per_s=link,
        network_bytes_per_s=link,
        source="the modelled link of a comparison",
    )
