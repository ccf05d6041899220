"""Order of pairs on the token's rank and of rows on the expert's rank.

A pair is one (token, slot); its flat id is token * K + slot. On the token's rank ("source") pairs are sent by (seat,
token), which is also the order of destinations because seats lie rank after rank. The expert's rank receives rows by
(source, seat) and computes in the order (seat, source).

Shape letters: T tokens, K slots, N pairs of this source, M rows received here, R ranks, E experts, Q seats of all
ranks, S seats of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lrmoe.ops import cpu, upload
from lrmoe.planning.cells import ranges
from lrmoe.planning.problem import IntArray


def sort_pairs(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Flat pair ids sorted by expert, ids outside [0, experts) last, and pairs per expert.

    Returns:
        order (T*K,) int64, stable; counts_E (E,) int64 on the device of the ids. The first sum(counts) entries of
        the order are the pairs that exist.
    """
    key_N = expert_keys(ids_TK, experts)
    return sort_keys(key_N, experts), count_keys(key_N, experts)


def expert_keys(ids_TK: Tensor, experts: int) -> Tensor:
    """Expert of each flat pair id, `experts` where there is none, (T*K,)."""
    flat = ids_TK.reshape(-1)
    return torch.where((flat >= 0) & (flat < experts), flat, experts)


def count_keys(key_N: Tensor, experts: int) -> Tensor:
    """Pairs per expert, int64 (E,)."""
    return count_classes(key_N, experts + 1)[:experts]


def sort_keys(key_N: Tensor, experts: int) -> Tensor:
    """Flat pair ids sorted by expert, int64, stable."""
    narrow = key_N.to(torch.int16) if experts < 2**15 else key_N
    return torch.sort(narrow, stable=True).indices


def tokens_of(pair_N: Tensor, slots: int) -> Tensor:
    """Token of each flat pair id, int64 (N,)."""
    if slots > 0 and slots & (slots - 1) == 0:  # a quarter of the time of a division
        return pair_N >> (slots.bit_length() - 1)
    return pair_N // max(slots, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenEntries:
    """Rows of each token in slot order: what `ops.combine` needs.

    Attributes:
        row_N: int64 (N,), row numbers, all of token 0 first.
        pair_N: int64 (N,), flat pair id of each entry.
        ends_T: int64 (T,), end of each token's entries.
    """

    row_N: Tensor
    pair_N: Tensor
    ends_T: Tensor


def token_entries(pair_N: Tensor, tokens: int, slots: int) -> TokenEntries:
    """Sort rows by (token, slot); row i belongs to pair `pair_N[i]`, no pair twice."""
    if (found := cpu.token_entries(pair_N, tokens, slots)) is not None:
        return TokenEntries(row_N=found[0], pair_N=found[1], ends_T=found[2])
    device, pairs = pair_N.device, tokens * slots
    if pair_N.shape[0] == pairs:  # every pair exists: the inverse permutation, without a sort
        every = torch.arange(pairs, device=device)
        row = torch.empty_like(every)
        row[pair_N] = every
        return TokenEntries(
            row_N=row, pair_N=every, ends_T=torch.arange(1, tokens + 1, device=device) * slots
        )
    sorted_pairs, row = torch.sort(pair_N)
    ends = torch.searchsorted(sorted_pairs, torch.arange(1, tokens + 1, device=device) * slots)
    return TokenEntries(row_N=row, pair_N=sorted_pairs, ends_T=ends)


def group_entries(group_N: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Rows of each group, in their own order: (row numbers int64 (N,), ends int64 (groups,)) for `ops.combine`."""
    row_N = torch.sort(group_N, stable=True).indices
    return row_N, count_classes(group_N, groups).cumsum(0)


def count_classes(class_N: Tensor, classes: int) -> Tensor:
    """How often each of [0, classes) occurs in integers (N,), int64 (classes,); bincount would wait for a device."""
    if class_N.device.type == "cpu":
        return torch.bincount(class_N, minlength=classes)
    index_N = class_N.long()  # a recompute's ids are narrow
    return index_N.new_zeros(classes).index_add_(0, index_N, torch.ones_like(index_N))


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Pairs that cross between ranks, for one direction of one pass; the other direction mirrors it.

    Attributes:
        send_R, receive_R: pairs to and from each rank.
        segments_S: pairs of each seat of this rank.
        row_M: int64 (M,), for each pair in (seat, source) order its place in received order; None on one rank, where
            both orders are the same.
    """

    send_R: list[int]
    receive_R: list[int]
    segments_S: list[int]
    row_M: Tensor | None

    @property
    def received(self) -> int:
        """M, pairs received here."""
        return sum(self.receive_R)

    @property
    def sent(self) -> int:
        """N, pairs sent from here."""
        return sum(self.send_R)

    @classmethod
    def build(cls, cells_RQ: IntArray, starts_R: IntArray, rank: int, device: torch.device) -> Layout:
        """From the pairs of every (source, seat), int64 (R, Q), and the first seat of every rank, int64 (R + 1,)."""
        total = np.concatenate(([0], np.cumsum(cells_RQ[rank])))
        mine_RS = cells_RQ[:, starts_R[rank] : starts_R[rank + 1]]
        alone = cells_RQ.shape[0] == 1
        return cls(
            send_R=np.diff(total[starts_R]).tolist(),
            receive_R=mine_RS.sum(axis=1).tolist(),
            segments_S=mine_RS.sum(axis=0).tolist(),
            row_M=None if alone else upload(expert_order(mine_RS), device),
        )

    def to_received(self, value_M: Tensor) -> Tensor:
        """Values in (seat, source) order, put into received order."""
        return (
            value_M if self.row_M is None else torch.empty_like(value_M).index_copy_(0, self.row_M, value_M)
        )

    def to_seats(self, value_M: Tensor) -> Tensor:
        """Values in received order, put into (seat, source) order."""
        return value_M if self.row_M is None else value_M[self.row_M]


def expert_order(mine_RS: IntArray) -> IntArray:
    """Received-order place of every row in (seat, source) order, int64 (M,)."""
    flat = mine_RS.reshape(-1)
    starts_RS = (np.cumsum(flat) - flat).reshape(mine_RS.shape)
    return ranges(starts_RS.T.reshape(-1), mine_RS.T.reshape(-1))


def transposed(value_M: Tensor, cells_AB: IntArray) -> Tensor:
    """Values in the order (a, b), put into the order (b, a).

    Args:
        cells_AB: how many there are of each (a, b), int64 (A, B).
    """
    across = cells_AB.shape[1]
    if 1 in cells_AB.shape:
        return value_M
    runs = value_M.split(cells_AB.reshape(-1).tolist())
    return torch.cat([run for first in range(across) for run in runs[first::across]])
