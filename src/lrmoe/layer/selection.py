"""Which pairs backward keeps, and the weight of each: estimators as plug-ins.

Rows lie expert after expert, inside an expert in the order (source rank, token, slot); that order breaks ties. All
decisive arithmetic is on integers, so the kept set depends on nothing but quotas, scores and key: one process and many
ranks choose alike.

Shape letters: M rows, L experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from lrmoe.layer.left_out import Loss, costs_of, inverse_of, loss_of
from lrmoe.layer.randomness import UNIT, UNIT_BITS, uniform_rows
from lrmoe.layer.single import (
    BROKEN,
    FLOOR,
    MOST_ROWS,
    SCORE_BITS,
    inclusion_of_each,
    sample_of_each,
)
from lrmoe.ops import cpu
from lrmoe.ops.triton import usable
from lrmoe.ops.triton.rule import SELECT_ROWS
from lrmoe.ops.units import Units

_RUN_ROWS = 8192  # rows of the experts that a CPU looks at together: what lies between stays in its cache
_LARGE_ROWS = 4096  # rows of an expert that are a run alone
_EACH_ROWS = 128  # rows an expert from which on a CPU is faster one expert after the other
_UNITS = Units(unit_bits=UNIT_BITS, score_bits=SCORE_BITS, broken=BROKEN, floor=FLOOR)
_UNREAD_ROUNDS = 4  # rounds between two looks at a device: one more than needed changes nothing


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
    """The kept rows: fp32 (M,), factor of a kept row's gradient, 0 where the row is left out; and what that costs."""

    weight_M: Tensor
    loss: Loss


def keep_top(rows: Candidates, *, uniform: bool = False) -> Choice:
    """The q rows of highest score of each expert, weight 1.

    Non-finite scores come first. With `uniform` counter-based uniform numbers replace the scores.
    """
    score = _uniform(rows) if uniform else rows.score_M
    if (kernels := _kernels(rows)) is not None:
        weight, costs_L4 = kernels.keep_top(score, rows.counts_L, rows.quota_L)
        costs = costs_of(rows.score_M, weight > 0, None) if uniform else costs_L4.sum(0)
        return Choice(weight_M=weight, loss=loss_of([costs]))
    expert = rows.expert_M
    score = torch.where(score.isfinite(), score, torch.inf)
    by_score = torch.sort(score, descending=True, stable=True).indices
    by_expert = by_score[torch.sort(expert[by_score], stable=True).indices]
    weight = torch.zeros_like(score, dtype=torch.float32)
    weight[by_expert] = (_position(rows, expert) < rows.quota_L[expert]).float()
    return Choice(weight_M=weight, loss=loss_of([costs_of(rows.score_M, weight > 0, None)]))


def _position(rows: Candidates, expert_M: Tensor) -> Tensor:
    """Each row's number in its expert, from 0, int64 (M,)."""
    return torch.arange(expert_M.shape[0], device=expert_M.device) - rows.start_L[expert_M]


def _uniform(rows: Candidates) -> Tensor:
    expert = rows.expert_M
    return uniform_rows(rows.word_L[expert], _position(rows, expert))


def keep_sampled(rows: Candidates) -> Choice:
    """Exactly q rows of each expert by systematic sampling, weight 1/pi.

    pi = min(1, c * score) with sum pi = q (Horvitz-Thompson weights make every gradient unbiased).
    """
    if (kernels := _kernels(rows)) is not None:
        found = kernels.keep_sampled(rows.score_M, rows.counts_L, rows.quota_L, rows.offset_L, _UNITS)
        return Choice(weight_M=found[0], loss=loss_of([found[1].sum(0)]))
    compiled = cpu.keep(rows.score_M, rows.counts_L, rows.quota_L, rows.offset_L, _UNITS)
    if compiled is not None:
        return Choice(weight_M=compiled[0], loss=loss_of([compiled[1].sum(0)]))
    weight, costs = torch.empty_like(rows.score_M), [rows.score_M.new_zeros(4, dtype=torch.float64)]
    for part, at in _runs(rows):
        chance = _inclusion(part)
        kept = _sample(part, chance)
        inverse = inverse_of(chance)
        costs.append(costs_of(part.score_M, kept, inverse))
        weight[at] = inverse.mul_(kept)
    return Choice(weight_M=weight, loss=loss_of(costs))


