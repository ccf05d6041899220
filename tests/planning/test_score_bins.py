"""What past scores say, and quotas from them: one sampling constant, against independent optimisers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, brentq, minimize

from lrmoe.planning import Problem, Topology
from lrmoe.planning.placement import place
from lrmoe.planning.prices import replica_quotas
from lrmoe.planning.quotas import home_quotas
from lrmoe.planning.score_bins import BINS, COLUMNS, LOWEST, Cells, ScoreHistory
from lrmoe.simulate.generators import generate

MODEST = settings(deadline=None, max_examples=60, derandomize=True)


def sums_of(scores: list[np.ndarray]) -> np.ndarray:
    """Sums of every expert's scores, counted pair by pair: float64 (E, COLUMNS)."""
    table = np.zeros((len(scores), COLUMNS))
    for row, score in zip(table, scores, strict=True):
        if not score.size:
            continue
        row[:3] = score.size, score.sum(), (score**2).sum()
        for one in score / score.mean():
            place = int(np.clip(np.floor(np.log2(max(one, 1e-30))) - LOWEST, 0, BINS - 1))
            row[3 + place] += 1
            row[3 + BINS + place] += one
    return table


def drawn(seed: int, experts: int, size: int = 200) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.lognormal(rng.normal(), rng.uniform(0.2, 1.5), rng.poisson(size)) for _ in range(experts)]


def asked(scores: list[np.ndarray], drop: float, ranks: int = 1) -> Problem:
    history = ScoreHistory.from_sums(sums_of(scores))
    assert history is not None
    counts = np.zeros((ranks, len(scores)), dtype=np.int64)
    counts[0] = [s.size for s in scores]
    return Problem(
        counts_RE=counts,
        topology=Topology(ranks=ranks, experts=len(scores)),
        max_drop=drop,
        score_mean_E=history.mean_E,
        score_bins=history.bins_EB2,
    )


def added(score: np.ndarray, quota: float) -> float:
    """sum of (1/pi - 1) R of one expert, pi = min(1, c score) of sum `quota`, by a root finder."""
    if quota >= score.size:
        return 0.0
    c = brentq(lambda c: np.minimum(1, c * score).sum() - quota, 0, 1 / score.min() + 1)
    return float(((1 / np.minimum(1, c * score) - 1) * score**2).sum())


def test_sums_give_means_and_bins_and_fill_in_experts_without_past() -> None:
    scores = [np.array([1.0, 3.0]), np.array([]), np.array([2.0, 2.0, 2.0, 2.0])]
    found = ScoreHistory.from_sums(sums_of(scores))
    assert found is not None
    assert found.mean_E.tolist() == [2.0, 2.0, 2.0]
    assert found.square_E.tolist() == [5.0, 4.5, 4.0]
    assert found.bins_EB2[0, -LOWEST - 1].tolist() == [0.5, 0.5]
    assert found.bins_EB2[0, -LOWEST].tolist() == [0.5, 1.5]
    assert found.bins_EB2[2, -LOWEST].tolist() == [1.0, 1.0]
    np.testing.assert_allclose((found.bins_EB2[:, :, 0] * found.bins_EB2[:, :, 1]).sum(axis=1), 1.0)
    assert ScoreHistory.from_sums(np.zeros((3, COLUMNS))) is None


def test_sums_without_bins_know_the_means_only() -> None:
    table = np.zeros((2, COLUMNS))
    table[:, :3] = [[1, 2, 4], [1, 6, 36]]
    found = ScoreHistory.from_sums(table)
    assert found is not None
    assert found.mean_E.tolist() == [2.0, 6.0]
    assert found.bins_EB2[:, -LOWEST].tolist() == [[1.0, 1.0], [1.0, 1.0]]


@MODEST
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.floats(0.01, 0.99))
def test_the_constant_keeps_the_total(seed: int, experts: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 50, (experts, 3)).astype(float)
    cells = Cells(pairs_BE=pairs, weight_BE=pairs * rng.lognormal(0, 2, pairs.shape))
    total = share * pairs.sum()
    assert cells.kept(cells.constant(total)).sum() == pytest.approx(total, rel=1e-9)


