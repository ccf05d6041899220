"""One layer call after planning: what its forward and backward share.

Shape letters: Q seats of all ranks, S seats of this rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.distributed import Comm
from lrmoe.layer.budget import CallBudget
from lrmoe.layer.controller import Controller, Moment
from lrmoe.layer.weights import Storage
from lrmoe.planning import LayerPlan
from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import Seats
from lrmoe.telemetry import PhaseClock
from lrmoe.telemetry.record import OpenCall, Telemetry


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptSet:
    """The kept set where forward fixes it.

    Attributes:
        weight_N: fp32 (N,), 1/pi of this source's pairs by expert, 0 of those that are left out.
        kept_RQ: int64 (R, Q), kept pairs of every source at its forward seats.
    """

    weight_N: Tensor
    kept_RQ: IntArray


@dataclass(kw_only=True, eq=False)
class Memo:
    """What a forward and its recompute in a checkpoint share.

    Attributes:
        asked: whether a recompute may come. kept: the set that forward fixed, where one may.
    """

    asked: bool = False
    kept: KeptSet | None = None


@dataclass(kw_only=True, eq=False)
class Call:
    """What forward and backward of one call share besides tensors (those go through save_for_backward)."""

    config: LRMoEConfig
    comm: Comm
    controller: Controller
    telemetry: Telemetry
    storage: Storage
    plan: LayerPlan
    seats: Seats
    budget: CallBudget
    moment: Moment | None
    open_call: OpenCall
    activation: str
    slots: int
    hidden: int
    compute_dtype: torch.dtype
    differentiable: bool
    memo: Memo

    @property
    def row_bytes(self) -> int:
        """Bytes of one hidden row on the wire."""
        return self.hidden * self.compute_dtype.itemsize

    @property
    def seated(self) -> list[int]:
        """Expert of each seat of this rank."""
        experts: list[int] = self.seats.expert_Q[self.seats.of(self.comm.rank)].tolist()
        return experts

    @property
    def foreign(self) -> int:
        """How many of them are foreign."""
        mine = self.seats.of(self.comm.rank)
        return int(self.seats.foreign_Q[mine].sum())

    @property
    def scored(self) -> bool:
        """Whether backward will need scores."""
        return self.differentiable and (
            not self.plan.exact or (self.config.observe and self.moment is not None)
        )

    @property
    def selects_early(self) -> bool:
        """Whether forward fixes the kept set, so that what is dropped leaves nothing behind."""
        return self.differentiable and self.config.select_in == "forward" and not self.plan.exact

    @property
    def keeps_outputs(self) -> bool:
        """Whether expert outputs stay at the token's rank for the gradient of dropped pairs' routing weights."""
        return self.differentiable and self.config.full_router_grad and not self.plan.exact

    @property
    def keeps_rows(self) -> bool:
        """Whether rows and their first projection stay at their seats for backward; else backward sends them again."""
        return (
            self.differentiable
            and self.plan.forward_chunks == 1
            and not (self.plan.recompute or self.config.recompute)
        )

    @property
    def carries(self) -> bool:
        """Whether backward may have to send inputs again: of pairs that move, or of all."""
        return self.comm.size > 1 and (not self.keeps_rows or self.seats.spread)

    @property
    def lean(self) -> bool:
        """Whether a token crosses once for all its experts of a rank."""
        return self.comm.size > 1 and self.config.lean and not self.keeps_outputs

    def book_slots(self, *weights: Tensor) -> None:
        """Count weights of foreign seats: under replicas in forward; in backward they come once more, under no part."""
        ledger = self.open_call.ledger
        for tensor in weights:
            if ledger.sealed:
                ledger.follow(tensor)
            else:
                ledger.add("replicas", tensor)

    def cast(self, tensor: Tensor) -> Tensor:
        """The tensor in the compute dtype; the time of a real cast counts as the experts'."""
        if tensor.dtype == self.compute_dtype:
            return tensor
        with self.open_call.clock.phase("experts"):
            return tensor.to(self.compute_dtype)

    def repeated(self) -> Call:
        """This call for one more backward through a retained graph: its record is complete and stays as it is."""
        record = dataclasses.replace(self.open_call.record, bytes={}, observed={})
        clock = PhaseClock(torch.device("cpu"))
        return dataclasses.replace(self, open_call=OpenCall(record=record, clock=clock, repeated=True))

    def scale_dtype(self) -> torch.dtype:
        """Dtype of routing weights, of what multiplies gradient rows, and of sums over parts of a call."""
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32
