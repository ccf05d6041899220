"""From scores to the kept set of one call: scores travel, rows do not yet.

Shape letters: N pairs of this source, M rows received, L local experts, R ranks; P kept pairs of this source, Q kept
rows at this home.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lrmoe.layer.announce import make_problem
from lrmoe.layer.call import Call, send_back
from lrmoe.layer.randomness import UNIT_BITS
from lrmoe.layer.routing import Layout
from lrmoe.layer.scores import pair_scores
from lrmoe.layer.selection import (
    Candidates,
    Choice,
    added_variance,
    choose,
    choose_within_share,
    inclusion,
    measure,
)
from lrmoe.planning import LayerPlan, get_policy, split_quota
from lrmoe.telemetry.record import OBSERVED

_OBSERVED_DROPS = (0.1, 0.3, 0.5)


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """The pairs that backward runs.

    Attributes:
        pair_P: int64 flat pair ids at this source, in the order of sending.
        source_P: int64 positions among this source's pairs, or None for all of them.
        weight_P: fp32 weights (1/pi), or None for 1.
        home_Q: int64 positions among the rows of this home, (expert, source) order, or None for all of them.
        layout: how the kept rows cross between ranks.
    """

    pair_P: Tensor
    source_P: Tensor | None
    weight_P: Tensor | None
    home_Q: Tensor | None
    layout: Layout


def keep_all(order_N: Tensor, layout: Layout) -> Kept:
    """Nothing is left out."""
    return Kept(pair_P=order_N, source_P=None, weight_P=None, home_Q=None, layout=layout)


def select_pairs(
    call: Call, g_TH: Tensor, alpha_N: Tensor, order_N: Tensor, phi_norm_N: Tensor | None, layout: Layout
) -> Kept:
    """Score this source's pairs and choose the kept set, over all ranks or within this rank's share."""
    clock, config = call.open_call.clock, call.config
    with clock.phase("score"):
        score_N = pair_scores(config.score, g_TH, alpha_N, order_N // max(call.slots, 1), phi_norm_N)
    with clock.phase("select"):
        if config.selection == "local" and call.comm.size > 1 and not config.observe:
            return _select_local(call, score_N, order_N, layout)
        return _select_global(call, score_N, order_N, layout)


def _select_global(call: Call, score_N: Tensor, order_N: Tensor, layout: Layout) -> Kept:
    """The expert's home sees all scores of its experts, chooses, and returns each pair's weight."""
    comm, rank = call.comm, call.comm.rank
    call.open_call.sent("select", comm.sent_bytes(score_N, layout.send_R))
    score_M = layout.to_experts(comm.all_to_all(score_N, layout.send_R, layout.receive_R))
    local = call.plan.topology.experts_per_rank
    experts = np.arange(rank * local, (rank + 1) * local)
    rows = _candidates(call, score_M, call.plan.counts_E[experts], call.plan.quota_E[experts], experts)
    _learn(call, rows)
    if call.plan.exact:
        _observe(call, rows, experts)
        return keep_all(order_N, layout)
    choice = choose(call.config.estimator, call.config.score, rows)
    _book(call, rows, choice)
    weight_recv = layout.to_received(choice.weight_M)
    weight_N = send_back(call, weight_recv, layout, "select")
    if comm.size == 1:
        kept_P = _nonzero(weight_N, call.plan.kept)
        kept_layout = replace(
            layout, segments_L=rows.quota_L.tolist(), receive_R=[len(kept_P)], send_R=[len(kept_P)]
        )
        return Kept(
            pair_P=order_N[kept_P],
            source_P=kept_P,
            weight_P=weight_N[kept_P],
            home_Q=kept_P,
            layout=kept_layout,
        )
    kept_layout = _kept_layout(call, weight_N, weight_recv, layout)
    return _kept(order_N, weight_N, choice.weight_M, kept_layout)


def _select_local(call: Call, score_N: Tensor, order_N: Tensor, layout: Layout) -> Kept:
    """This source fills its share of every quota; the home learns which rows, one byte each."""
    comm, counts_RE = call.comm, call.plan.counts_RE
    offset_E = _share_offsets(call)
    share_RE = split_quota(call.plan.quota_E, counts_RE, offset_E)
    experts = np.arange(counts_RE.shape[1])
    rows = _candidates(call, score_N, counts_RE[comm.rank], share_RE[comm.rank], experts, salt=comm.rank + 1)
    up_E, chance_E = _rounding(call, comm.rank)
    choice = choose_within_share(
        call.config.estimator, call.config.score, rows, _tensor(chance_E, score_N), _tensor(up_E, score_N)
    )
    _book(call, rows, choice)
    mask_N = (choice.weight_M > 0).to(torch.uint8)
    call.open_call.sent("select", comm.sent_bytes(mask_N, layout.send_R))
    mask_M = layout.to_experts(comm.all_to_all(mask_N, layout.send_R, layout.receive_R))
    return _kept(order_N, choice.weight_M, mask_M, Layout.build(share_RE, comm.rank, score_N.device))


def _kept(order_N: Tensor, weight_N: Tensor, weight_M: Tensor, layout: Layout) -> Kept:
    source_P = _nonzero(weight_N, sum(layout.send_R))
    home_Q = _nonzero(weight_M, layout.received)
    return Kept(
        pair_P=order_N[source_P], source_P=source_P, weight_P=weight_N[source_P], home_Q=home_Q, layout=layout
    )


def _nonzero(weight: Tensor, size: int) -> Tensor:
    """Positions of the kept rows; their number is known, so that a device need not be read."""
    if weight.device.type == "cpu":
        kept = weight.nonzero().squeeze(1)
        assert kept.shape[0] == size, f"{kept.shape[0]} rows kept, the plan says {size}"
        return kept
    return torch.nonzero_static(weight, size=size).squeeze(1)


def _kept_layout(call: Call, weight_N: Tensor, weight_recv: Tensor, layout: Layout) -> Layout:
    """Kept rows between all ranks as this rank sees them: what it sends, and what reaches each of its experts."""
    comm, counts_RE = call.comm, call.plan.counts_RE
    local = call.plan.topology.experts_per_rank
    mine_RL = counts_RE[:, comm.rank * local : (comm.rank + 1) * local]
    sums = torch.cat(
        [
            _segment_counts(weight_N, np.asarray(layout.send_R)),
            _segment_counts(weight_recv, mine_RL.reshape(-1)),
        ]
    )
    found = sums.cpu().numpy()
    return Layout.from_parts(found[: comm.size], found[comm.size :].reshape(mine_RL.shape), weight_N.device)


def _segment_counts(weight: Tensor, lengths: NDArray[np.int64]) -> Tensor:
    """Nonzero entries of each consecutive segment, int64."""
    total = torch.nn.functional.pad((weight > 0).cumsum(0), (1, 0))
    ends = np.cumsum(lengths)
    return total[_tensor(ends, weight)] - total[_tensor(ends - lengths, weight)]


def _candidates(
    call: Call, score: Tensor, counts: NDArray[np.int64], quota: NDArray[np.int64], experts: NDArray[np.int64],
    salt: int = 0,
) -> Candidates:  # fmt: skip
    assert call.moment is not None, "only training calls prune"
    key = replace(call.controller.key(call.moment), salt=salt)
    return Candidates(
        score_M=score,
        counts_L=_tensor(counts, score),
        quota_L=_tensor(quota, score),
        offset_L=_tensor(key.offsets(experts), score),
        word_L=_tensor(key.words(experts).view(np.int64), score),
    )


def _share_offsets(call: Call) -> NDArray[np.int64] | None:
    """One offset per expert for rounding shares at random (`sampled`); None rounds the cumulative shares down."""
    if call.config.estimator == "topk" or call.moment is None:
        return None
    counts = call.plan.counts_E
    key = replace(call.controller.key(call.moment), salt=-1)
    uniform = key.offsets(np.arange(counts.shape[0]))
    return (uniform * counts) >> UNIT_BITS


def _rounding(call: Call, rank: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """This source's shares rounded up, and the probability that rounding went up."""
    counts, total = call.plan.counts_RE[rank], np.maximum(call.plan.counts_E, 1)
    whole, rest = np.divmod(counts * call.plan.quota_E, total)
    return whole + (rest > 0), np.where(rest > 0, rest / total, 1.0)


