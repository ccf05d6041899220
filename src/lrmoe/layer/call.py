"""One layer call after planning, and the gradient-free walk forward.

Shape letters: T tokens, K slots, H hidden, N pairs of this source, M rows received, L local experts, R ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.distributed import Comm
from lrmoe.layer.controller import Controller, Moment
from lrmoe.layer.experts import Rows, Weights, experts_forward, scratch
from lrmoe.layer.routing import Layout, Routing, token_entries
from lrmoe.ops import combine, gather_rows
from lrmoe.planning import LayerPlan
from lrmoe.telemetry import PhaseClock
from lrmoe.telemetry.record import OpenCall, Telemetry


@dataclass(kw_only=True, eq=False)
class Call:
    """What forward and backward of one call share besides tensors (those go through save_for_backward)."""

    config: LRMoEConfig
    comm: Comm
    controller: Controller
    telemetry: Telemetry
    plan: LayerPlan
    moment: Moment | None
    open_call: OpenCall
    activation: str
    slots: int
    hidden: int
    compute_dtype: torch.dtype
    differentiable: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one hidden row on the wire."""
        return self.hidden * self.compute_dtype.itemsize

    @property
    def scored(self) -> bool:
        """Whether backward will need scores."""
        return self.differentiable and (
            not self.plan.exact or (self.config.observe and self.moment is not None)
        )

    @property
    def keeps_outputs(self) -> bool:
        """Whether expert outputs stay at the token's rank for the gradient of dropped pairs' routing weights."""
        return self.differentiable and self.config.full_router_grad and not self.plan.exact

    @property
    def stash(self) -> bool:
        """Whether the first projection's output stays for backward."""
        return self.differentiable and not self.config.recompute

    def weights(self, gate_up: Tensor, down: Tensor) -> Weights:
        """The local experts' weights in the compute dtype."""
        return Weights(gate_up=self.cast(gate_up), down=self.cast(down), activation=self.activation)

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
        """Dtype of routing weights and of what multiplies gradient rows."""
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True, eq=False)
class Walked:
    """What forward leaves: the output, and what backward needs.

    Attributes:
        out_TH: the layer's output in the compute dtype.
        x: the rows the experts read: the input itself on one rank, the received rows on several (S, H).
        h_M2I: stash, or None; phi_norm_N: fp32 norms at the token's rank, or None; y_NH: expert outputs, or None.
    """

    out_TH: Tensor
    x: Tensor
    h_M2I: Tensor | None
    phi_norm_N: Tensor | None
    y_NH: Tensor | None


def walk_forward(call: Call, x_TH: Tensor, alpha_TK: Tensor, routing: Routing, weights: Weights) -> Walked:
    """pack -> dispatch -> experts -> combine. Every pair is computed."""
    clock, comm, ledger = call.open_call.clock, call.comm, call.open_call.ledger
    ledger.add("weights", weights.gate_up, weights.down)
    with clock.phase("plan"):
        layout = Layout.build(call.plan.counts_RE, comm.rank, x_TH.device)
    x = _dispatch(call, x_TH, routing, layout)
    with clock.phase("experts"):
        y_MH = _output_buffer(call, layout.received, x_TH)
        h_M2I, norm_M = experts_forward(
            weights, x, layout.segments_L, out=y_MH, out_index=layout.row_M, stash=call.stash,
            norms=call.scored and call.config.needs_phi,
        )  # fmt: skip
    with clock.phase("combine"):
        y_NH = send_back(call, y_MH, layout, "combine")
        norm_N = None if norm_M is None else send_back(call, layout.to_received(norm_M), layout, "combine")
        entries = token_entries(routing.order_N, routing.tokens, routing.slots)
        out_TH = combine(y_NH, entries.row_N, entries.ends_T, alpha_TK.reshape(-1)[entries.pair_N])
    ledger.add("stash", h_M2I, norm_N)
    ledger.add("outputs", y_MH, y_NH)
    return Walked(
        out_TH=out_TH, x=x.source, h_M2I=h_M2I, phi_norm_N=norm_N, y_NH=y_NH if call.keeps_outputs else None
    )


def _dispatch(call: Call, x_TH: Tensor, routing: Routing, layout: Layout) -> Rows:
    """Rows at their experts' rank. On one rank nothing moves: the experts gather from the input."""
    if call.comm.size == 1:
        return Rows(source=x_TH, index_M=routing.token_N)
    clock = call.open_call.clock
    with clock.phase("pack"):
        send = gather_rows(
            x_TH, routing.token_N, out=scratch.take("send", (len(routing.token_N), x_TH.shape[1]), x_TH)
        )
    with clock.phase("dispatch"):
        received = call.comm.all_to_all(send, layout.send_R, layout.receive_R)
    call.open_call.sent("dispatch", call.comm.sent_bytes(send, layout.send_R))
    call.open_call.ledger.add("dispatched", send, received)
    return Rows(source=received, index_M=layout.row_M)


def _output_buffer(call: Call, rows: int, like: Tensor) -> Tensor:
    """Expert outputs are scratch unless backward needs them and they do not travel."""
    shape = (rows, like.shape[1])
    if call.keeps_outputs and call.comm.size == 1:
        return like.new_empty(shape)
    return scratch.take("outputs", shape, like)


def send_back(call: Call, rows: Tensor, layout: Layout, phase: str) -> Tensor:
    """Rows in received order, back at the rank they came from, in the order they were sent."""
    call.open_call.sent(phase, call.comm.sent_bytes(rows, layout.receive_R))
    return call.comm.all_to_all(rows, layout.receive_R, layout.send_R)
