"""What past calls told of the scores: means, and a coarse histogram of each expert's scores relative to its mean.

The sampled estimator keeps a pair with probability min(1, c * score). How many pairs of an expert one constant c keeps
therefore depends on how its scores are spread, not on their sum alone; seven octaves (a factor of two each) around the
expert's own mean predict it, and the variance that sampling adds, to 1 to 10 percent (docs/estimators.md has figures).

Shape letters: E experts, B bins, F columns of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planning.problem import FloatArray, Problem

BINS = 7
# Bin b holds scores in [2^(b + LOWEST), 2^(b + LOWEST + 1)) means; the ends take what lies beyond.
LOWEST = -3
COLUMNS = 3 + 2 * BINS  # pairs, scores, squared scores; pairs by bin; scores over the mean by bin


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreHistory:
    """Scores of past calls, every expert filled in: one without past has the average of the others.

    Attributes:
        mean_E: float64 (E,), score per pair. square_E: float64 (E,), squared score per pair.
        bins_EB2: float64 (E, B, 2), share of the pairs in each bin, and their mean score over the expert's.
    """

    mean_E: FloatArray
    square_E: FloatArray
    bins_EB2: FloatArray

    @classmethod
    def from_sums(cls, sums_EF: FloatArray) -> ScoreHistory | None:
        """What sums over past pairs say, float64 (E, COLUMNS); None where no expert has any."""
        known = np.isfinite(sums_EF).all(axis=1) & (sums_EF[:, 0] > 0) & (sums_EF[:, 1] > 0)
        if not known.any():
            return None
        pairs_E = np.where(known, sums_EF[:, 0], 1.0)
        mean_E, square_E = sums_EF[:, 1] / pairs_E, sums_EF[:, 2] / pairs_E
        by_bin = sums_EF[:, 3:].reshape(-1, 2, BINS)
        share, scores = by_bin[:, 0] / pairs_E[:, None], by_bin[:, 1] / pairs_E[:, None]
        spread = known & (by_bin[:, 0].sum(axis=1) > 0)  # of an old state only the means are known
        if spread.any():
            share, scores = _filled(share, spread), _filled(scores, spread)
        else:
            share, scores = np.zeros_like(share), np.zeros_like(scores)
            share[:, -LOWEST] = scores[:, -LOWEST] = 1.0
        inside = np.divide(scores, share, out=np.zeros_like(scores), where=share > 0)
        return cls(
            mean_E=_filled(mean_E, known),
            square_E=_filled(square_E, known),
            bins_EB2=np.stack([share, inside], axis=2),
        )


def _filled(value: FloatArray, known: np.ndarray) -> FloatArray:
    """The value of known experts, for others the mean of those."""
    if known.all():  # the usual case, in every call
        return value
    value = np.array(value)
    value[~known] = value[known].mean(axis=0)
    return value


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """An expert's pairs in groups of about equal score: what one sampling constant keeps of them.

    Attributes:
        pairs_BE: float64 (B, E), pairs. weight_BE: float64 (B, E), their sum of scores (any common unit).
    """

    pairs_BE: FloatArray
    weight_BE: FloatArray

    @classmethod
    def of(cls, problem: Problem) -> Cells:
        """Cells of a call by what history knows; without any one cell per expert and equal scores."""
        counts_E = problem.counts_E.astype(np.float64)
        if problem.score_mean_E is None:
            return cls(pairs_BE=counts_E[None], weight_BE=counts_E[None])
        mean_E = np.asarray(problem.score_mean_E, dtype=np.float64)
        known = np.isfinite(mean_E) & (mean_E > 0)
        if not known.any():
            return cls(pairs_BE=counts_E[None], weight_BE=counts_E[None])
        weight_E = counts_E * np.where(known, mean_E, mean_E[known].mean())
        if problem.score_bins is None:
            return cls(pairs_BE=counts_E[None], weight_BE=weight_E[None])
        share_BE, inside_BE = problem.score_bins.transpose(2, 1, 0)
        return cls(
            pairs_BE=np.ascontiguousarray(counts_E * share_BE),
            weight_BE=np.ascontiguousarray(weight_E * share_BE * inside_BE),
        )

    def part(self, experts: slice) -> Cells:
        """Of some experts."""
        return Cells(pairs_BE=self.pairs_BE[:, experts], weight_BE=self.weight_BE[:, experts])

    def kept(self, constant_E: FloatArray | float) -> FloatArray:
        """Pairs that constants keep, float64 (E,): min(pairs, constant * weight) in every cell."""
        scaled_BE = self.weight_BE * constant_E
        np.minimum(self.pairs_BE, scaled_BE, out=scaled_BE)
        kept_E: FloatArray = scaled_BE.sum(axis=0)
        return kept_E

    def drawn(self, constant: float) -> float:
        """Of the pairs that a constant keeps, the share in cells that it does not keep whole; 1 where it keeps none."""
        scaled_BE = self.weight_BE * constant
        below = scaled_BE < self.pairs_BE
        drawn, kept = float(scaled_BE[below].sum()), float(np.minimum(self.pairs_BE, scaled_BE).sum())
        return drawn / kept if kept > 0 else 1.0

    def constant(self, total: float) -> float:
        """The one constant that keeps `total` pairs; large where that is all of them."""
        weight, pairs = self.weight_BE.reshape(-1), self.pairs_BE.reshape(-1)
        used = (weight > 0) & (pairs > 0)
        weight, pairs = weight[used], pairs[used]
        if not weight.size:
            return 1.0
        full = pairs / weight  # constant at which a cell is kept whole
        order = np.argsort(full, kind="stable")
        full, weight, pairs = full[order], weight[order], pairs[order]
        whole, rest = np.cumsum(pairs), np.cumsum(weight[::-1])[::-1]
        # At full[i] the cells up to i are whole, those behind it in proportion.
        reached = whole + full * np.append(rest[1:], 0.0)
        place = int(np.searchsorted(reached, total))
        if place >= full.size:
            return float(full[-1])
        before = float(whole[place - 1]) if place else 0.0
        return (total - before) / float(rest[place])
