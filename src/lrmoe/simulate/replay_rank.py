"""What one rank really does in a replayed call: pack, grouped products, unpack, forward and backward.

The steps are the layer's, with its own experts and its own blocks, over rows read by index: activations "stash" keeps
rows and first projections where they lie until backward has ended; "recompute" keeps nothing at the experts, and
backward sends the kept pairs' inputs again. Scratch is that of a call under a byte budget: new for each use.

Shape letters: T tokens, H hidden, I expert width, N pairs of a source, M rows of a rank, P kept pairs of a source, L
home seats, F foreign slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lrmoe.layer.buffers import Rows, Sink, scratch
from lrmoe.layer.experts import experts_backward, experts_forward
from lrmoe.layer.routing import Layout, token_entries
from lrmoe.layer.seat_weights import Needs, Slots, WeightGrads, Weights
from lrmoe.ops import combine, gather_rows
from lrmoe.planning.seats import Seats
from lrmoe.simulate.replay_data import Data
from lrmoe.simulate.replay_memory import Held
from lrmoe.simulate.replay_routes import Backward, Wire
from lrmoe.simulate.replay_times import Times

ACTIVATION = "silu"


def owned(seats: Seats) -> bool:
    """Whether every rank has seats for all its home experts: their weights lie there, only foreign ones need slots."""
    return int((~seats.foreign_Q).sum()) == seats.topology.experts


class Rank:
    """One rank's call: `forward`, then `backward`, both in `scratch.fresh()`.

    Attributes:
        held: bytes it holds. y_MH, norm_M: of the last forward, rows in received order, norms in (seat, source, token)
            order. grads: of its seats after backward: of home seats in the compute dtype, of others in that of sums.
            dx: input gradients of its rows in received order.
    """

    def __init__(self, data: Data, seats: Seats, forward: Wire, rank: int, slots: int, times: Times) -> None:
        self._data, self._wire, self._rank, self._times = data, forward, rank, times
        self._source = data.sources[rank]
        self.y_MH: Tensor | None = None
        self.norm_M: Tensor | None = None
        self.held = Held()
        self._weights = _seated(data, seats, rank, slots)
        self.held.add("weights", self._weights.gate_up, self._weights.down)
        self.held.add("replicas", *_given(*self._weights.foreign()))

    def forward(self, *, stash: bool, norms: bool) -> None:
        """pack -> dispatch (handed over) -> experts -> combine.

        Args:
            stash: keep rows and first projections. norms: keep norms of the second projection's inputs.
        """
        data, wire, rank, held = self._data, self._wire, self._rank, self.held
        pair_N = wire.pair_R[rank]
        send = self._pack("forward", self._source.x_TH, pair_N)
        held.add("send", send)
        x_MH = wire.receive(rank, [s.x_TH for s in data.sources], data.slots)
        held.add("dispatched", x_MH)
        held.drop("send")
        del send
        with self._times.phase("forward", rank, "plan_layout"):
            layout = wire.layout(rank, data.device)
        with self._times.phase("forward", rank, "experts"):
            y = Sink(lambda: scratch.take("outputs", (layout.received, data.shape.hidden), data.gate_up))
            self._h, self.norm_M = experts_forward(
                self._weights, Rows(source=x_MH, index_M=layout.row_M), layout.segments_S, out=y,
                out_index=layout.row_M, stash=stash, norms=norms,
            )  # fmt: skip
        y_MH = y.whole
        held.add("stash", *_given(self._h))
        held.add("outputs", y_MH)
        keeps = stash or data.ranks == 1
        self._x, self.y_MH = x_MH if keeps else None, y_MH
        if not keeps:
            held.drop("dispatched")
        del x_MH
        y_NH = _home(y_MH, len(pair_N))
        held.add("outputs", y_NH)
        with self._times.phase("forward", rank, "combine"):
            self._sum(y_NH, pair_N, self._source.alpha_TK)
        held.drop("outputs")
        if norms:
            held.add("stash", torch.empty(len(pair_N), dtype=torch.float32, device=data.device))

    def backward(self, kept: Backward) -> None:
        """Pack gradient rows and inputs, exchange (handed over), experts' backward, return."""
        data, rank, held, times = self._data, self._rank, self.held, self._times
        self.y_MH = self.norm_M = None
        held.restart()
        self._take_grads(add=kept.again is not None and not kept.all_carried)
        with times.phase("backward", rank, "layout"):
            layout = kept.wire.layout(rank, data.device)
        g = self._arrive(kept.wire, [s.g_TH for s in data.sources], layout)
        columns = self._columns(kept, layout)
        x = None if kept.again is None else self._arrive_again(kept.again)
        dx = Sink(lambda: scratch.take("dx", (layout.received, data.shape.hidden), data.gate_up))
        with times.phase("backward", rank, "experts_backward"):
            self.dot = self._experts(kept, layout, g, x, columns, dx)
        self.dx = dx.whole
        held.add("backward", self.dx)  # what products have brought is alive since they began
        held.add("grads", *_given(*self._grads.home))
        held.add("replicas", *_given(*self._grads.foreign))
        held.replace("backward", self.dx)
        del g, x
        pair_P = kept.wire.pair_R[rank]
        dx_PH = _home(self.dx, len(pair_P))
        held.add("backward", dx_PH)
        with times.phase("backward", rank, "return"):
            layout.to_received(self.dot)
            self._sum(dx_PH, pair_P, None)
            self._return_alpha(pair_P)

    def add_home(self, copies: int) -> None:
        """Add so many experts' gradients, as foreign seats send them home, to their home's: sums in fp32."""
        if not copies:
            return
        found = [t[0] for t in _given(*self.grads) if len(t)][:2]
        total = [torch.zeros_like(home, dtype=self._data.scale_dtype) for home in found]
        arriving = [torch.ones_like(into) for into in total]
        with self._times.phase("backward", self._rank, "replicas"):
            for _ in range(copies):
                for into, grad, home in zip(total, arriving, found, strict=True):
                    home.copy_(into.copy_(home).add_(grad))

    @property
    def grads(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """gate_up and down of home seats, then of slots; a slot beyond the seats means nothing."""
        found = self._grads
        return *found.home, *found.foreign

    def _pack(self, side: str, table_TH: Tensor, pair_N: Tensor) -> Tensor:
        with self._times.phase(side, self._rank, "pack"):
            token_N = pair_N // self._data.slots
            out = scratch.take("send", (len(token_N), table_TH.shape[1]), table_TH)
            return gather_rows(table_TH, token_N, out=out)

    def _take_grads(self, *, add: bool) -> None:
        """Buffers as the layer takes them in a call of one part."""
        wide = self._data.scale_dtype
        self._grads = WeightGrads.like(
            self._weights,
            Needs(gate_up=True, down=True),
            home=self._weights.gate_up.dtype,
            slots=wide,
            zero=add,
        )
        self._add = add

    def _arrive(self, wire: Wire, table_R: Sequence[Tensor], layout: Layout) -> Rows:
        """Rows of tokens packed here, and those that arrive; (seat, source, token) order by index."""
        send = self._pack("backward", table_R[self._rank], wire.pair_R[self._rank])
        self.held.add("send", send)
        rows = wire.receive(self._rank, table_R, self._data.slots)
        self.held.add("backward", rows)
        self.held.drop("send")
        return Rows(source=rows, index_M=layout.row_M)

    def _arrive_again(self, again: Wire) -> Rows:
        """Inputs of the pairs that carry them."""
        with self._times.phase("backward", self._rank, "layout_again"):
            layout = again.layout(self._rank, self._data.device)
        return self._arrive(again, [s.x_TH for s in self._data.sources], layout)

    def _columns(self, kept: Backward, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """Scales and positions of the rows, in (seat, source, token) order."""
        scale = torch.cat(kept.wire.part(self._rank, kept.scale_R))
        at = kept.position_R
        position = None if at is None else torch.cat(kept.wire.part(self._rank, at))
        with self._times.phase("backward", self._rank, "columns"):
            return layout.to_seats(scale), None if position is None else layout.to_seats(position)

    def _experts(
        self,
        kept: Backward,
        layout: Layout,
        g: Rows,
        again: Rows | None,
        columns: tuple[Tensor, Tensor | None],
        dx: Sink,
    ) -> Tensor:
        """Experts' backward of pairs that stayed, then of those that carry their input: dots in row order."""
        seats, dots = len(layout.segments_S) // 2, []
        staying = sum(layout.segments_S[:seats])
        if not kept.all_carried:
            x, h = self._kept_inputs(columns[1], staying)
            dots.append(
                self._run(layout, layout.segments_S[:seats], slice(0, staying), x, h, g, columns[0], dx)
            )
        if again is not None:
            at = slice(staying, layout.received)
            dots.append(self._run(layout, layout.segments_S[seats:], at, again, None, g, columns[0], dx))
        return dots[0] if len(dots) == 1 else torch.cat(dots)

    def _run(
        self,
        layout: Layout,
        counts: list[int],
        at: slice,
        x: Rows,
        h: Rows | None,
        g: Rows,
        scale: Tensor,
        dx: Sink,
    ) -> Tensor:
        index = None if layout.row_M is None else layout.row_M[at]
        return experts_backward(
            self._weights, x, h, g.part(at), scale[at], counts, dx=dx, dx_index=index,
            dx_from=None if at == slice(0, layout.received) else at.start, grads=self._grads, add=self._add,
        )  # fmt: skip

    def _kept_inputs(self, position_M: Tensor | None, staying: int) -> tuple[Rows, Rows | None]:
        """Inputs and first projections of the pairs that stayed, where forward left them."""
        assert self._x is not None, "rows that stayed were kept"
        row_M = self._wire.layout(self._rank, self._data.device).row_M
        received = None if position_M is None else position_M[:staying].long()
        at = received if row_M is None or received is None else _inverse(row_M)[received]
        x = Rows(source=self._x, index_M=row_M if received is None else received)
        return x, None if self._h is None else Rows(source=self._h, index_M=at)

    def _sum(self, rows: Tensor, pair_P: Tensor, alpha_TK: Tensor | None) -> Tensor:
        """Rows that came home, summed per token; weighed where routing weights are given."""
        tokens, slots = self._source.ids_TK.shape
        entries = token_entries(pair_P, tokens, slots)
        weight = None if alpha_TK is None else alpha_TK.reshape(-1)[entries.pair_N]
        return combine(rows, entries.row_N, entries.ends_T, weight)

    def _return_alpha(self, pair_P: Tensor) -> Tensor:
        """Gradient of the routing weights of kept pairs, from one number per pair that comes home."""
        grad = torch.zeros(self._source.alpha_TK.numel(), device=pair_P.device)
        grad[pair_P] = torch.ones(len(pair_P), device=pair_P.device)
        return grad


def _seated(data: Data, seats: Seats, rank: int, slots: int) -> Weights:
    """Weights of a rank's seats: its own experts' where they lie, and slots for the others, some perhaps empty."""
    homes = data.local if owned(seats) else 0
    expert_S = torch.from_numpy(seats.expert_Q[seats.of(rank)]).to(data.device)

    def buffer(table: Tensor, size: int, expert_F: Tensor) -> Tensor:
        out = table.new_empty((size, *table.shape[1:]))
        torch.index_select(table, 0, expert_F, out=out[: len(expert_F)])
        return out

    tables = (data.gate_up, data.down)
    home = [buffer(table, homes, expert_S[:homes]) for table in tables]
    spare = None
    if slots > homes:
        spare = Slots.here(*(buffer(table, slots - homes, expert_S[homes:]) for table in tables))
    return Weights(gate_up=home[0], down=home[1], activation=ACTIVATION, slots=spare)


def _inverse(order_M: Tensor) -> Tensor:
    found = torch.empty_like(order_M)
    found[order_M] = torch.arange(order_M.shape[0], device=order_M.device)
    return found


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _home(like: Tensor, rows: int) -> Tensor:
    """Stands for rows that came home: of the right size, every page written, values that nobody reads."""
    return like.new_full((rows, like.shape[1]), 0.5)
