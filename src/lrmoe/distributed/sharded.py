"""Sharded storage: every rank holds an equal part of every expert, and rebuilds the experts it hosts.

    between calls   rank r holds shards (E, P) of each projection, and their optimizer state; P = ceil(size / R)
    fetch           rank r sends each seat's rank its part of the expert; seats hold whole experts (S, 2I, H), (S, H, I)
    return          seats send every rank its part of their gradient; the shard adds the copies in fp32, in seat order

Both are one all-to-all of exactly the elements needed: no layout costs more to reach than another, and no optimizer
state ever moves (LAER-MoE's FSEP, arXiv 2602.11686; SYMI's uniform sharding, arXiv 2504.19925).

Shape letters: R ranks, E experts, Q seats of all ranks, S seats of this rank, P padded elements of a shard, H hidden,
I expert width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lrmoe.distributed.comm import Arriving, Comm
from lrmoe.planning.problem import IntArray, Topology
from lrmoe.planning.seats import Seats
from lrmoe.planning.shards import Cut, ShardExchange, copies_in_turn, home_seats

Cuts = tuple[Cut, Cut]  # of gate and up together, and of down


def cut_experts(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    """A rank's shards of whole experts.

    Args:
        whole: (N, rows, columns), any N.

    Returns:
        (N, P), a new tensor in the dtype of `whole`, padding zero.
    """
    span = cut.span(rank)
    shards = whole.new_zeros((whole.shape[0], cut.shard))
    shards[:, : span.stop - span.start] = whole.detach().reshape(whole.shape[0], cut.size)[:, span]
    return shards


class PendingShards:
    """Whole experts on their way.

    Attributes:
        sent_bytes: what this rank sends to other ranks for it.
    """

    def __init__(self, arriving: Arriving, seats: int, cuts: Sequence[Cut], sent_bytes: int) -> None:
        self._arriving: Arriving | None = arriving
        self._seats, self._cuts = seats, cuts
        self._experts: tuple[Tensor, ...] = ()
        self.sent_bytes = sent_bytes

    def wait(self) -> tuple[Tensor, ...]:
        """One tensor (S, rows, columns) for each projection; later calls return the same tensors."""
        if self._arriving is not None:
            self._experts = _join(self._arriving.wait(), self._seats, self._cuts)
            self._arriving = None
        return self._experts


class PresentShards(PendingShards):
    """Whole experts that need no exchange."""

    def __init__(self, experts: tuple[Tensor, ...]) -> None:
        self._arriving = None
        self._experts = experts
        self.sent_bytes = 0


@torch.no_grad()
def fetch_shards(
    comm: Comm, seats: Seats, gate_up: Tensor, down: Tensor, cuts: Cuts, *, wait: bool = False
) -> PendingShards:
    """Start rebuilding the experts of this rank's seats. Every rank calls it, also one without seats.

    Args:
        seats: of the plan's instances, `seats_of(plan, homes=False)`.
        gate_up, down: this rank's shards (E, P) in the dtype in which weights are wanted; equal on all ranks.
        cuts: `expert_cuts(H, I, R)`.
        wait: end the exchange before returning.

    Returns:
        What to wait for: gate_up (S, 2I, H) and down (S, H, I) in seat order. On one rank that hosts all experts both
        are views of the shards.
    """
    pending = _fetch(comm, seats, (gate_up, down), cuts)
    if wait:
        pending.wait()
    return pending


def _fetch(comm: Comm, seats: Seats, shards: Sequence[Tensor], cuts: Sequence[Cut]) -> PendingShards:
    shards = [shard.detach() for shard in shards]
    if comm.size == 1:
        return PresentShards(_whole(seats.expert_Q, shards, cuts))
    exchange = ShardExchange.of(seats, cuts, comm.rank)
    expert_Q = torch.from_numpy(seats.expert_Q).to(shards[0].device)
    widths = [cut.width(comm.rank) for cut in cuts]
    send_QW = shards[0].new_empty((seats.expert_Q.size, sum(widths)))
    for shard, width, column in zip(shards, widths, send_QW.split(widths, dim=1), strict=True):
        torch.index_select(shard[:, :width], 0, expert_Q, out=column)
    arriving = comm.start_all_to_all(send_QW.view(-1), exchange.shards_R, exchange.seats_R)
    own = seats.of(comm.rank)
    sent_bytes = exchange.fetch_sent * send_QW.element_size()
    return PendingShards(arriving, own.stop - own.start, cuts, sent_bytes)


def _whole(expert_Q: IntArray, shards: Sequence[Tensor], cuts: Sequence[Cut]) -> tuple[Tensor, ...]:
    """Experts where one rank holds all of each."""
    if not np.array_equal(expert_Q, np.arange(shards[0].shape[0])):
        index = torch.from_numpy(expert_Q).to(shards[0].device)
        shards = [shard[index] for shard in shards]
    return tuple(shard.view(-1, cut.rows, cut.columns) for shard, cut in zip(shards, cuts, strict=True))


def _join(received: Tensor, seats: int, cuts: Sequence[Cut]) -> tuple[Tensor, ...]:
    """Experts from the parts of every rank, each part (S, W) with the projections side by side."""
    whole = [received.new_empty((seats, cut.size)) for cut in cuts]
    for rank, part_SW in enumerate(_parts(received, seats, cuts)):
        widths = [cut.width(rank) for cut in cuts]
        for out, cut, column in zip(whole, cuts, part_SW.split(widths, dim=1), strict=True):
            out[:, cut.span(rank)] = column
    return tuple(out.view(seats, cut.rows, cut.columns) for out, cut in zip(whole, cuts, strict=True))


def _parts(flat: Tensor, seats: int, cuts: Sequence[Cut]) -> list[Tensor]:
    """The stretch of each rank in a buffer of whole experts, (S, W) views, W by rank."""
    widths = [sum(cut.width(rank) for cut in cuts) for rank in range(cuts[0].ranks)]
    stretches = flat.split([seats * width for width in widths])
    return [stretch.view(seats, width) for stretch, width in zip(stretches, widths, strict=True)]


@torch.no_grad()
def return_shards(
    comm: Comm, seats: Seats, d_gate_up: Tensor | None, d_down: Tensor | None, cuts: Cuts
) -> tuple[tuple[Tensor | None, Tensor | None], int]:
    """Bring the gradients of this rank's seats home to all shards. Every rank calls it, also one without seats.

    Args:
        seats: as given to `fetch_shards`.
        d_gate_up, d_down: (S, 2I, H) and (S, H, I), in one dtype that is equal on all ranks, in which they travel;
            None, on all ranks alike, where a projection is frozen.

    Returns:
        Gradients of this rank's shards (E, P), zero for experts without a seat and in the padding; copies are summed
        in float32 (float64 for float64), in the order of seats, so repeated calls give the same bits. And the bytes
        sent to other ranks.
    """
    given = [(grad, cut) for grad, cut in zip((d_gate_up, d_down), cuts, strict=True) if grad is not None]
    if not given:
        return (None, None), 0
    grads, there = [grad for grad, _ in given], [cut for _, cut in given]
    exchange = ShardExchange.of(seats, there, comm.rank)
    if comm.size == 1:
        parts_QW = [grad.reshape(-1, cut.size) for grad, cut in zip(grads, there, strict=True)]
    else:
        # The buffer that is sent has no name here: it is freed before the sums are made.
        received = comm.all_to_all(_split(grads, there), exchange.seats_R, exchange.shards_R)
        widths = [cut.width(comm.rank) for cut in there]
        parts_QW = list(received.view(seats.expert_Q.size, sum(widths)).split(widths, dim=1))
    found = iter([_sum_copies(part, seats, cut) for part, cut in zip(parts_QW, there, strict=True)])
    result = (None if d_gate_up is None else next(found), None if d_down is None else next(found))
    return result, exchange.return_sent * grads[0].element_size()


def _split(grads: Sequence[Tensor], cuts: Sequence[Cut]) -> Tensor:
    """What `_join` takes apart again: every rank's part of the seats' gradients, rank after rank."""
    seats = grads[0].shape[0]
    send = grads[0].new_empty(sum(seats * cut.size for cut in cuts))
    for rank, part_SW in enumerate(_parts(send, seats, cuts)):
        widths = [cut.width(rank) for cut in cuts]
        for grad, cut, column in zip(grads, cuts, part_SW.split(widths, dim=1), strict=True):
            column.copy_(grad.reshape(seats, cut.size)[:, cut.span(rank)])
    return send


def _sum_copies(part_QW: Tensor, seats: Seats, cut: Cut) -> Tensor:
    """Shard gradients (E, P) from this rank's part of the gradient of every seat, one turn of copies after another."""
    dtype = torch.float64 if part_QW.dtype == torch.float64 else torch.float32
    sums_EP = part_QW.new_zeros((seats.topology.experts, cut.shard), dtype=dtype)
    sums, parts = sums_EP[:, : part_QW.shape[1]].unbind(), part_QW.unbind()
    for seat_N in copies_in_turn(seats.expert_Q):
        # No expert twice in a turn, so that a sum has one order on every device; nothing is copied on the way.
        torch._foreach_add_([sums[seats.expert_Q[q]] for q in seat_N], [parts[q] for q in seat_N])
    return sums_EP