def _tensor(array: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device, non_blocking=True)


def _learn(call: Call, rows: Candidates) -> None:
    """Teach the planner the mean score of each expert (`selection="global"`: the home sees all of its scores)."""
    if call.open_call.repeated:
        return
    finite = torch.where(rows.score_M.isfinite(), rows.score_M, 0.0).double()
    total = torch.nn.functional.pad(finite.cumsum(0), (1, 0))
    end = rows.counts_L.cumsum(0)
    call.controller.learn(total[end] - total[end - rows.counts_L], rows.counts_L)


def _book(call: Call, rows: Candidates, choice: Choice) -> None:
    loss, pending = measure(rows, choice), call.open_call.pending
    pending.update(
        energy=loss.energy,
        energy_dropped=loss.dropped,
        variance_added=loss.variance,
        nonfinite_scores=loss.nonfinite,
    )


def _observe(call: Call, rows: Candidates, experts: NDArray[np.int64]) -> None:
    """What this call would have saved and lost at a few drops: sums that ranks can add, and peaks."""
    pending = call.open_call.pending
    energy_M = torch.where(rows.score_M.isfinite(), rows.score_M, 0.0).double().square()
    pending["energy"] = energy_M.sum()
    for drop in sorted({*_OBSERVED_DROPS, call.config.max_drop} - {0}):
        problem = make_problem(call.config, call.plan.counts_RE, call.plan.topology, drop, None)
        plan = get_policy(call.config.policy)(problem)
        quota_L = _tensor(plan.quota_E[experts], rows.score_M)
        chance_M = inclusion(replace(rows, quota_L=quota_L))
        pending[f"{OBSERVED}variance_added_{drop}"] = added_variance(energy_M, chance_M)
        saved_R, mean = plan.forward_load_R - plan.backward_load_R, max(plan.pairs / plan.topology.ranks, 1)
        observed = call.open_call.record.observed
        observed[f"backward_peak_{drop}"] = float(plan.backward_load_R.max()) / mean
        observed[f"rows_saved_{drop}"] = float(saved_R[call.comm.rank])
        observed[f"bytes_saved_{drop}"] = _bytes_saved(call, plan)


def _bytes_saved(call: Call, plan: LayerPlan) -> float:
    """Bytes that this rank would not send in backward: gradient rows out, input-gradient rows back."""
    rank, home_E = call.comm.rank, plan.topology.home_E
    dropped_RE = plan.counts_RE * (1 - plan.quota_E / np.maximum(plan.counts_E, 1))
    out = dropped_RE[rank, home_E != rank].sum()
    back = np.delete(dropped_RE, rank, axis=0)[:, home_E == rank].sum()
    return float(out + back) * call.row_bytes
