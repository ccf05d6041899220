"""A limit on the variance that sampling adds, relative to the gradient's own: `max_added_variance`.

    added = sum over candidates of (1/pi - 1) R,    own = sum over candidates of R    (R: squared score)

Quotas are fixed before any score is known. What they will add is predicted from past scores, corrected by how past
predictions came out, and what was added too much (or too little) is paid back over the next calls. So the promise is on
the running mean: over 50 calls it stays within the limit, as long as scores change slowly compared with 50 calls.

Shape letters: E experts, B bins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import FloatArray, IntArray
from lrmoe.planning.restore import checked
from lrmoe.planning.score_bins import ScoreHistory

_WINDOW = 50  # calls over which the mean is kept
_AIM = 0.98  # of the limit: room for what the next calls add before it is measured
_PAY = 0.2  # share of the debt that one call pays back
_CREDIT = 0.5  # most that may be saved up, in limits: a quiet past must not buy a loud present
_DECAY = 0.8  # of measured over predicted
_OCTAVE = 28 / 27  # mean square over squared mean of numbers even in [1, 2]
_CLOSE = 0.85  # of what is allowed: a drop that adds this much is taken for the largest
_PLANS = 4  # most plans of one call
_OVER = 1.05  # of what is allowed: taken as it, and paid back


def predicted_variance(counts_E: IntArray, quota_E: IntArray, history: ScoreHistory | None) -> float:
    """Added over own variance of a call whose experts keep their quotas.

    pi = min(1, c * score) with one c per expert, as selection finds it: bins that c keeps whole add nothing, of the
    others every pair adds score / c - R. Without history the bound that holds for any scores, with equal R everywhere:
    a quota's pi could always be quota / pairs.

    Args:
        counts_E, quota_E: int64 (E,), pairs and kept pairs.
    """
    pairs_E = counts_E.astype(np.float64)
    if history is None:
        lost = pairs_E * (pairs_E / np.maximum(quota_E, 1) - 1.0)
        return float(lost[counts_E > 0].sum()) / max(float(pairs_E.sum()), 1.0)
    own = float((pairs_E * history.square_E).sum())
    added_E = _added(pairs_E, quota_E, history.bins_EB2) * history.mean_E**2
    return float(added_E[quota_E < counts_E].sum()) / own if own > 0 else 0.0


def _added(pairs_E: FloatArray, quota_E: IntArray, bins_EB2: FloatArray) -> FloatArray:
    """Added variance of every expert in units of its squared mean score, float64 (E,)."""
    inside_EB = bins_EB2[:, :, 1]
    pairs_EB = pairs_E[:, None] * bins_EB2[:, :, 0]
    score_EB = pairs_EB * inside_EB
    # With the bins from k on kept whole, c = (quota - their pairs) / (scores of the bins below).
    whole_EB = np.cumsum(pairs_EB[:, ::-1], axis=1)[:, ::-1] - pairs_EB  # of the bins above bin k
    below_EB = np.cumsum(score_EB, axis=1)  # up to bin k
    top_EB = np.maximum.accumulate(inside_EB, axis=1)
    left_EB = quota_E[:, None] - whole_EB
    fits_EB = (left_EB > 0) & (left_EB * top_EB <= below_EB) & (below_EB > 0)
    last = fits_EB.shape[1] - 1 - np.argmax(fits_EB[:, ::-1], axis=1)  # most bins drawn, fewest whole
    rows = np.arange(pairs_E.size)
    drawn = fits_EB.any(axis=1)
    below_E, left_E = below_EB[rows, last], np.maximum(left_EB[rows, last], 1e-9)
    square_E = np.cumsum(score_EB * inside_EB, axis=1)[rows, last] * _OCTAVE
    return np.where(drawn, np.maximum(below_E**2 / left_E - square_E, 0.0), 0.0)


@dataclass(kw_only=True)
class VarianceLimit:
    """How much the next call may add: the limit, less what past calls added too much.

    Attributes:
        limit: `max_added_variance`.
        debt: what past calls added above the limit, in sums of ratios; it fades over 50 calls.
        factor: running mean of measured over predicted.
        drop, predicted: of the latest call, where the next search starts. calls: measured so far.
        mean: running mean of the measured ratio over about 50 calls.
    """

    limit: float
    debt: float = 0.0
    factor: float = 1.0
    drop: float = 0.0
    predicted: float = 0.0
    mean: float = 0.0
    calls: int = 0

    def allowed(self) -> float:
        """Most that the next call's predicted and corrected ratio may be."""
        return max(_AIM * self.limit - _PAY * self.debt, 0.0)

    def book(self, measured: float, predicted: float | None, calls: int = 1) -> None:
        """Add what calls really added.

        Args:
            measured: added over own variance of `calls` calls together.
            predicted: what was predicted for them from history without correction, or None where there was none.
        """
        for _ in range(calls):
            self.debt = (1 - 1 / _WINDOW) * self.debt + measured - _AIM * self.limit
            self.debt = max(self.debt, -_CREDIT * self.limit)
            self.calls += 1
            self.mean += (measured - self.mean) / min(self.calls, _WINDOW)
        if predicted is not None and predicted > 1e-3 * self.limit:
            ratio = min(max(measured / predicted, 1 / 8), 8.0)
            self.factor = _DECAY * self.factor + (1 - _DECAY) * ratio

    def state(self) -> dict[str, Any]:
        """JSON-able, without the limit, which the configuration sets."""
        return {name: value for name, value in asdict(self).items() if name != "limit"}

    def checked(self, state: Any, where: str = "variance") -> dict[str, Any]:
        """The values of what `state` gave, for `load`; changes nothing.

        Raises:
            ConfigError: they are not what `state` gives; names the field, below `where`.
        """
        return checked(self, state, but="limit", where=where)

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave.

        Raises:
            ConfigError: see `checked`; nothing is changed then.
        """
        for name, value in self.checked(state).items():
            setattr(self, name, value)


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """A plan with the drop it was asked for and what it is predicted to add, corrected."""

    plan: LayerPlan
    drop: float
    added: float

    @property
    def spare(self) -> bool:
        """Whether the plan leaves out less than it may: a higher cap would change nothing."""
        return self.plan.pairs - self.plan.kept < int(self.drop * self.plan.pairs) - 1


def largest_drop(
    plan_at: Callable[[float], LayerPlan],
    added: Callable[[LayerPlan], float],
    *,
    most: float,
    allowed: float,
    start: float,
) -> Found:
    """The plan of (nearly) the largest drop that adds no more than is allowed.

    With equal scores the added variance is the odds of dropping, d / (1 - d); with scores that differ it grows at least
    as fast. So the chord over the odds, from a drop that is allowed to one that is not, crosses the limit at a drop
    that is (nearly) allowed: that one is tried next. At most four plans, one where `start` is close; what is left over
    is paid back by later calls.

    Args:
        plan_at: the plan under a cap on the dropped share. added: what a plan is predicted to add.
        most: largest drop to try. start: drop to try first.
    """
    if allowed <= 0:
        return Found(plan=plan_at(0.0), drop=0.0, added=0.0)
    low, high = (0.0, 0.0), (1.0, np.inf)
    best, drop = None, min(max(start, 0.0), most) or most
    for _ in range(_PLANS):
        plan = plan_at(drop)
        found = Found(plan=plan, drop=drop, added=added(plan))
        if found.added <= _OVER * allowed:
            best, low = found, (drop, found.added)
            if drop >= most or found.spare or found.added >= _CLOSE * allowed:
                return found
        else:
            high = (min(drop, 1 - plan.kept / plan.pairs), found.added)
        drop = min(_between(low, high, allowed), most)
        if drop <= low[0]:
            break
    return best or Found(plan=plan_at(0.0), drop=0.0, added=0.0)


def _between(low: tuple[float, float], high: tuple[float, float], allowed: float) -> float:
    """The next drop to try: on the chord over the odds where both sides are known, else in proportion to them."""
    if not np.isfinite(high[1]):
        return scaled(low[0], low[1], allowed)
    share = (allowed - low[1]) / max(high[1] - low[1], 1e-300)
    below, above = (drop / max(1 - drop, 1e-9) for drop in (low[0], high[0]))
    odds = below + min(max(share, 0.0), 1.0) * (above - below)
    return odds / (1 + odds)


def scaled(drop: float, added: float, allowed: float) -> float:
    """The drop at which `allowed` is added if the added variance grows as the odds of dropping do."""
    if added <= 0:
        return 1.0
    odds = drop / max(1 - drop, 1e-9) * allowed / added
    return odds / (1 + odds)