def gather_homes(comm: Comm, shards: Tensor, cut: Cut) -> Tensor:
    """The whole experts homed on this rank, as a checkpoint holds them: (E / R, rows, columns).

    Args:
        shards: this rank's (E, P) of one projection (or of anything kept beside it). Every rank calls it.
    """
    topology = Topology(ranks=comm.size, experts=shards.shape[0])
    return _fetch(comm, home_seats(topology), (shards,), (cut,)).wait()[0]


def scatter_homes(comm: Comm, homes: Tensor, cut: Cut) -> Tensor:
    """Shards (E, P) of one projection from the home experts (E / R, rows, columns) of all ranks: undoes `gather_homes`.

    The dtype stays; every rank calls it.
    """
    topology = Topology(ranks=comm.size, experts=homes.shape[0] * comm.size)
    exchange = ShardExchange.of(home_seats(topology), (cut,), comm.rank)
    send = _split((homes.detach(),), (cut,))
    received = comm.all_to_all(send, exchange.seats_R, exchange.shards_R)
    shards = homes.new_zeros((topology.experts, cut.shard))
    width = cut.width(comm.rank)
    shards[:, :width] = received.view(topology.experts, width)
    return shards


class KeptShards:
    """Fetches for one layer whose weights may stay from call to call until the optimizer changes them.

    SYMI builds a layout once per optimizer step. A call with the layout of the kept weights exchanges nothing; one
    with another layout fetches, and its weights take the place of the kept ones. All ranks keep or fetch alike, since
    layouts are equal on all of them.
    """

    def __init__(self, comm: Comm, cuts: Cuts) -> None:
        self._comm, self._cuts = comm, cuts
        self._layout: tuple[IntArray, IntArray, torch.dtype] | None = None
        self._pending: PendingShards | None = None

    def fetch(self, seats: Seats, gate_up: Tensor, down: Tensor, *, wait: bool = False) -> PendingShards:
        """`fetch_shards`, or what an earlier call left. `sent_bytes` of weights that stayed is 0."""
        if self._pending is not None and self._fits(seats, gate_up.dtype):
            return PresentShards(self._pending.wait())
        self.release()
        self._pending = fetch_shards(self._comm, seats, gate_up, down, self._cuts, wait=wait)
        self._layout = (seats.expert_Q, seats.rank_Q, gate_up.dtype)
        return self._pending

    def release(self) -> None:
        """Forget the weights: after every optimizer step, and whenever else the shards change."""
        self._pending = self._layout = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the weights that stay."""
        if self._pending is None:
            return 0
        return sum(weight.numel() * weight.element_size() for weight in self._pending.wait())

    def _fits(self, seats: Seats, dtype: torch.dtype) -> bool:
        assert self._layout is not None
        expert_Q, rank_Q, kept = self._layout
        same = np.array_equal(expert_Q, seats.expert_Q) and np.array_equal(rank_Q, seats.rank_Q)
        return same and dtype == kept
