"""The kept set fixed in forward (`select_in="forward"`): what is dropped leaves nothing behind, backward asks nobody.

    alpha, random   chosen from routing weights before rows travel; a byte beside every pair says whether its row stays
    alpha_phi       chosen when the projection-input norms are home; then the bytes travel, and the rest is let go

Forward itself computes every row as it always does: values, products and their order are those of a choice in backward.

Shape letters: N pairs of this source, M rows received, P of them stay, R ranks, Q seats of all ranks, V stands, U
distinct rows of a lean wire.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lrmoe.layer.buffers import Rows, Stash
from lrmoe.layer.call import Call, KeptSet
from lrmoe.layer.pruning import select_pairs
from lrmoe.layer.reroute import Route, kept_table, nonzero, reroute
from lrmoe.ops import gather_rows, upload
from lrmoe.planning.cells import carry_stands
from lrmoe.planning.problem import IntArray


def fix_kept(
    call: Call, alpha_TK: Tensor, order_N: Tensor, place_N: Tensor | None, norm_N: Tensor | None
) -> KeptSet:
    """Choose the kept set, or take it over from the forward that a checkpoint repeats.

    Args:
        order_N, place_N: flat pair ids by expert, and the order of sending (see Walked).
        norm_N: fp32 (N,), projection-input norms by expert, where the score reads them.
    """
    if call.memo.kept is not None:
        return call.memo.kept
    alpha_N = alpha_TK.reshape(-1)[order_N]
    weight_N = select_pairs(call, None, alpha_N, order_N, norm_N)
    assert weight_N is not None, "a call that drops pairs weighs them"
    with call.open_call.clock.phase("reroute"):
        kept_RQ = kept_table(call, weight_N if place_N is None else weight_N[place_N])
    kept = KeptSet(weight_N=weight_N, kept_RQ=kept_RQ)
    if call.memo.asked:
        call.memo.kept = kept
    return kept


@dataclass(frozen=True, kw_only=True, eq=False)
class Stays:
    """Pairs whose rows stay at their seats for backward; the others are dropped, or move and carry their input.

    Attributes:
        flag_N: uint8 (N,), 1 where a row stays, in the order of sending.
        cells_RQ: int64 (R, Q), how many of every source stay at each seat.
    """

    flag_N: Tensor
    cells_RQ: IntArray

    @classmethod
    def of(cls, call: Call, kept: KeptSet, place_N: Tensor | None) -> Stays:
        """From the kept set and the way back that follows from it."""
        with call.open_call.clock.phase("reroute"):
            route = reroute(call, place_N, kept.weight_N, kept.weight_N.device, kept.kept_RQ)
            flag_N = kept.weight_N > 0 if not route.carried else _staying(call, route, kept.weight_N)
            flag_N = (flag_N if place_N is None else flag_N[place_N]).to(torch.uint8)
            return cls(flag_N=flag_N, cells_RQ=route.staying_RQ)

    def at_seats(self, call: Call, flag_M: Tensor) -> Stash:
        """The rows that stay here, from their flags in (seat, source) order."""
        here_RS = self.cells_RQ[:, call.seats.of(call.comm.rank)]
        return Stash(index_P=nonzero(flag_M, int(here_RS.sum())), counts_S=here_RS.sum(axis=0).tolist())


def _staying(call: Call, route: Route, like_N: Tensor) -> Tensor:
    """Which of this source's pairs are kept and do not move, bool (N,), by expert."""
    assert route.source_P is not None, "a pruned call sends some of its pairs"
    stay_P = np.flatnonzero(np.repeat(~carry_stands(route.starts_R), route.cells_RV[call.comm.rank]))
    at_P = route.source_P[upload(stay_P, like_N.device)]
    return torch.zeros_like(like_N, dtype=torch.bool).index_fill_(0, at_P, True)


def keep_inputs(call: Call, rows: Rows, lean: bool, index_P: Tensor) -> Rows:
    """Input rows of the pairs that stay, in (seat, source) order, in a buffer of their own.

    Args:
        rows: those of all pairs, (seat, source) order; index_P: int64 (P,), the pairs that stay.
        lean: several pairs may share a row, which then stays once.
    """
    if call.comm.size == 1:
        return rows  # the layer's input itself
    assert rows.index_M is not None, "received rows are read by index"
    row_P = rows.index_M[index_P]
    if not lean:
        kept = Rows(source=gather_rows(rows.source, row_P), index_M=None)
    else:
        stays_U = torch.zeros(rows.source.shape[0], dtype=torch.bool, device=row_P.device)
        stays_U.index_fill_(0, row_P, True)
        place_U = stays_U.cumsum(0).sub_(1)
        kept = Rows(source=gather_rows(rows.source, stays_U.nonzero().squeeze(1)), index_M=place_U[row_P])
    call.open_call.ledger.follow(kept.source)
    return kept
