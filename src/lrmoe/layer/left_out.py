"""What a choice leaves out, and the variance that it adds. Shape letters: M rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.layer.randomness import UNIT
from lrmoe.layer.scores import broken_rows, finite_scores


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss:
    """What a choice leaves out: fp64 scalars, sums over candidates of squared scores; int64 `nonfinite`.

    Attributes:
        energy: of all. dropped: of what is left out. variance: added, the sum of (1/pi - 1) R, 0 where nothing is
            random. nonfinite: candidates of non-finite score.
    """

    energy: Tensor
    dropped: Tensor
    variance: Tensor
    nonfinite: Tensor


def loss_of(costs: list[Tensor]) -> Loss:
    """The sum of what `costs_of` said of the parts of a choice."""
    total = costs[0] if len(costs) == 1 else torch.stack(costs).sum(0)
    energy, dropped, variance, nonfinite = total.unbind()
    return Loss(energy=energy, dropped=dropped.clamp(min=0), variance=variance, nonfinite=nonfinite.long())


def costs_of(score_M: Tensor, kept_M: Tensor, inverse_M: Tensor | None) -> Tensor:
    """Energy, what is left out of it, added variance and non-finite scores of some rows, fp64 (4,).

    Args:
        kept_M: bool or 0 and 1. inverse_M: 1/pi, fp64 (M,), where the choice was random.
    """
    broken = broken_rows(score_M)
    energy = finite_scores(score_M, broken).double().square_()
    dropped = torch.addcmul(energy, energy, kept_M.double(), value=-1)  # 0 of kept rows, exactly
    none = energy.new_zeros(())
    variance = none if inverse_M is None else _variance(energy, inverse_M)
    nonfinite = none if broken is None else broken.sum().double()
    return torch.stack([energy.sum(), dropped.sum(), variance, nonfinite])


def inverse_of(chance_M: Tensor) -> Tensor:
    """1/pi, fp64 (M,), from whole numbers of units."""
    return chance_M.clamp(min=1).double().reciprocal_().mul_(UNIT)


def added_variance(energy_M: Tensor, chance_M: Tensor) -> Tensor:
    """Sum of (1/pi - 1) R, fp64 scalar: exact for independent draws."""
    return _variance(energy_M, inverse_of(chance_M))


def _variance(energy_M: Tensor, inverse_M: Tensor) -> Tensor:
    return (inverse_M - 1).mul_(energy_M).sum()