def _kernels(rows: Candidates) -> ModuleType | None:
    """Kernels that choose the same rows in one launch, or None where they are not used."""
    if not rows.score_M.is_cuda or rows.score_M.shape[0] > SELECT_ROWS or usable(rows.score_M) is not None:
        return None
    from lrmoe.ops.triton import select  # loads triton

    return select


def _sample(rows: Candidates, chance_M: Tensor) -> Tensor:
    """The sample of a run: bool, or 0 and 1 in fp64, (M,)."""
    if not chance_M.is_floating_point():
        return systematic(rows, chance_M)
    kept_M = sample_of_each(chance_M.numpy(), rows.counts_L.tolist(), rows.offset_L.tolist())
    return torch.from_numpy(kept_M)


def _runs(rows: Candidates) -> Iterator[tuple[Candidates, slice]]:
    """Experts with rows, which do not depend on each other: on a CPU, of many rows, some at a time.

    A large expert comes alone, small ones together.
    """
    if rows.score_M.device.type != "cpu":
        if rows.score_M.shape[0]:
            yield rows, slice(None)
        return
    for first, last, begin, end in _run_bounds(rows.counts_L.tolist()):
        experts, at = slice(first, last), slice(begin, end)
        yield (
            Candidates(
                score_M=rows.score_M[at],
                counts_L=rows.counts_L[experts],
                quota_L=rows.quota_L[experts],
                offset_L=rows.offset_L[experts],
                word_L=rows.word_L[experts],
            ),
            at,
        )


