"""The limit on added variance: prediction, search and control, against scores drawn pair by pair."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.score_bins import COLUMNS, ScoreHistory
from lrmoe.planning.variance import Found, VarianceLimit, largest_drop, predicted_variance, scaled
from tests.planning.test_score_bins import added, drawn, sums_of

MODEST = settings(deadline=None, max_examples=40, derandomize=True)


def measured(scores: list[np.ndarray], quota_E: np.ndarray) -> float:
    """Added over own variance, pair by pair."""
    lost = sum(added(s, q) for s, q in zip(scores, quota_E.tolist(), strict=True) if s.size)
    return lost / sum(float((s**2).sum()) for s in scores)


@pytest.mark.parametrize("spread", [0.3, 0.8, 1.4])
@pytest.mark.parametrize("keep", [0.3, 0.5, 0.7, 0.9])
def test_the_prediction_from_seven_bins_is_near_the_sum_over_pairs(spread: float, keep: float) -> None:
    rng = np.random.default_rng(1)
    scores = [rng.lognormal(rng.normal(), spread, 3000) for _ in range(4)]
    counts = np.array([s.size for s in scores])
    quota = (keep * counts).astype(np.int64)
    found = predicted_variance(counts, quota, ScoreHistory.from_sums(sums_of(scores)))
    assert found == pytest.approx(measured(scores, quota), rel=0.1, abs=2e-3)


@MODEST
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.95))
def test_without_history_the_prediction_is_a_bound(seed: int, keep: float) -> None:
    """Of experts of one mean square and equal fractions, whatever the spread."""
    scores = [s / math.sqrt((s**2).mean()) for s in drawn(seed, 3, size=400)]
    counts = np.array([s.size for s in scores])
    quota = np.maximum((keep * counts).astype(np.int64), 1)
    bound = predicted_variance(counts, quota, None)
    assert bound == pytest.approx(1 / keep - 1, rel=0.15, abs=0.02)
    assert measured(scores, quota) <= bound + 1e-9


def test_nothing_is_added_where_everything_is_kept_and_idle_experts_count_for_nothing() -> None:
    counts = np.array([5, 0, 7])
    history = ScoreHistory.from_sums(sums_of([np.ones(5), np.array([]), np.ones(7)]))
    assert predicted_variance(counts, counts, history) == 0.0
    assert predicted_variance(counts, counts, None) == 0.0
    assert predicted_variance(np.zeros(3, np.int64), np.zeros(3, np.int64), history) == 0.0


def plans(counts: np.ndarray) -> Callable[[float], LayerPlan]:
    topology = Topology(ranks=1, experts=counts.size)
    return lambda drop: get_policy("lrmoe")(Problem(counts_RE=counts[None], topology=topology, max_drop=drop))


@MODEST
@given(st.floats(0.001, 20), st.floats(0.0, 1.0), st.sampled_from([0.3, 0.6, 0.95]))
def test_the_search_finds_nearly_the_largest_drop_that_is_allowed(
    allowed: float, start: float, most: float
) -> None:
    counts = np.array([4000, 900, 100])
    calls = []

    def plan_at(drop: float) -> LayerPlan:
        calls.append(drop)
        return plans(counts)(drop)

    found = largest_drop(
        plan_at,
        lambda plan: predicted_variance(plan.counts_E, plan.quota_E, None),
        most=most,
        allowed=allowed,
        start=start,
    )
    best = min(most, allowed / (1 + allowed))
    assert len(calls) <= 5
    assert found.added <= 1.05 * allowed + 1e-9
    assert found.drop <= most
    if 0.2 * best < start < 3 * best:
        assert found.drop >= 0.75 * best
    assert found.plan.pairs - found.plan.kept == int(found.drop * 5000)


def test_nothing_allowed_drops_nothing_and_an_unused_cap_is_not_raised() -> None:
    counts = np.array([100, 100])
    none = largest_drop(plans(counts), lambda plan: 1.0, most=0.5, allowed=0.0, start=0.3)
    assert none.plan.exact
    exact = plans(counts)(0.0)
    spare = largest_drop(lambda drop: exact, lambda plan: 0.0, most=0.5, allowed=0.1, start=0.3)
    assert isinstance(spare, Found)
    assert spare.spare


def test_odds_scale_a_drop() -> None:
    assert scaled(0.5, 1.0, 1.0) == pytest.approx(0.5)
    assert scaled(0.5, 2.0, 1.0) == pytest.approx(1 / 3)
    assert scaled(0.3, 0.0, 1.0) == 1.0


def test_debt_is_paid_back_credit_is_small_and_state_is_json() -> None:
    limit = VarianceLimit(limit=0.1)
    limit.book(0.5, None)
    assert limit.allowed() < 0.03
    for _ in range(30):
        limit.book(0.0, None)
    assert 0.1 < limit.allowed() <= 0.11
    limit.book(0.1, 0.05)
    assert limit.factor == pytest.approx(1.2)
    again = VarianceLimit(limit=0.1)
    again.load(json.loads(json.dumps(limit.state())))
    assert again == limit


def test_debt_fades_over_fifty_calls() -> None:
    limit = VarianceLimit(limit=0.1)
    limit.book(1.098, None)
    for _ in range(50):
        limit.book(0.098, None)
    assert limit.debt == pytest.approx((1 - 1 / 50) ** 50, rel=1e-6)


def test_the_correction_moves_by_eight_at_most_and_not_where_next_to_nothing_was_predicted() -> None:
    limit = VarianceLimit(limit=0.1)
    limit.book(50.0, 0.05)
    assert limit.factor == pytest.approx(0.8 + 0.2 * 8)
    limit.book(0.0, 0.05)
    assert limit.factor == pytest.approx(0.8 * 2.4 + 0.2 / 8)
    before = limit.factor
    limit.book(0.01, 1e-5)
    assert limit.factor == before


DRIFTS: dict[str, Callable[[float], float]] = {
    "fixed": lambda t: 0.8,
    "wider": lambda t: 0.2 + 1.3 * t,
    "narrower": lambda t: 1.5 - 1.3 * t,
    "waves": lambda t: 0.8 + 0.5 * math.sin(20 * t),
}


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("drift", DRIFTS)
def test_the_mean_over_fifty_calls_keeps_to_the_limit_on_drifting_data(drift: str, ranks: int) -> None:
    """Spread, expert means and popularity drift; quotas are chosen before a call's scores are drawn."""
    rng, experts, calls, limit = np.random.default_rng(3), 8, 120, VarianceLimit(limit=0.1)
    sums, ratios, policy = np.zeros((experts, COLUMNS)), [], get_policy("lrmoe")
    for call in range(calls):
        spread = DRIFTS[drift](call / calls)
        popular = np.exp(np.sin(np.arange(experts) * 1.7 + call / 30))
        sizes = rng.poisson(150 * popular / popular.mean())
        scores = [rng.lognormal(math.sin(e + call / 20), spread, n) for e, n in enumerate(sizes.tolist())]
        counts = np.stack([rng.multinomial(n, np.full(ranks, 1 / ranks)) for n in sizes], axis=1)
        history, allowed = ScoreHistory.from_sums(sums), limit.allowed()

        def plan_at(
            drop: float, counts: np.ndarray = counts, past: ScoreHistory | None = history
        ) -> LayerPlan:
            return policy(
                Problem(
                    counts_RE=counts,
                    topology=Topology(ranks=ranks, experts=experts),
                    slots=2 if ranks > 1 else 0,
                    max_drop=drop,
                    score_mean_E=None if past is None else past.mean_E,
                    score_bins=None if past is None else past.bins_EB2,
                )
            )

        def told(plan: LayerPlan, past: ScoreHistory | None = history) -> float:
            factor = 1.0 if past is None else limit.factor
            return factor * predicted_variance(plan.counts_E, plan.quota_E, past)

        start = scaled(limit.drop, limit.predicted, allowed) if limit.drop else allowed / (1 + allowed)
        found = largest_drop(plan_at, told, most=0.7, allowed=allowed, start=start)
        limit.drop, limit.predicted = found.drop, found.added
        ratios.append(measured(scores, found.plan.quota_E))
        raw = (
            None if history is None else predicted_variance(found.plan.counts_E, found.plan.quota_E, history)
        )
        limit.book(ratios[-1], raw)
        sums = 0.9 * sums + sums_of(scores)
    means = np.convolve(ratios, np.ones(50) / 50, "valid")
    assert means.max() <= 1.1 * limit.limit
    assert np.mean(ratios[20:]) >= 0.6 * limit.limit, "the limit is used where max_drop leaves room"
