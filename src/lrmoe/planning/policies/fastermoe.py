"""FasterMoE: shadow the hottest experts on every rank while its cost model sees a gain.

Source: PPoPP'22 (doi 10.1145/3503221.3508418), algorithm 1; laekov/fastmoe fmoe/fastermoe/shadow_policy.py.
Inputs: counts of the current call. Acts: every layer call. Moves: the whole expert is broadcast to all ranks, kept
until backward, and its gradients are reduced to the owner. Slots: no limit of its own (`max_shadows` sets one).
Ours: the papers' two-matrix expert (2 alpha H^2 parameters) is replaced by the expert's true parameter count, and
the machine's figures are options of both rules; the public code's own defaults are 11.5e12 flop/s, 6.25e9 bytes/s,
hidden 2048, width 4096, 2 matrices, 4 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.policies._layout import check_option, held_traffic, home_layout, make_plan, split_each
from lrmoe.planning.problem import IntArray, Problem

INFO = PolicyInfo(
    title="FasterMoE",
    source="PPoPP'22, doi 10.1145/3503221.3508418; github.com/laekov/fastmoe (Apache-2.0)",
    inputs="current counts",
    acts="every call",
    moves="whole experts broadcast to all ranks, kept until backward; gradients reduced to the owner",
    slots="unbounded",
    note="paper rule (per rank) by default, code rule (per expert) as an option; true parameter count of the expert",
)


@dataclass(frozen=True, kw_only=True)
class FasterMoE:
    """The FasterMoE planner.

    Attributes:
        rule: "paper" (loads per rank) or "code" (loads per expert, as the public code decides).
        hidden, width, matrices: sizes of an expert; it has matrices * hidden * width parameters.
        element_bytes: bytes of a weight or activation element.
        flops: throughput of a rank, flop/s.
        bandwidth: bytes/s between ranks.
        max_shadows: most experts shadowed in a call, or None.

    Raises:
        PlanError: an option out of range.
    """

    rule: str = "paper"
    hidden: int = 2048
    width: int = 768
    matrices: int = 3
    element_bytes: int = 2
    flops: float = 400e12
    bandwidth: float = 50e9
    max_shadows: int | None = None

    def __post_init__(self) -> None:
        check_option(self.rule in ("paper", "code"), "rule", self.rule, "'paper' or 'code'")
        for name in ("hidden", "width", "matrices", "element_bytes", "flops", "bandwidth"):
            check_option(getattr(self, name) > 0, name, getattr(self, name), "positive")
        limit = self.max_shadows
        check_option(limit is None or limit >= 0, "max_shadows", limit, "None or at least 0")

    def __call__(self, problem: Problem) -> LayerPlan:
        """Plan one call."""
        copies_RE = home_layout(problem.topology)
        copies_RE[:, self.shadows(problem)] = 1

        def shadow(expert: int, hosts_J: IntArray) -> IntArray:
            return np.diag(problem.counts_RE[:, expert])

        assign_RJ = split_each(problem.counts_RE, copies_RE, shadow)
        return make_plan(problem, copies_RE, assign_RJ, traffic=held_traffic(problem, copies_RE))

    def shadows(self, problem: Problem) -> list[int]:
        """The experts to shadow, hottest first; stops at the first that brings no gain."""
        if problem.topology.ranks == 1:
            return []
        order = np.argsort(-problem.counts_E, kind="stable")
        found = self._by_rank(problem, order) if self.rule == "paper" else self._by_expert(problem, order)
        return found if self.max_shadows is None else found[: self.max_shadows]

    @property
    def _row_compute(self) -> float:
        """Seconds of one pair's forward; backward costs twice as much again."""
        return 2 * self._parameters / self.flops

    @property
    def _row_wire(self) -> float:
        """Seconds to send one pair."""
        return self.hidden * self.element_bytes / self.bandwidth

    @property
    def _parameters(self) -> float:
        return float(self.matrices * self.hidden * self.width)

    @property
    def _send_model(self) -> float:
        """Seconds to send one expert."""
        return self._parameters * self.element_bytes / self.bandwidth

    def _by_rank(self, problem: Problem, order: IntArray) -> list[int]:
        """Algorithm 1: exchange counts while nothing is shadowed, broadcast and reduction of shadows after that."""
        home_E = problem.topology.home_E
        load_R = problem.counts_E.reshape(problem.topology.ranks, -1).sum(axis=1)
        best = (3 * self._row_compute + 4 * self._row_wire) * float(load_R.max())
        chosen: list[int] = []
        for expert in order.tolist():
            owner = home_E[expert]
            local_R = problem.counts_RE[:, expert]
            load_R = load_R + local_R
            load_R[owner] -= local_R.sum()
            cost = 3 * self._row_compute * float(load_R.max()) + 2 * (len(chosen) + 1) * self._send_model
            if cost >= best:
                break
            best = cost
            chosen.append(expert)
        return chosen

    def _by_expert(self, problem: Problem, order: IntArray) -> list[int]:
        """The public code: the hottest expert not shadowed stands for the most loaded rank."""
        load = problem.counts_E[order].tolist()
        row = 3 * self._row_compute + 4 * self._row_wire
        best, extra = row * load[0], 0.0
        chosen: list[int] = []
        for expert, following in zip(order.tolist(), load[1:], strict=False):
            extra += self._send_model
            cost = row * following + extra
            if cost >= best:
                break
            best = cost
            chosen.append(expert)
        return chosen
