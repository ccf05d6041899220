"""Rows between tokens' ranks and seats' ranks: one row per pair, or one per (token, rank) on a lean wire.

    source                                 seat's rank
    rows of pairs, or of (rank, token)  -> received rows, read by index in (seat, source) order
    columns: a few bytes per pair       -> the same in (seat, source) order
    rows per pair, or partial sums      <- results per pair, or summed per received row

On a lean wire a token that goes to several experts of one rank crosses once, and the sum of their results returns once.

Shape letters: T tokens, H hidden, N pairs of this source, M pairs received, U distinct (rank, token) rows of this
source, V rows received, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lrmoe.distributed.comm import Arriving
from lrmoe.layer.buffers import Rows, scratch
from lrmoe.layer.call import Call
from lrmoe.layer.choice import unique_rows
from lrmoe.layer.routing import Layout, group_entries, token_entries
from lrmoe.ops import Reading, combine, gather_rows, upload


@dataclass(frozen=True, kw_only=True, eq=False)
class LeanRows:
    """Distinct rows of one exchange.

    Attributes:
        token_U: int64 (U,), token of each row sent, in (rank, token) order.
        send_R, receive_R: rows to and from each rank.
    """

    token_U: Tensor
    send_R: list[int]
    receive_R: list[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrival:
    """One exchange as this rank's seats see it.

    Attributes:
        layout: which pairs crossed.
        rows: the received rows, one for each pair in (seat, source) order.
        columns: the pairs' columns in that order.
        lean: how rows were shared, or None for one row per pair.
    """

    layout: Layout
    rows: Rows
    columns: list[Tensor]
    lean: LeanRows | None

    def emptied(self) -> Arrival:
        """The same exchange without its rows, which are not read again."""
        none = self.rows.source.new_empty((0, self.rows.source.shape[1]))
        return replace(self, rows=Rows(source=none, index_M=self.rows.index_M))

    @property
    def out_index(self) -> Tensor | None:
        """Where results must lie to travel back: in received order, or as computed where they are summed first."""
        return self.layout.row_M if self.lean is None else None


def send_rows(
    call: Call,
    layout: Layout,
    source_TH: Tensor,
    token_N: Tensor,
    columns: Sequence[Tensor],
    *,
    lean_columns: Sequence[Tensor] = (),
    pack: str,
    travel: str,
    part: str,
    buffer: str = "send",
) -> Arrival:
    """Bring the rows of pairs to their seats.

    Args:
        source_TH: (T, H) rows by token; token_N: int64 (N,), each pair's token in the order of sending.
        columns: (N,) tensors of 1, 4 or 8 bytes an entry that go along; lean_columns: more of them on a lean wire.
        pack, travel: phases that are charged. part: memory part that is booked. buffer: scratch to pack into.
    """
    if call.comm.size == 1:
        return Arrival(
            layout=layout, rows=Rows(source=source_TH, index_M=token_N), columns=list(columns), lean=None
        )
    clock = call.open_call.clock
    with clock.phase(pack):
        lean, extra = None, []
        if call.lean:
            lean, row_N = _lean_rows(call, layout, token_N, source_TH.shape[0], travel)
            extra = [*lean_columns, row_N]
            del row_N
        send = _packed(source_TH, token_N if lean is None else lean.token_U, buffer)
    with clock.phase(travel):
        found = send_columns(call, layout, [*columns, *extra], travel)
        received = _cross(call, layout, lean, send, travel, part)
    if lean is None:
        return Arrival(
            layout=layout, rows=Rows(source=received, index_M=layout.row_M), columns=found, lean=None
        )
    call.open_call.record.bytes_saved_lean -= sum(call.comm.sent_bytes(c, layout.send_R) for c in extra)
    rows = Rows(source=received, index_M=_absolute(found.pop(), layout, lean))
    return Arrival(layout=layout, rows=rows, columns=found, lean=lean)


def send_alike(
    call: Call,
    like: Arrival,
    source_TH: Tensor,
    token_N: Tensor,
    *,
    pack: str,
    travel: str,
    part: str,
    buffer: str,
) -> Rows:
    """Other rows of the pairs of an exchange, sent as that one was; in (seat, source) order at their seats."""
    lean, clock = like.lean, call.open_call.clock
    with clock.phase(pack):
        send = _packed(source_TH, token_N if lean is None else lean.token_U, buffer)
    with clock.phase(travel):
        received = _cross(call, like.layout, lean, send, travel, part)
    return Rows(source=received, index_M=like.rows.index_M)


def _packed(source_TH: Tensor, token: Tensor, buffer: str) -> Tensor:
    """Rows in the order of sending, in scratch."""
    shape = (token.shape[0], source_TH.shape[1])
    return gather_rows(source_TH, token, out=scratch.take(buffer, shape, source_TH))


def _cross(call: Call, layout: Layout, lean: LeanRows | None, send: Tensor, travel: str, part: str) -> Tensor:
    """Packed rows at their seats' ranks."""
    send_R, receive_R = (layout.send_R, layout.receive_R) if lean is None else (lean.send_R, lean.receive_R)
    received = call.comm.all_to_all(send, send_R, receive_R)
    call.open_call.sent(travel, call.comm.sent_bytes(send, send_R))
    call.open_call.ledger.add(part, send, received)
    if lean is not None:
        _book_saving(call, layout.send_R, lean.send_R)
    return received


