"""Scores and the kept set of a replayed call: the layer's own rules, at the size of the call.

Scores are made at the sources, the kept set at each expert's home. Every rank's part is run and timed; what would
travel between them is handed over.

Shape letters: R ranks, E experts, L experts of a home, N pairs of a source, M rows of a home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.layer.randomness import Key, offsets_of
from lrmoe.layer.routing import transposed
from lrmoe.layer.scores import pair_scores
from lrmoe.layer.selection import Candidates, choose
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray
from lrmoe.simulate.replay_data import Data
from lrmoe.simulate.replay_times import Times


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """The kept set.

    Attributes:
        weight_R: for each source fp32 (N,) in (expert, token) order: 1/pi of a kept pair, 0 where it is left out.
        energy_dropped: share of the sum of squared scores that is left out.
    """

    weight_R: Sequence[Tensor]
    energy_dropped: float


def select(
    data: Data,
    plan: LayerPlan,
    config: LRMoEConfig,
    order_R: Sequence[Tensor],
    norm_R: Sequence[Tensor],
    times: Times,
) -> Selection:
    """Score all pairs and choose the kept set of a plan.

    Args:
        order_R: each source's flat pair ids in (expert, token) order; norm_R: projection-input norms beside them.
        times: phases "score" and "select" of every rank go here.
    """
    score_R = []
    for rank, source in enumerate(data.sources):
        with times.phase("backward", rank, "score"):
            order_N = order_R[rank]
            alpha_N = source.alpha_TK.reshape(-1)[order_N]
            score_R.append(
                pair_scores(config.score, source.g_TH, alpha_N, order_N // data.slots, norm_R[rank])
            )
    weight_R = [torch.empty_like(score_N) for score_N in score_R]
    energy = dropped = 0.0
    for home in range(len(data.sources)):
        parts = home_parts(data.counts_RE, home, score_R)
        received = torch.cat(parts)
        with times.phase("backward", home, "select"):
            weight_recv, kept, left = _choose(data.counts_RE, plan, config, home, received)
        energy, dropped = energy + float(kept), dropped + float(left)
        sizes = [len(part) for part in parts]
        for part, weight in zip(
            home_parts(data.counts_RE, home, weight_R), weight_recv.split(sizes), strict=True
        ):
            part.copy_(weight)
    return Selection(weight_R=weight_R, energy_dropped=dropped / energy if energy else 0.0)


def home_parts(counts_RE: IntArray, home: int, values_R: Sequence[Tensor]) -> list[Tensor]:
    """Of values in (expert, token) order, each source's part of the experts of a home (views)."""
    local = counts_RE.shape[1] // counts_RE.shape[0]
    begin_R = counts_RE[:, : home * local].sum(axis=1)
    end_R = begin_R + counts_RE[:, home * local : (home + 1) * local].sum(axis=1)
    return [v[int(b) : int(e)] for v, b, e in zip(values_R, begin_R, end_R, strict=True)]


def _choose(
    counts_RE: IntArray, plan: LayerPlan, config: LRMoEConfig, home: int, received: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A home's part: weights in received order, energy of its scores, and what of it is left out."""
    local = plan.topology.experts_per_rank
    experts = np.arange(home * local, (home + 1) * local)
    cells_RL = counts_RE[:, experts]
    words = Key(seed=config.seed, layer=0, step=config.warmup_steps, micro_batch=0).words(experts)
    rows = Candidates(
        score_M=transposed(received, cells_RL),
        counts_L=_tensor(plan.counts_E[experts], received),
        quota_L=_tensor(plan.quota_E[experts], received),
        offset_L=_tensor(offsets_of(words), received),
        word_L=_tensor(words.view(np.int64), received),
    )
    choice = choose(config.estimator, config.score, rows)
    return transposed(choice.weight_M, cells_RL.T), choice.loss.energy, choice.loss.dropped


def _tensor(array: IntArray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device, non_blocking=True)
