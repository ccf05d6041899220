"""Replica traffic: weights of foreign seats out to their slots, gradients of foreign seats home.

    fetch    home weights ---> slots (relays send on from their slots)      in the compute dtype
    return   foreign gradients ---> relays add ---> home adds               fp32 (fp64 for fp64), in a fixed order

Who sends what when is planned in `planning.copies`, which also says what a rank allocates: its slots to fetch; to
return, a few received gradients and, where the home's own gradients are narrower, the sums in progress.

Shape letters: L home experts, F foreign seats of this rank, H hidden, I expert width.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lrmoe.distributed.comm import Comm
from lrmoe.distributed.messages import Exchange
from lrmoe.errors import InputError
from lrmoe.planning.copies import Messages, fetch_messages, open_sums, return_messages
from lrmoe.planning.seats import Seats

Projections = tuple[
    Tensor | None, Tensor | None
]  # gate_up and down of some experts; None: frozen, on all ranks
Ends = list[tuple[int, Tensor]]  # the rank at the other end and what goes there, or comes from there
Parts = list[Tensor]  # one expert's tensors, one per projection that is not frozen


class Pending:
    """Weights on their way into this rank's slots; made by `fetch_replicas`.

    Attributes:
        slots: where they will lie. sent_bytes: bytes that this rank sends to other ranks, relayed ones included.
    """

    def __init__(self, comm: Comm, messages: Messages, rows: _Rows, slots: tuple[Tensor, Tensor]) -> None:
        self._comm, self._rows, self.slots = comm, rows, slots
        self._rounds = _rounds(messages, comm.rank)
        self.sent_bytes = _sent_bytes(messages, comm.rank, slots)
        # A later round starts in `wait` on both of its ends, or the calls in between would meet out of order.
        self._running = self._start(self._rounds.pop(0)) if 0 in self._rounds else None

    def wait(self) -> tuple[Tensor, Tensor]:
        """Finish; gate_up (F, 2I, H) and down (F, H, I) of this rank's foreign seats in seat order."""
        if self._running is not None:
            self._running.wait()
            self._running = None
        while self._rounds:
            self._start(self._rounds.pop(min(self._rounds))).wait()
        return self.slots

    def _start(self, turn: _Turn) -> Exchange:
        sends = [(end, part) for end, expert in turn.sends for part in self._rows.of(expert)]
        receives = [(end, part) for end, expert in turn.receives for part in self._rows.of(expert)]
        return Exchange(self._comm, sends, receives)


def fetch_replicas(
    comm: Comm,
    seats: Seats,
    gate_up: Tensor,
    down: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    wait: bool = False,
) -> Pending:
    """Start fetching the weights of this rank's foreign seats. Every rank of the group calls it.

    Weights are sent from where they lie and must stay as they are until `Pending.wait` returns; slots must not be read
    before. An expert with up to `copies.DIRECT` foreign copies goes out at once, beside what the caller does next; the
    further rounds of a hot expert's tree run in `wait`.

    Args:
        seats: all ranks' seats with homes, alike on every rank.
        gate_up: (L, 2I, H), this rank's home weights, contiguous. down: (L, H, I).
        out: contiguous slots for at least F experts, shapes and dtypes as above; None: new ones.
        wait: finish before returning.

    Raises:
        InputError: `out` too small, or of another shape or dtype.
    """
    foreign = _foreign(seats, comm.rank)
    given = (None, None) if out is None else out
    slots = (_slots(gate_up, len(foreign), given[0]), _slots(down, len(foreign), given[1]))
    rows = _Rows(seats, comm.rank, (gate_up, down), slots)
    pending = Pending(comm, fetch_messages(seats), rows, slots)
    if wait:
        pending.wait()
    return pending


