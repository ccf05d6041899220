"""Pairs of every (source, seat) cell: cut into parts of a call, dealt out to what backward keeps, laid in blocks.

A cell is an entry of a table of sources by seats, and holds pairs; the planner's groups of pairs of about equal score
are those of score_bins.py.

Shape letters: R ranks, Q seats of all ranks, V = 2 Q stands (a rank's seats for pairs that stay, then for pairs that
carry their input), P parts of a pass, S most seats of a rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lrmoe.planning.problem import IntArray
from lrmoe.planning.seats import Seats


def ranges(begins: IntArray, lengths: IntArray) -> IntArray:
    """The integers of consecutive ranges [begin, begin + length), one range after the other, int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(begins - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)


def part_of_cells(cells_RQ: IntArray, starts_R: IntArray, part: int, parts: int) -> IntArray:
    """Pairs of one part where every rank's received rows are dealt out to `parts` parts, int64 (R, Q).

    Row p of a rank, counted in (seat, source) order, belongs to part p mod parts: the parts of a rank differ by one row
    at most, and so do those of every cell.
    """
    return np.ascontiguousarray(_parts(cells_RQ, starts_R, np.array([part]), parts)[0])


def all_parts(cells_RQ: IntArray, starts_R: IntArray, parts: int) -> IntArray:
    """Pairs of every part, int64 (P, R, Q)."""
    if parts == 1:
        return cells_RQ[None]
    return _parts(cells_RQ, starts_R, np.arange(parts), parts)


def _parts(cells_RQ: IntArray, starts_R: IntArray, which_P: IntArray, parts: int) -> IntArray:
    flat = np.ascontiguousarray(cells_RQ.T).reshape(-1)
    before = np.cumsum(flat) - flat
    ranks = cells_RQ.shape[0]
    first = np.concatenate((before, [int(flat.sum())]))[starts_R[:-1] * ranks]
    before = before - np.repeat(first, np.diff(starts_R) * ranks)
    shift = (parts - 1 - which_P)[:, None]
    found = (before + flat + shift) // parts - (before + shift) // parts
    return found.reshape(-1, *cells_RQ.T.shape).transpose(0, 2, 1)


def between_ranks(cells_PRQ: IntArray, starts_R: IntArray) -> IntArray:
    """Pairs from every source to every rank, int64 (P, R, R)."""
    ends = np.concatenate((np.zeros_like(cells_PRQ[..., :1]), np.cumsum(cells_PRQ, axis=2)), axis=2)
    return np.diff(ends[..., starts_R], axis=2)


def stands(starts_R: IntArray, stay_RQ: IntArray, carry_RQ: IntArray) -> IntArray:
    """Columns of both tables rank by rank: a rank's seats for pairs that stay, then for those that carry, (R, V)."""
    begin, size = starts_R[:-1], np.diff(starts_R)
    seats = stay_RQ.shape[1]
    begins = np.stack((begin, begin + seats), axis=1).reshape(-1)
    return np.concatenate((stay_RQ, carry_RQ), axis=1)[:, ranges(begins, np.repeat(size, 2))]


def carry_stands(starts_R: IntArray) -> NDArray[np.bool_]:
    """Which stands are of pairs that carry their input, bool (V,), from the first stand of every rank."""
    middle_R = (starts_R[:-1] + starts_R[1:]) // 2
    return np.arange(int(starts_R[-1])) >= np.repeat(middle_R, np.diff(starts_R))


def expected_kept(seats: Seats, quota_E: IntArray) -> IntArray:
    """About how many pairs of every cell backward keeps, int64 (R, Q): each expert's quota by shares, summing to it."""
    order = seats.by_expert_Q
    cells = seats.assign_RQ[:, order].T  # (seat by expert, source)
    expert = seats.expert_Q[order]
    upto = np.cumsum(cells.reshape(-1)).reshape(cells.shape)
    first = np.searchsorted(expert, expert)
    begin = (upto - cells)[first, 0][:, None]
    total = np.bincount(expert, weights=cells.sum(axis=1), minlength=quota_E.size).astype(np.int64)
    share = quota_E[expert][:, None] / np.maximum(total[expert], 1)[:, None]
    ends, starts = ((edge * share + 1e-9).astype(np.int64) for edge in (upto - begin, upto - cells - begin))
    last = (upto - begin) == total[expert][:, None]
    ends = np.where(last, quota_E[expert][:, None], ends)
    starts = np.where((upto - cells - begin) == total[expert][:, None], quota_E[expert][:, None], starts)
    kept = np.empty_like(seats.assign_RQ)
    kept[:, order] = np.minimum(ends - starts, cells).T
    return kept


def seat_table(starts_R: IntArray) -> IntArray:
    """Seats of every rank, int64 (R, S), padded by the number of all seats."""
    size = np.diff(starts_R)
    places = np.arange(int(size.max(initial=0)))
    return np.where(places < size[:, None], starts_R[:-1, None] + places, starts_R[-1])


def largest_run(rows_PQ: IntArray, table_RS: IntArray, homes: int, limit: int | None) -> IntArray:
    """Rows of the largest run of seats that experts compute at once, int64 (P, R).

    A run ends once it has `limit` rows, at the last home seat and at the last seat.

    Args:
        rows_PQ: rows of each seat. table_RS: see `seat_table`. homes: home seats of each rank.
        limit: None for no limit.
    """
    padded = np.concatenate((rows_PQ, np.zeros_like(rows_PQ[:, :1])), axis=1)
    rows = padded[:, table_RS]  # (P, R, S)
    if limit is None:
        return np.maximum(rows[..., :homes].sum(axis=2), rows[..., homes:].sum(axis=2))
    run = np.zeros(rows.shape[:2], dtype=np.int64)
    most = run.copy()
    for seat in range(rows.shape[2]):
        run = run + rows[..., seat]
        np.maximum(most, run, out=most)
        run = np.where((run >= limit) | (seat == homes - 1), 0, run)
    return most
