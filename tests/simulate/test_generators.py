"""Generated counts: sums, distinct experts, agreement of the two samplings, calibration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lrmoe.errors import ConfigError, PlanError
from lrmoe.simulate.generators import GENERATORS, calibrate, fixed_peak, generate
from lrmoe.simulate.sampling import inclusion, sample_counts

SIZES = {"ranks": 4, "experts": 64, "top_k": 4, "tokens": 500}


@pytest.mark.parametrize("sampling", ["tokens", "counts"])
@pytest.mark.parametrize("name", GENERATORS)
def test_every_token_takes_k_distinct_experts(name: str, sampling: str) -> None:
    counts = generate(name, **SIZES, seed=3, steps=3, sampling=sampling)
    assert counts.shape == (3, 4, 64)
    assert counts.dtype == np.int64
    sums = counts.sum(axis=2)
    assert (sums % 4 == 0).all()
    assert (counts >= 0).all()
    assert (counts <= sums[:, :, None] // 4).all(), "an expert taken more often than there are tokens"
    if name not in ("idle", "uneven_sources"):
        assert (sums == 2000).all()


@pytest.mark.parametrize("name", GENERATORS)
def test_equal_seeds_give_equal_counts(name: str) -> None:
    first, second = (generate(name, **SIZES, seed=7, steps=2) for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, generate(name, **SIZES, seed=8, steps=2))


@pytest.mark.parametrize(
    ("experts", "top_k", "sigma"), [(64, 1, 1.6), (64, 4, 1.0), (128, 8, 1.6), (128, 8, 3.0)]
)
def test_counting_per_expert_agrees_with_counting_tokens(experts: int, top_k: int, sigma: float) -> None:
    rng = np.random.default_rng(0)
    weight = np.exp(sigma * rng.standard_normal((1, experts)))
    tokens = np.array([40000])
    exact = sample_counts(weight, tokens, top_k, rng, "tokens") / 40000
    share = inclusion(weight, top_k)
    assert share.sum() == pytest.approx(top_k, rel=1e-6)
    assert np.abs(exact - share).max() < 0.012, "four standard errors of 40000 tokens are 0.01"


def test_counting_per_expert_spreads_like_counting_tokens() -> None:
    rng = np.random.default_rng(1)
    weight, tokens = np.exp(1.2 * rng.standard_normal((1, 32))), np.array([400])
    draws = {
        kind: np.concatenate([sample_counts(weight, tokens, 4, rng, kind) for _ in range(600)])
        for kind in ("tokens", "counts")
    }
    spread = {kind: counts.reshape(600, 4, 8).sum(axis=2).var(axis=0) for kind, counts in draws.items()}
    assert spread["counts"] == pytest.approx(spread["tokens"], rel=0.3)


@pytest.mark.parametrize("sigma", [5.0, 8.0, 15.0])
def test_extreme_skew_keeps_its_sums(sigma: float) -> None:
    counts = generate("lognormal", **SIZES, seed=0, sigma=sigma, sampling="counts")
    assert (counts.sum(axis=2) == 2000).all()


def test_popular_experts_without_room_are_taken_by_every_token() -> None:
    weight = np.array([[1.0, 2.0, 0.0, 5.0, 0.0]])
    for kind in ("tokens", "counts"):
        counts = sample_counts(weight, np.array([10]), 3, np.random.default_rng(0), kind)
        assert counts.tolist() == [[10, 10, 0, 10, 0]]


def test_default_skew_is_that_of_the_defaults() -> None:
    peaks = [
        fixed_peak(
            generate("lognormal", ranks=8, experts=128, top_k=8, tokens=8192, seed=s, sampling="counts")[0]
        )
        for s in range(20)
    ]
    assert 2.0 < np.mean(peaks) < 2.6


def test_hot_spots_are_where_they_are_said_to_be() -> None:
    def hottest(name: str, steps: int, **options: Any) -> list[int]:
        counts = generate(name, **SIZES, seed=0, steps=steps, **options)
        return [int(c.sum(axis=0).reshape(4, 16).sum(axis=1).argmax()) for c in counts]

    assert hottest("hot_rank", 2, rank=2) == [2, 2]
    assert hottest("rotating", 5) == [0, 1, 2, 3, 0]
    assert hottest("rotating", 4, every=2) == [0, 0, 1, 1]
    peaks = [fixed_peak(c) for c in generate("burst", **SIZES, seed=0, steps=5, at=3)]
    assert int(np.argmax(peaks)) == 3
    assert max(peaks[:3] + peaks[4:]) < 1.5 < peaks[3]


def test_idle_experts_homes_and_sources() -> None:
    counts = generate("idle", **SIZES, seed=0, idle_experts=0.5, idle_ranks=0.25, idle_sources=0.5)[0]
    assert (counts.sum(axis=1) == 0).sum() == 2
    assert (counts.sum(axis=0) == 0).sum() >= 32
    assert (counts.sum(axis=0).reshape(4, 16).sum(axis=1) == 0).sum() >= 1
    crowded = generate("idle", **SIZES, seed=0, idle_experts=1.0, idle_ranks=1.0)[0]
    assert (crowded.sum(axis=0) > 0).sum() == 4, "as many experts as a token takes stay in use"


def test_calibration_reaches_the_published_peak() -> None:
    seeds = range(6)
    sizes: dict[str, Any] = {"ranks": 8, "experts": 128, "top_k": 8, "tokens": 32768, "sampling": "counts"}
    sigma = calibrate(2.49, seeds=seeds, **sizes)
    peaks = [fixed_peak(generate("lognormal", **sizes, seed=s, sigma=sigma)[0]) for s in seeds]
    assert np.mean(peaks) == pytest.approx(2.49, abs=0.01)
    with pytest.raises(ConfigError, match=r"target_peak=7\.9: sigma 8 reaches no more than"):
        calibrate(7.9, seeds=seeds, **sizes)


def test_fixed_peak() -> None:
    assert fixed_peak(np.array([[3, 1], [3, 1]])) == 1.5
    assert fixed_peak(np.zeros((2, 4), dtype=np.int64)) == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "fancy"}, "generator='fancy': must be one of lognormal, zipf"),
        ({"sigm": 2}, "option 'sigm' of generator 'lognormal': unknown; valid: sampling, sigma"),
        ({"sigma": -1}, r"sigma=-1: must lie in \[0, 20\]"),
        ({"corr": 1.5}, r"corr=1.5: must lie in \[0, 1\]"),
        ({"top_k": 65}, "top_k=65: must lie in"),
        ({"tokens": 0}, "tokens=0: must be at least 1"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"sampling": "quick"}, "sampling='quick': must be one of auto, tokens, counts"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"name": "lognormal", **SIZES, "seed": 0, "steps": 1, **change}
    with pytest.raises(ConfigError, match=message):
        generate(**arguments)  # type: ignore[arg-type]


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match="experts=65"):
        generate("balanced", **{**SIZES, "experts": 65}, seed=0)


def test_too_few_popular_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="top_k=3: a source has only 2 experts"):
        sample_counts(np.array([[1.0, 1.0, 0.0]]), np.array([4]), 3, np.random.default_rng(0))
