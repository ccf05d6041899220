"""From scores to the kept set of one call: scores travel, rows do not yet.

Shape letters: N pairs of this source by expert, M pairs of the experts homed here, L of them, R ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lrmoe.layer.asking import make_problem
from lrmoe.layer.call import Call
from lrmoe.layer.left_out import Loss, added_variance
from lrmoe.layer.randomness import UNIT_BITS, offsets_of
from lrmoe.layer.routing import tokens_of, transposed
from lrmoe.layer.scores import pair_scores
from lrmoe.layer.selection import Candidates, choose, choose_within_share, inclusion
from lrmoe.ops import upload
from lrmoe.planning import LayerPlan, get_policy, split_quota
from lrmoe.telemetry.record import OBSERVED

_OBSERVED_DROPS = (0.1, 0.3, 0.5)


def select_pairs(
    call: Call, g_TH: Tensor | None, alpha_N: Tensor, order_N: Tensor, phi_norm_N: Tensor | None
) -> Tensor | None:
    """Score this source's pairs and choose the kept set, over all ranks or within this rank's share.

    Args:
        g_TH: gradient at the output; None in forward, for the scores that do not need it.
        alpha_N, phi_norm_N: routing weights and projection-input norms; order_N: flat pair ids; all by expert.

    Returns:
        fp32 (N,), each pair's weight (1/pi), 0 where it is left out; None where all are kept with weight 1.
    """
    clock, config = call.open_call.clock, call.config
    with clock.phase("score"):
        score_N = pair_scores(config.score, g_TH, alpha_N, tokens_of(order_N, call.slots), phi_norm_N)
    with clock.phase("select"):
        if config.selection == "local" and call.comm.size > 1 and not config.observe:
            return _select_local(call, score_N)
        return _select_global(call, score_N)


def _select_global(call: Call, score_N: Tensor) -> Tensor | None:
    """The expert's home sees all scores of its experts, chooses, and returns each pair's weight."""
    comm, rank = call.comm, call.comm.rank
    local, counts_RE = call.plan.topology.experts_per_rank, call.plan.counts_RE
    experts = np.arange(rank * local, (rank + 1) * local)
    cells_RL = counts_RE[:, experts]
    send_R, receive_R = counts_RE[rank].reshape(-1, local).sum(axis=1).tolist(), cells_RL.sum(axis=1).tolist()
    call.open_call.sent("select", comm.sent_bytes(score_N, send_R))
    score_M = transposed(comm.all_to_all(score_N, send_R, receive_R), cells_RL)
    rows = _candidates(call, score_M, call.plan.counts_E[experts], call.plan.quota_E[experts], experts)
    _learn(call, rows)
    if call.plan.exact:
        _observe(call, rows, experts)
        return None
    choice = choose(call.config.estimator, call.config.score, rows)
    _book(call, choice.loss)
    weight_M = transposed(choice.weight_M, cells_RL.T)
    call.open_call.sent("select", comm.sent_bytes(weight_M, receive_R))
    return comm.all_to_all(weight_M, receive_R, send_R)


def _select_local(call: Call, score_N: Tensor) -> Tensor:
    """This source fills its share of every quota."""
    rank, counts_RE = call.comm.rank, call.plan.counts_RE
    share_RE = split_quota(call.plan.quota_E, counts_RE, _share_offsets(call))
    experts = np.arange(counts_RE.shape[1])
    rows = _candidates(call, score_N, counts_RE[rank], share_RE[rank], experts, salt=rank + 1)
    _learn(call, rows)
    up_E, chance_E = _rounding(call, rank)
    choice = choose_within_share(
        call.config.estimator,
        call.config.score,
        rows,
        upload(chance_E, score_N.device),
        upload(up_E, score_N.device),
    )
    _book(call, choice.loss)
    return choice.weight_M


def _candidates(
    call: Call, score: Tensor, counts: NDArray[np.int64], quota: NDArray[np.int64], experts: NDArray[np.int64],
    salt: int = 0,
) -> Candidates:  # fmt: skip
    assert call.moment is not None, "only training calls prune"
    words = replace(call.controller.key(call.moment), salt=salt).words(experts)
    numbers = upload(np.stack([counts, quota, offsets_of(words), words.view(np.int64)]), score.device)
    counts_L, quota_L, offset_L, word_L = numbers.unbind()
    return Candidates(score_M=score, counts_L=counts_L, quota_L=quota_L, offset_L=offset_L, word_L=word_L)


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


def _learn(call: Call, rows: Candidates) -> None:
    """Teach the planner how scores are spread: at the home of each expert, or where pairs are chosen locally."""
    if call.open_call.repeated:
        return
    call.controller.learn(rows.score_M, rows.counts_L)


def _book(call: Call, loss: Loss) -> None:
    pending = call.open_call.pending
    pending.update(
        energy=loss.energy,
        energy_dropped=loss.dropped,
        variance_added=loss.variance,
        nonfinite_scores=loss.nonfinite,
    )
    if call.controller.drops.variance is not None and not call.open_call.repeated:
        # Where some scores are not finite, other pairs' weights are huge and say nothing of sampling.
        sound = loss.nonfinite == 0
        variance, energy = (torch.where(sound, value, 0.0) for value in (loss.variance, loss.energy))
        call.controller.book(variance, energy, call.open_call.record.variance_known)


def _observe(call: Call, rows: Candidates, experts: NDArray[np.int64]) -> None:
    """What this call would have saved and lost at a few drops: sums that ranks can add, and peaks."""
    pending = call.open_call.pending
    energy_M = torch.where(rows.score_M.isfinite(), rows.score_M, 0.0).double().square()
    pending["energy"] = energy_M.sum()
    for drop in sorted({*_OBSERVED_DROPS, call.config.max_drop} - {0}):
        prices = call.controller.prices
        problem = make_problem(
            call.config, call.plan.counts_RE, call.plan.topology, drop, None, prices=prices
        )
        plan = get_policy(call.config.policy)(problem)
        quota_L = upload(plan.quota_E[experts], rows.score_M.device)
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
