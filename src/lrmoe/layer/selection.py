"""Which pairs backward keeps, and the weight of each: estimators as plug-ins.

Rows lie expert after expert, inside an expert in the order (source rank, token, slot); that order breaks ties. All
decisive arithmetic is on integers, so the kept set depends on nothing but quotas, scores and key: one process and many
ranks choose alike.

Shape letters: M rows, L experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lrmoe.layer.randomness import UNIT, UNIT_BITS, uniform_rows

_SCORE_BITS = 30
_FLOOR = 1e-3  # least score over the expert's mean: keeps every inclusion probability positive


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Rows to choose from.

    Attributes:
        score_M: fp32 (M,), may hold non-finite values.
        counts_L, quota_L: int64 (L,), rows and quota of each expert.
        offset_L: int64 (L,), fixed-point uniform numbers in [0, UNIT).
        word_L: int64 (L,), random stream of each expert, for uniform scores.
    """

    score_M: Tensor
    counts_L: Tensor
    quota_L: Tensor
    offset_L: Tensor
    word_L: Tensor

    @property
    def expert_M(self) -> Tensor:
        """Expert of each row, int64 (M,)."""
        experts = torch.arange(self.counts_L.shape[0], device=self.counts_L.device)
        return experts.repeat_interleave(self.counts_L, output_size=self.score_M.shape[0])

    @property
    def start_L(self) -> Tensor:
        """First row of each expert, int64 (L,)."""
        return self.counts_L.cumsum(0) - self.counts_L


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """The kept rows.

    Attributes:
        weight_M: fp32 (M,), factor of a kept row's gradient, 0 where the row is left out.
        chance_M: int64 (M,) inclusion probabilities in units of 1/UNIT, or None where the choice was not random.
    """

    weight_M: Tensor
    chance_M: Tensor | None


def keep_top(rows: Candidates, *, uniform: bool = False) -> Choice:
    """The q rows of highest score of each expert, weight 1.

    Non-finite scores come first. With `uniform` counter-based uniform numbers replace the scores.
    """
    expert = rows.expert_M
    position = torch.arange(expert.shape[0], device=expert.device) - rows.start_L[expert]
    score = uniform_rows(rows.word_L[expert], position) if uniform else rows.score_M
    score = torch.where(score.isfinite(), score, torch.inf)
    by_score = torch.sort(score, descending=True, stable=True).indices
    by_expert = by_score[torch.sort(expert[by_score], stable=True).indices]
    weight = torch.zeros_like(score, dtype=torch.float32)
    weight[by_expert] = (position < rows.quota_L[expert]).float()
    return Choice(weight_M=weight, chance_M=None)


def keep_sampled(rows: Candidates) -> Choice:
    """Exactly q rows of each expert by systematic sampling, weight 1/pi.

    pi = min(1, c * score) with sum pi = q (Horvitz-Thompson weights make every gradient unbiased).
    """
    chance = inclusion(rows)
    return _weighted(systematic(rows, chance), chance)


def _weighted(kept_M: Tensor, chance_M: Tensor) -> Choice:
    weight = torch.where(kept_M, UNIT / chance_M.clamp(min=1).double(), 0.0).float()
    return Choice(weight_M=weight, chance_M=chance_M)


def systematic(rows: Candidates, chance_M: Tensor) -> Tensor:
    """Systematic sample, bool (M,): a row is taken where the running sum of chances plus the offset passes an integer.

    Args:
        chance_M: int64 (M,) fixed-point probabilities that sum to an integer inside each expert.
    """
    expert = rows.expert_M
    total = chance_M.cumsum(0)
    before_L = (
        (total - chance_M)[rows.start_L.clamp(max=max(total.shape[0] - 1, 0))] if total.shape[0] else total
    )
    shift = rows.offset_L[expert] - before_L[expert]
    end = total + shift
    return (end >> UNIT_BITS) > ((end - chance_M) >> UNIT_BITS)


def inclusion(rows: Candidates) -> Tensor:
    """Inclusion probabilities, int64 (M,) in units of 1/UNIT; inside each expert they sum to its quota exactly.

    Rows that reach 1 are fixed there and the constant is found again for the rest, until stable. Rows of non-finite
    score are kept for certain where the quota holds them all.
    """
    expert, quota = rows.expert_M, torch.minimum(rows.quota_L, rows.counts_L)
    size = _integer_scores(rows, expert)
    broken = ~rows.score_M.isfinite()
    fits = _sum_by_expert(broken.long(), rows) <= quota
    certain = (quota == rows.counts_L)[expert] | (broken & fits[expert])
    while True:
        free_quota = quota - _sum_by_expert(certain.long(), rows)
        free_size = _sum_by_expert(torch.where(certain, 0, size), rows)
        chance = size.double() * (free_quota.double() / free_size.clamp(min=1).double())[expert]
        fresh = ~certain & (chance >= 1)
        if not bool(fresh.any()):
            break
        certain |= fresh
    return _fixed_point(rows, expert, certain, chance, free_quota)