def _run_bounds(counts: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """(first expert, last one + 1, first row, last one + 1) of every run with rows."""
    first = begin = end = 0
    for expert, count in enumerate(counts):
        large = count >= _LARGE_ROWS
        if end > begin and (large or end - begin >= _RUN_ROWS):
            yield first, expert, begin, end
            first, begin = expert, end
        if begin == end:
            first = expert  # experts without rows before it have no part in the run
        end += count
        if large:
            yield expert, expert + 1, begin, end
            first, begin = expert + 1, end
    if end > begin:
        yield first, len(counts), begin, end


def _one_by_one(rows: Candidates) -> bool:
    """Whether the experts of a run are chosen from one after the other, on a CPU."""
    rows_M, experts = rows.score_M.shape[0], rows.counts_L.shape[0]
    return rows.score_M.device.type == "cpu" and _EACH_ROWS * experts <= rows_M < MOST_ROWS


def systematic(rows: Candidates, chance_M: Tensor) -> Tensor:
    """Systematic sample, bool (M,): a row is taken where the running sum of chances plus the offset passes an integer.

    Args:
        chance_M: int64 (M,) fixed-point probabilities that sum to an integer inside each expert.
    """
    if not chance_M.shape[0]:
        return torch.zeros_like(chance_M, dtype=torch.bool)
    total = chance_M.cumsum(0)
    first_L = rows.start_L.clamp(max=chance_M.shape[0] - 1)
    before_L = (total - chance_M).index_select(0, first_L)
    end = total.add_(_to_rows(rows.offset_L - before_L, rows.expert_M))
    begin = (end - chance_M).bitwise_right_shift_(UNIT_BITS)
    return end.bitwise_right_shift_(UNIT_BITS) > begin


def inclusion(rows: Candidates) -> Tensor:
    """Inclusion probabilities, int64 (M,) in units of 1/UNIT; inside each expert they sum to its quota exactly.

    Rows that reach 1 are fixed there and the constant is found again for the rest, until stable. Rows of non-finite
    score are kept for certain where the quota holds them all.
    """
    if (kernels := _kernels(rows)) is not None:
        return kernels.inclusion(rows.score_M, rows.counts_L, rows.quota_L, _UNITS)
    compiled = cpu.inclusion(rows.score_M, rows.counts_L, rows.quota_L, _UNITS)
    if compiled is not None:
        return compiled.long()
    chance = torch.empty_like(rows.score_M, dtype=torch.int64)
    for part, at in _runs(rows):
        chance[at] = _inclusion(part)
    return chance


def _inclusion(rows: Candidates) -> Tensor:
    """The same of a run, int64, or whole numbers in fp64."""
    if _one_by_one(rows):
        chance_M = inclusion_of_each(rows.score_M.numpy(), rows.counts_L.tolist(), rows.quota_L.tolist())
        return torch.from_numpy(chance_M)
    expert, quota = rows.expert_M, torch.minimum(rows.quota_L, rows.counts_L)
    size = _integer_scores(rows, expert)
    free = _uncertain(rows, expert, quota)
    size.mul_(free)  # 0 from here on: certain
    left = quota - rows.counts_L + _sum_by_expert(free, rows)
    for rounds in itertools.count(1):
        ratio = left.double() / _sum_by_expert(size, rows).clamp(min=1).double()
        chance = size.double().mul_(_to_rows(ratio, expert))
        below = chance < 1
        fresh = rows.counts_L - _sum_by_expert(below, rows)
        if _looks(rounds, left) and not bool(fresh.any()):
            break
        left = left - fresh
        size.mul_(below)
    return _fixed_point(rows, expert, torch.gt(size, 0, out=free), chance, left)


def _looks(rounds: int, like: Tensor) -> bool:
    """Whether this round may be the last one."""
    return like.device.type == "cpu" or rounds % _UNREAD_ROUNDS == 0


def _uncertain(rows: Candidates, expert: Tensor, quota: Tensor) -> Tensor:
    """Rows whose probability is to be found, bool (M,): no expert's that keeps all, no broken one's that fits."""
    broken = ~rows.score_M.isfinite()
    fits = _sum_by_expert(broken, rows) <= quota
    certain = broken.logical_and_(_to_rows(fits, expert))
    return certain.logical_or_(_to_rows(quota == rows.counts_L, expert)).logical_not_()


def _integer_scores(rows: Candidates, expert: Tensor) -> Tensor:
    """Scores over each expert's largest, as integers >= 1; non-finite ones outweigh all others together."""
    finite = rows.score_M.isfinite()
    score = rows.score_M.nan_to_num(0.0, 0.0, 0.0).double()
    top = torch.zeros(rows.counts_L.shape, dtype=torch.float64, device=score.device)
    top = top.scatter_reduce(0, expert, score, "amax")
    relative = score.div_(_to_rows(torch.where(top > 0, top, 1.0), expert))
    size = relative.mul_(2**SCORE_BITS).long()
    del score, relative
    mean = _sum_by_expert(size, rows) // rows.counts_L.clamp(min=1)
    floor = (mean.double() * FLOOR).long().clamp(min=1)
    size = torch.maximum(size, _to_rows(floor, expert), out=size)
    return size.mul_(finite).add_(finite.logical_not_(), alpha=BROKEN)


def _fixed_point(
    rows: Candidates, expert: Tensor, free: Tensor, chance: Tensor, free_quota: Tensor
) -> Tensor:
    """Round the free chances so that they sum to the free quota exactly: down first, then single units in order."""
    units = chance.mul_(UNIT - 2).long()  # 0 of certain rows
    missing = free_quota * UNIT - _sum_by_expert(units, rows)
    upto = free.cumsum(0)
    first_L = rows.start_L.clamp(max=free.shape[0] - 1)
    before_L = upto.index_select(0, first_L) - free.index_select(0, first_L).long()
    among = _sum_by_expert(free, rows).clamp(min=1)
    # The free row of number n (from 1) of its expert gets one unit more where n <= rest.
    extra = upto <= _to_rows(missing % among + before_L, expert)
    del upto
    units.add_(extra.long().add_(_to_rows(missing // among, expert)).mul_(free)).clamp_(max=UNIT)
    return units.add_(free.logical_not_(), alpha=UNIT)


def _to_rows(value_L: Tensor, expert_M: Tensor) -> Tensor:
    """Each row's expert's value, (M,), to be read only."""
    if value_L.shape[0] == 1:
        return value_L.expand(expert_M.shape)
    return value_L.index_select(0, expert_M)


def _sum_by_expert(value_M: Tensor, rows: Candidates) -> Tensor:
    """Exact integer sums of consecutive rows, at least one, int64 (L,)."""
    if rows.counts_L.shape[0] == 1:
        return value_M.sum(0, keepdim=True)
    end = rows.counts_L.cumsum(0)
    upto = value_M.cumsum(0).index_select(0, (end - 1).clamp(min=0)).mul_(end > 0)
    return torch.diff(upto, prepend=upto.new_zeros(1))


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
    inverse = inverse_of(chance.round().long())
    costs = costs_of(rows.score_M, kept, inverse)
    return Choice(weight_M=inverse.mul_(kept).float(), loss=loss_of([costs]))