def send_columns(call: Call, layout: Layout, columns: Sequence[Tensor], travel: str) -> list[Tensor]:
    """A few bytes per pair, as one message; in (seat, source) order at their seats."""
    if call.comm.size == 1 or not columns:
        return list(columns)
    # The widest first: each then begins at a multiple of its width, as its view needs where a single row arrives.
    order = sorted(range(len(columns)), key=lambda i: -columns[i].element_size())
    widths = [columns[i].element_size() for i in order]
    packed = torch.cat([columns[i].contiguous().unsqueeze(1).view(torch.uint8) for i in order], dim=1)
    received = layout.to_seats(call.comm.all_to_all(packed, layout.send_R, layout.receive_R))
    call.open_call.sent(travel, call.comm.sent_bytes(packed, layout.send_R))
    parts = dict(zip(order, received.split(widths, dim=1), strict=True))
    # Flat first: a single row would keep the message's stride, which a view as a wider dtype refuses.
    return [parts[i].reshape(-1).view(column.dtype) for i, column in enumerate(columns)]


def return_rows(call: Call, arrival: Arrival, rows: Tensor, weight_M: Tensor | None, travel: str) -> Tensor:
    """Results back at the pairs' sources: a row per pair in the order of sending, or a partial sum per row sent.

    Args:
        rows: (M, H), laid as `arrival.out_index` says.
        weight_M: factor of each result where they are summed here, (seat, source) order.
    """
    return start_return(call, arrival, rows, weight_M, travel).wait()


def start_return(
    call: Call, arrival: Arrival, rows: Tensor, weight_M: Tensor | None, travel: str
) -> Arriving:
    """`return_rows` that goes on beside what the caller does next."""
    layout, lean = arrival.layout, arrival.lean
    if lean is None:
        return start_back(call, rows, layout, travel)
    assert arrival.rows.index_M is not None, "a lean wire reads rows by index"
    row_M, ends = group_entries(arrival.rows.index_M, sum(lean.receive_R))
    sums = combine(rows, row_M, ends, None if weight_M is None else weight_M[row_M])
    _book_saving(call, layout.receive_R, lean.receive_R)
    call.open_call.sent(travel, call.comm.sent_bytes(sums, lean.receive_R))
    return call.comm.start_all_to_all(sums, lean.receive_R, lean.send_R)


def sum_by_token(
    arrival: Arrival, rows: Tensor, pair_N: Tensor, shape_TK: torch.Size, weight: Tensor | None
) -> Tensor:
    """Sum of returned rows per token, (T, H).

    Args:
        rows: what `return_rows` gave. pair_N: int64 (N,), flat pair ids in the order of sending.
        weight: factors by flat pair id, for one row per pair.
    """
    tokens, slots = shape_TK
    if arrival.lean is not None:
        row_U, ends_T = group_entries(arrival.lean.token_U, tokens)
        return combine(rows, row_U, ends_T)
    entries = token_entries(pair_N, tokens, slots)
    return combine(rows, entries.row_N, entries.ends_T, None if weight is None else weight[entries.pair_N])


def send_back(call: Call, rows: Tensor, layout: Layout, travel: str) -> Tensor:
    """Rows in received order, back at the rank they came from, in the order they were sent."""
    return start_back(call, rows, layout, travel).wait()


def start_back(call: Call, rows: Tensor, layout: Layout, travel: str) -> Arriving:
    """`send_back` that goes on beside what the caller does next."""
    call.open_call.sent(travel, call.comm.sent_bytes(rows, layout.receive_R))
    return call.comm.start_all_to_all(rows, layout.receive_R, layout.send_R)


def _lean_rows(
    call: Call, layout: Layout, token_N: Tensor, tokens: int, travel: str
) -> tuple[LeanRows, Tensor]:
    """The distinct rows of this source, and how many come from the others: the lean wire's own host read.

    And int32 (N,), each pair's row inside its destination's block, which is not needed once it has been sent.
    """
    comm, ranks = call.comm, call.comm.size
    rank_N = _repeat(torch.arange(ranks, device=token_N.device), layout.send_R)
    found, one_each = unique_rows(rank_N, token_N, ranks, tokens), [1] * ranks
    coming_R = comm.all_to_all(found.rows_R, one_each, one_each)
    announced = comm.sent_bytes(found.rows_R, one_each)
    call.open_call.sent(travel, announced)
    call.open_call.record.bytes_saved_lean -= announced
    send_R, receive_R = Reading(torch.stack([found.rows_R, coming_R])).wait().tolist()
    token_U = found.tokens(sum(send_R))
    return LeanRows(token_U=token_U, send_R=send_R, receive_R=receive_R), found.row_N


def _absolute(row_M: Tensor, layout: Layout, lean: LeanRows) -> Tensor:
    """Rows inside each source's block, as rows of the whole received buffer, int64."""
    before = np.cumsum(lean.receive_R) - lean.receive_R
    base_M = layout.to_seats(_repeat(upload(before, row_M.device), layout.receive_R))
    return row_M.long() + base_M


def _repeat(values_R: Tensor, counts_R: Sequence[int]) -> Tensor:
    counts = upload(np.asarray(counts_R, dtype=np.int64), values_R.device)
    return values_R.repeat_interleave(counts, output_size=sum(counts_R))


def _book_saving(call: Call, pairs_R: Sequence[int], rows_R: Sequence[int]) -> None:
    """Rows that one row per pair would have sent more."""
    here = call.comm.rank
    pairs = sum(pairs_R) - pairs_R[here]
    rows = sum(rows_R) - rows_R[here]
    call.open_call.record.bytes_saved_lean += (pairs - rows) * call.row_bytes