class Returning:
    """Gradients on their way to their homes; made by `start_return`.

    Attributes:
        sent_bytes: bytes that this rank sends to other ranks, relayed ones included.
    """

    def __init__(self, comm: Comm, seats: Seats, wide: Projections, home: Projections) -> None:
        messages = return_messages(seats)
        self._comm = comm
        self._sums = _Sums(seats, comm.rank, messages, home, wide)
        self._rounds = _rounds(messages, comm.rank)
        self.sent_bytes = _sent_bytes(messages, comm.rank, wide)
        # As of `Pending`: a later round starts in `wait` on both of its ends.
        self._running = self._start(0) if 0 in self._rounds else None

    @torch.no_grad()
    def wait(self) -> None:
        """Finish: the home gradients, complete by now, have those of the copies added."""
        if self._running is not None:
            self._end(*self._running)
            self._running = None
        while self._rounds:
            self._end(*self._start(min(self._rounds)))

    def _start(self, number: int) -> tuple[_Turn, list[Parts], Exchange]:
        turn = self._rounds.pop(number)
        arriving, sends, receives = self._sums.ends(turn)
        return turn, arriving, Exchange(self._comm, sends, receives)

    def _end(self, turn: _Turn, arriving: list[Parts], exchange: Exchange) -> None:
        exchange.wait()
        self._sums.add(turn, arriving)


@torch.no_grad()
def start_return(comm: Comm, seats: Seats, foreign: Projections | None, home: Projections) -> Returning:
    """Start to add the gradients of all foreign seats to those at their homes, in place. Every rank calls it.

    Sums run in fp32 (fp64 for fp64) in an order that depends on the seats alone, the home's own gradient first, and are
    rounded once, to the home gradient's dtype. Home gradients are not touched before `Returning.wait`: they may still
    be computed meanwhile.

    Args:
        seats: all ranks' seats with homes, alike on every rank.
        foreign: gate_up (F, 2I, H) and down (F, H, I) gradients of this rank's foreign seats in seat order, contiguous.
            In the dtype of sums they travel as they lie and are scratch afterwards (a relay adds to them); narrower
            ones are widened into new memory first. None where F is 0.
        home: gate_up (L, 2I, H) and down (L, H, I) gradients of this rank's home experts, contiguous. None, here and in
            `foreign`: a projection without gradients, on all ranks alike.

    Raises:
        InputError: gradients of foreign seats missing, or of another shape than the seats and `home` say.
    """
    count = len(_foreign(seats, comm.rank))
    given = (None, None) if foreign is None else foreign
    wide = (_widened(given[0], home[0], count), _widened(given[1], home[1], count))
    return Returning(comm, seats, wide, home)


def return_gradients(comm: Comm, seats: Seats, foreign: Projections | None, home: Projections) -> int:
    """`start_return` and the wait for it: bytes that this rank sent to other ranks."""
    returning = start_return(comm, seats, foreign, home)
    returning.wait()
    return returning.sent_bytes


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """One round of one rank: the rank at the other end and the expert of every message, in a fixed order."""

    sends: list[tuple[int, int]]
    receives: list[tuple[int, int]]


def _rounds(messages: Messages, rank: int) -> dict[int, _Turn]:
    """The rounds in which a rank takes part, in order."""
    mine = np.flatnonzero((messages.sender_M == rank) | (messages.receiver_M == rank))
    columns = (messages.round_M, messages.sender_M, messages.receiver_M, messages.expert_M)
    turns: dict[int, _Turn] = {}
    for when, sender, receiver, expert in zip(*(column[mine].tolist() for column in columns), strict=True):
        turn = turns.setdefault(when, _Turn(sends=[], receives=[]))
        if sender == rank:
            turn.sends.append((receiver, expert))
        else:
            turn.receives.append((sender, expert))
    return turns


class _Rows:
    """Where this rank keeps an expert: a row of its home tensors, or a row of its slots."""

    def __init__(self, seats: Seats, rank: int, home: Projections, slots: Projections) -> None:
        self._first = rank * seats.topology.experts_per_rank
        self._slot_of = {expert: slot for slot, expert in enumerate(_foreign(seats, rank))}
        self._home = [tensor.detach() for tensor in home if tensor is not None]
        self._slots = [tensor.detach() for tensor in slots if tensor is not None]

    def at_home(self, expert: int) -> bool:
        """Whether this rank is the expert's home."""
        return expert not in self._slot_of

    def of(self, expert: int) -> Parts:
        """The expert's tensors, views."""
        if expert in self._slot_of:
            return [tensor[self._slot_of[expert]] for tensor in self._slots]
        return [tensor[expert - self._first] for tensor in self._home]


