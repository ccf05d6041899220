"""Order of pairs on the token's rank and of rows on the expert's rank.

A pair is one (token, slot); its flat id is token * K + slot. On the token's rank ("source") pairs are sorted by expert,
which is also the order of destinations because homes are contiguous. The expert's rank ("home") receives rows by
(source, expert) and computes in the order (expert, source).

Shape letters: T tokens, K slots, N pairs of this source, M rows received here, R ranks, E experts, L local experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lrmoe.planning import LayerPlan
from lrmoe.planning.problem import IntArray


def sort_pairs(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Flat pair ids sorted by expert, ids outside [0, experts) last, and pairs per expert.

    Returns:
        order (T*K,) int64, stable; counts_E (E,) int64 on the device of the ids. The first sum(counts) entries of
        the order are the pairs that exist.
    """
    flat = ids_TK.reshape(-1)
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    narrow = key.to(torch.int16) if experts < 2**15 else key
    return torch.sort(narrow, stable=True).indices, counts


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """Where this source's pairs go.

    Attributes:
        order_N: int64 (N,), flat pair ids in the order of sending.
        token_N: int64 (N,), their tokens.
        slots: K.
        tokens: T.
    """

    order_N: Tensor
    token_N: Tensor
    slots: int
    tokens: int

    @classmethod
    def build(cls, order: Tensor, pairs: int, shape_TK: tuple[int, int]) -> Routing:
        """From the sorted order of `sort_pairs`, of which the first `pairs` exist."""
        order_N = order[:pairs]
        return cls(
            order_N=order_N, token_N=order_N // max(shape_TK[1], 1), slots=shape_TK[1], tokens=shape_TK[0]
        )


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Rows that cross between ranks, for one direction of one pass; the other direction mirrors it.

    Attributes:
        send_R, receive_R: rows to and from each rank.
        segments_L: rows of each local expert.
        row_M: int64 (M,), for each row in (expert, source) order its place in received order; None on one rank, where
            both orders are the same.
    """

    send_R: list[int]
    receive_R: list[int]
    segments_L: list[int]
    row_M: Tensor | None

    @property
    def received(self) -> int:
        """M, rows received here."""
        return sum(self.receive_R)

    @classmethod
    def build(cls, counts_RE: IntArray, rank: int, device: torch.device) -> Layout:
        """From the pairs of every (source, expert): all of them in forward, the kept ones in backward."""
        ranks = counts_RE.shape[0]
        local = counts_RE.shape[1] // ranks
        send_R = counts_RE[rank].reshape(ranks, -1).sum(axis=1)
        return cls.from_parts(send_R, counts_RE[:, rank * local : (rank + 1) * local], device)

    @classmethod
    def from_parts(cls, send_R: IntArray, mine_RL: IntArray, device: torch.device) -> Layout:
        """From what this rank sends to each rank, and what each source sends to each expert homed here."""
        alone = mine_RL.shape[0] == 1
        return cls(
            send_R=send_R.tolist(),
            receive_R=mine_RL.sum(axis=1).tolist(),
            segments_L=mine_RL.sum(axis=0).tolist(),
            row_M=None if alone else torch.from_numpy(expert_order(mine_RL)).to(device, non_blocking=True),
        )

    def to_received(self, value_M: Tensor) -> Tensor:
        """Values in (expert, source) order, put into received order."""
        return (
            value_M if self.row_M is None else torch.empty_like(value_M).index_copy_(0, self.row_M, value_M)
        )

    def to_experts(self, value_M: Tensor) -> Tensor:
        """Values in received order, put into (expert, source) order."""
        return value_M if self.row_M is None else value_M[self.row_M]


def expert_order(mine_RL: IntArray) -> IntArray:
    """Received-order place of every row in (expert, source) order, int64 (M,)."""
    flat = mine_RL.reshape(-1)
    starts_RL = (np.cumsum(flat) - flat).reshape(mine_RL.shape)
    lengths, starts = mine_RL.T.reshape(-1), starts_RL.T.reshape(-1)
    begins = np.cumsum(lengths) - lengths
    return np.repeat(starts - begins, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def home_only(plan: LayerPlan) -> bool:
    """Whether every expert runs at home and nowhere else: what this version's runtime executes."""
    topology = plan.topology
    return np.array_equal(plan.instance_expert_J, np.arange(topology.experts)) and np.array_equal(
        plan.instance_rank_J, topology.home_E
    )
