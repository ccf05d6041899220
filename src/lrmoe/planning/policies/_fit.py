"""Default policies fitted to a model, its devices and a common number of slots.

FasterMoE, LAER-MoE and FlexMoE decide with seconds and bytes; FasterMoE and LLEP have no limit of foreign experts of
their own. Both are options of the policies, whose defaults describe one model on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from lrmoe.planning.calibration import Constants
from lrmoe.planning.hardware import Hardware
from lrmoe.planning.memory import GRADIENT_BYTES, ExpertShape
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies.fastermoe import FasterMoE
from lrmoe.planning.policies.flexmoe import FlexMoE
from lrmoe.planning.policies.laer import Laer
from lrmoe.planning.policies.llep import LLEP
from lrmoe.planning.problem import Problem

if TYPE_CHECKING:
    from lrmoe.planning.policies import Policy

_MATRICES = 3  # gate, up, down


def fit_policy(
    policy: Policy,
    shape: ExpertShape,
    hardware: Hardware,
    *,
    nodes: int = 1,
    slots: int | None = None,
    constants: Constants | None = None,
) -> Policy:
    """The same policy, deciding with the figures of this expert and these devices.

    Options that are no figures of a model or device (rules, thresholds, intervals) stay as they are. A policy that
    reads neither figures nor a limit, or that comes from a user's file, is returned as it is.

    Args:
        policy: from `get_policy`. shape: sizes of one expert. hardware: the devices.
        nodes: of the expert-parallel group; a policy that knows one bandwidth takes the network's above one.
        slots: most foreign experts of a rank, for policies without a limit of their own; None leaves them without.
        constants: what part of the datasheet's rates is reached; None: the defaults.
    """
    if slots is not None:
        policy = _limited(policy, slots)
    reached = _Rates(hardware, constants or Constants())
    row_seconds = 2 * shape.params / reached.flops
    bandwidth = reached.network if nodes > 1 else reached.inside
    if isinstance(policy, FasterMoE):
        return dataclasses.replace(
            policy, hidden=shape.hidden, width=shape.width, matrices=_MATRICES,
            element_bytes=shape.element_bytes, flops=reached.flops, bandwidth=bandwidth,
        )  # fmt: skip
    if isinstance(policy, Laer):
        return dataclasses.replace(
            policy, pair_bytes=float(shape.row_bytes), pair_seconds=row_seconds, intra_bandwidth=reached.inside,
            inter_bandwidth=reached.network,
        )  # fmt: skip
    if isinstance(policy, FlexMoE):
        sync_seconds = shape.params * GRADIENT_BYTES / bandwidth
        return dataclasses.replace(policy, pair_seconds=3 * row_seconds, sync_seconds=sync_seconds)
    return policy


def _limited(policy: Callable[[Problem], LayerPlan], slots: int) -> Policy:
    """The policy with at most so many foreign experts on a rank."""
    if isinstance(policy, FasterMoE):
        return dataclasses.replace(policy, max_shadows=slots)
    if isinstance(policy, LLEP):
        return dataclasses.replace(policy, slots=slots)
    return policy


@dataclasses.dataclass(frozen=True)
class _Rates:
    """What part of a device's rates is reached."""

    hardware: Hardware
    constants: Constants

    @property
    def flops(self) -> float:
        """FLOP/s of grouped GEMMs."""
        return self.hardware.flops * self.constants.gemm_efficiency

    @property
    def inside(self) -> float:
        """bytes/s inside a node."""
        link = self.hardware.inner_link
        share = self.constants.nvlink_efficiency if link == "nvlink" else self.constants.pcie_efficiency
        return self.hardware.link_bytes_per_s(link) * share

    @property
    def network(self) -> float:
        """bytes/s between nodes."""
        return self.hardware.network_bytes_per_s * self.constants.network_efficiency