class _Sums:
    """Sums of gradients on one rank: in a relay's own slots, in home gradients as wide as sums, else in rows beside."""

    def __init__(
        self, seats: Seats, rank: int, messages: Messages, home: Projections, wide: Projections
    ) -> None:
        self._rows = _Rows(seats, rank, home, wide)
        self._staging = _beside(home, int(messages.window_R[rank]))
        narrow = any(tensor is not None and tensor.dtype != _sum_dtype(tensor) for tensor in home)
        room = int(open_sums(seats, messages)[:, rank].max(initial=0)) if narrow else 0
        self._beside, self._free = _beside(home, room), list(range(room))
        self._narrow = narrow
        self._missing = Counter(messages.expert_M[messages.receiver_M == rank].tolist())
        self._open: dict[int, int] = {}

    def ends(self, turn: _Turn) -> tuple[list[Parts], Ends, Ends]:
        """Of one round: where each of its gradients arrives, and what is sent and received, in order."""
        sends = [(end, part) for end, expert in turn.sends for part in self._rows.of(expert)]
        arriving = [[tensor[place] for tensor in self._staging] for place in range(len(turn.receives))]
        receives = [
            (end, part) for (end, _), parts in zip(turn.receives, arriving, strict=True) for part in parts
        ]
        return arriving, sends, receives

    def add(self, turn: _Turn, arrived: list[Parts]) -> None:
        """Add what came in."""
        for (_, expert), parts in zip(turn.receives, arrived, strict=True):
            self._add(expert, parts)

    def _add(self, expert: int, parts: Parts) -> None:
        sums = self._sums(expert)
        for total, part in zip(sums, parts, strict=True):
            total.add_(part)
        self._missing[expert] -= 1
        if expert in self._open and not self._missing[expert]:
            for home, total in zip(self._rows.of(expert), sums, strict=True):
                home.copy_(total)
            self._free.append(self._open.pop(expert))

    def _sums(self, expert: int) -> Parts:
        """The expert's sum so far, begun with this rank's own gradient."""
        own = self._rows.of(expert)
        if not self._narrow or not self._rows.at_home(expert):
            return own
        if expert not in self._open:
            self._open[expert] = self._free.pop()
            for tensor, part in zip(self._beside, own, strict=True):
                tensor[self._open[expert]].copy_(part)
        return [tensor[self._open[expert]] for tensor in self._beside]


def _foreign(seats: Seats, rank: int) -> list[int]:
    """Experts of a rank's foreign seats, in seat order."""
    mine = seats.of(rank)
    expert_Q: list[int] = seats.expert_Q[mine][seats.foreign_Q[mine]].tolist()
    return expert_Q


def _sent_bytes(messages: Messages, rank: int, rows: Projections) -> int:
    """Bytes of a rank's messages, of one row of each projection."""
    width = sum(t.shape[1:].numel() * t.element_size() for t in rows if t is not None)
    return int(np.count_nonzero(messages.sender_M == rank)) * width


def _slots(weights: Tensor, count: int, out: Tensor | None) -> Tensor:
    """The first `count` rows of `out`, or new ones like `weights`."""
    if out is None:
        return weights.new_empty((count, *weights.shape[1:]))
    if out.shape[0] < count or out.shape[1:] != weights.shape[1:] or out.dtype != weights.dtype:
        raise InputError(
            f"out: {out.dtype} {tuple(out.shape)} cannot hold {count} experts of {weights.dtype} "
            f"{tuple(weights.shape[1:])}"
        )
    return out[:count]


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _beside(home: Projections, count: int) -> list[Tensor]:
    """Room for `count` experts in the dtype of sums."""
    return [t.new_empty((count, *t.shape[1:]), dtype=_sum_dtype(t)) for t in home if t is not None]


def _widened(foreign: Tensor | None, home: Tensor | None, count: int) -> Tensor | None:
    """Gradients of `count` foreign seats in the dtype of sums."""
    if home is None:
        return None
    if foreign is None:
        foreign = home[:0]
    if foreign.shape != (count, *home.shape[1:]):
        raise InputError(
            f"foreign: gradients of shape {tuple(foreign.shape)} for {count} foreign seats of shape "
            f"{tuple(home.shape[1:])}"
        )
    return foreign.to(_sum_dtype(home))