def _integer_scores(rows: Candidates, expert: Tensor) -> Tensor:
    """Scores over each expert's largest, as integers >= 1; non-finite ones outweigh all others together."""
    finite = rows.score_M.isfinite()
    score = torch.where(finite, rows.score_M, 0.0).double()
    top = torch.zeros(rows.counts_L.shape, dtype=torch.float64, device=score.device)
    top = top.scatter_reduce(0, expert, score, "amax")
    relative = score / torch.where(top > 0, top, 1.0)[expert]
    size = (relative * 2**_SCORE_BITS).long()
    mean = _sum_by_expert(size, rows) // rows.counts_L.clamp(min=1)
    floor = (mean.double() * _FLOOR).long().clamp(min=1)
    size = torch.maximum(size, floor[expert])
    return torch.where(finite, size, 2 ** (_SCORE_BITS + 10))


def _fixed_point(
    rows: Candidates, expert: Tensor, certain: Tensor, chance: Tensor, free_quota: Tensor
) -> Tensor:
    """Round the free chances so that they sum to the free quota exactly: down first, then single units in order."""
    units = torch.where(certain, 0, (chance * (UNIT - 2)).long())
    missing = free_quota * UNIT - _sum_by_expert(units, rows)
    free = (~certain).long()
    among = _sum_by_expert(free, rows).clamp(min=1)
    rank = free.cumsum(0) - free
    first_L = rank[rows.start_L.clamp(max=max(rank.shape[0] - 1, 0))] if rank.shape[0] else rank
    rank = rank - first_L[expert]
    share, rest = (missing // among)[expert], (missing % among)[expert]
    units = units + free * (share + (rank < rest).long())
    return torch.where(certain, UNIT, units.clamp(max=UNIT))


def _sum_by_expert(value_M: Tensor, rows: Candidates) -> Tensor:
    """Exact integer sums of consecutive rows, int64 (L,)."""
    total = torch.nn.functional.pad(value_M.cumsum(0), (1, 0))
    end = rows.counts_L.cumsum(0)
    return total[end] - total[end - rows.counts_L]


def choose(estimator: str, score: str, rows: Candidates) -> Choice:
    """The kept rows under an estimator and score of the configuration."""
    if estimator == "topk":
        return keep_top(rows, uniform=score == "random")
    return keep_sampled(rows)


def choose_within_share(
    estimator: str, score: str, rows: Candidates, chance_up_L: Tensor, share_up_L: Tensor
) -> Choice:
    """The kept rows where `rows.quota_L` is one rank's randomly rounded share of the quota (`selection="local"`).

    The rounding is part of a row's inclusion probability: pi = (1 - f) pi(share rounded down) + f pi(rounded up).

    Args:
        chance_up_L: fp64 (L,), probability f that the share was rounded up.
        share_up_L: int64 (L,), the share rounded up.
    """
    if estimator == "topk":
        return choose(estimator, score, rows)
    kept = systematic(rows, inclusion(rows))
    up = inclusion(replace(rows, quota_L=share_up_L)).double()
    down = inclusion(replace(rows, quota_L=(share_up_L - 1).clamp(min=0))).double()
    f = chance_up_L[rows.expert_M]
    chance = torch.where(f > 0, f * up + (1 - f) * down, up)
    return _weighted(kept, chance.round().long())


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a choice leaves out: fp64 scalars, sums over candidates of squared scores; int64 `nonfinite`."""

    energy: Tensor
    dropped: Tensor
    variance: Tensor
    nonfinite: Tensor


def measure(rows: Candidates, choice: Choice) -> Loss:
    """Energy left out, and variance added: sum over all candidates of (1/pi - 1) R, 0 where nothing is random."""
    finite = rows.score_M.isfinite()
    energy = torch.where(finite, rows.score_M, 0.0).double().square()
    chance = choice.chance_M
    return Loss(
        energy=energy.sum(),
        dropped=energy[choice.weight_M == 0].sum(),
        variance=energy.new_zeros(()) if chance is None else added_variance(energy, chance),
        nonfinite=(~finite).sum(),
    )


def added_variance(energy_M: Tensor, chance_M: Tensor) -> Tensor:
    """Sum of (1/pi - 1) R, fp64 scalar: exact for independent draws."""
    return ((UNIT / chance_M.clamp(min=1).double() - 1) * energy_M).sum()