@MODEST
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.floats(0.05, 0.8))
def test_on_one_rank_every_pair_has_one_constant(seed: int, experts: int, drop: float) -> None:
    """The added variance is within 2 % of all pairs' own optimum, of which quotas know seven bins an expert."""
    scores = drawn(seed, experts)
    problem = asked(scores, drop)
    quota = home_quotas(problem)
    assert quota.sum() == problem.pairs - problem.drop_cap
    found = sum(added(s, q) for s, q in zip(scores, quota.tolist(), strict=True))
    together = np.concatenate(scores)
    best = added(together, problem.pairs - problem.drop_cap)
    assert found <= 1.02 * best + 1e-3 * float((together**2).sum())


def cell_loss(cells: Cells, kept_BE: np.ndarray) -> float:
    used = cells.pairs_BE > 0
    return float((cells.weight_BE[used] ** 2 / np.maximum(kept_BE[used], 1e-9)).sum())


def best_cells(problem: Problem, cells: Cells, share_RE: np.ndarray, peak: int) -> float:
    """Least sum of S^2 / q over the cells under the ranks' loads and the drop, by SciPy."""
    used = (cells.pairs_BE > 0).reshape(-1)
    pairs, weight = cells.pairs_BE.reshape(-1)[used], cells.weight_BE.reshape(-1)[used]
    rows = np.tile(share_RE, (1, cells.pairs_BE.shape[0]))[:, used]
    scale = float((weight**2 / pairs).sum())
    found = minimize(
        lambda q: (weight**2 / q).sum() / scale,
        (1 - problem.max_drop) * pairs,
        jac=lambda q: -(weight**2) / q**2 / scale,
        bounds=list(zip(0.02 * pairs, pairs, strict=True)),
        constraints=[
            LinearConstraint(rows, 0, peak),
            LinearConstraint(np.ones((1, pairs.size)), 0, problem.pairs - problem.drop_cap),
        ],
        method="SLSQP",
        options={"maxiter": 300},
    )
    assert found.success
    return float(found.fun) * scale


def loss_of(cells: Cells, quota_E: np.ndarray) -> float:
    """Each expert's quota spread over its cells with the expert's own constant."""
    total = 0.0
    for e, quota in enumerate(quota_E.tolist()):
        own = cells.part(slice(e, e + 1))
        scaled = np.minimum(own.pairs_BE, own.constant(float(quota)) * own.weight_BE)
        total += cell_loss(own, scaled)
    return total


@pytest.mark.parametrize("drop", [0.15, 0.4])
@pytest.mark.parametrize("ranks", [1, 3])
def test_quotas_at_home_are_the_convex_optimum_under_the_peak(ranks: int, drop: float) -> None:
    for seed in range(3):
        problem = asked(drawn(seed, 6, size=2000), drop, ranks)
        cells, quota = Cells.of(problem), home_quotas(problem)
        peak = int(quota.reshape(ranks, -1).sum(axis=1).max())
        share = np.kron(np.eye(ranks), np.ones((1, 6 // ranks)))
        assert loss_of(cells, quota) <= 1.005 * best_cells(problem, cells, share, peak)


@pytest.mark.parametrize("drop", [0.2, 0.5])
def test_quotas_with_replicas_are_near_the_convex_optimum_in_place(drop: float) -> None:
    for seed in range(3):
        counts = generate("lognormal", ranks=4, experts=8, top_k=2, tokens=4096, seed=seed)[0]
        history = ScoreHistory.from_sums(sums_of(drawn(seed, 8)))
        assert history is not None
        problem = Problem(
            counts_RE=counts,
            topology=Topology(ranks=4, experts=8),
            slots=2,
            max_drop=drop,
            score_mean_E=history.mean_E,
            score_bins=history.bins_EB2,
        )
        spread, cells = place(problem), Cells.of(problem)
        assert spread is not None
        found = replica_quotas(problem, spread.expert_J, spread.rank_J, spread.pairs_J)
        share = np.zeros((4, 8))
        share[spread.rank_J, spread.expert_J] = spread.pairs_J / problem.counts_E[spread.expert_J]
        assert loss_of(cells, found.quota_E) <= 1.02 * best_cells(problem, cells, share, found.peak)


def test_a_hot_expert_of_large_scores_is_spared_for_cold_ones_of_small_scores() -> None:
    rng = np.random.default_rng(0)
    hot = rng.lognormal(1.0, 0.3, 3000)
    cold = [rng.lognormal(-2.0, 0.3, 500) for _ in range(3)]
    problem = asked([hot, *cold], 0.25)
    kept = home_quotas(problem) / problem.counts_E
    assert kept[0] > 0.95
    assert kept[1:].max() < 0.3
