"""The benchmarks of bias and of the variance limit, cut short."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests import benchmark


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.timeout(300)
def test_only_the_unbiased_rule_averages_out() -> None:
    ran = benchmark.run("unbiased", "--batches", "6", "--warm-steps", "2", limit_s=280)
    assert ran.code == 0, ran.said
    found = ran.values
    rules = [
        f"unbiased.{estimator}.drop{drop}" for estimator in ("sampled", "topk") for drop in ("0.3", "0.5")
    ]
    assert found.keys() == {f"{rule}.{name}" for rule in rules for name in ("one", "mean6", "ratio")}
    assert all(found[f"{rule}.ratio"] == found[f"{rule}.mean6"] / found[f"{rule}.one"] for rule in rules)
    for drop in ("0.3", "0.5"):
        sampled, topk = (found[f"unbiased.{name}.drop{drop}.ratio"] for name in ("sampled", "topk"))
        assert sampled < 0.65  # independent errors: 0.41
        assert topk > 0.75
        assert found[f"unbiased.sampled.drop{drop}.one"] > 0


@pytest.fixture
def fidelity() -> ModuleType:
    return benchmark.load("fidelity")


def test_the_limit_holds_and_is_used_while_data_drift(fidelity: ModuleType) -> None:
    tight, wide = (fidelity.measured(limit, 1, 80, 0) for limit in (0.05, 0.5))
    assert len(tight.added) == len(wide.added) == 80
    assert max(tight.worst, wide.worst) <= 1.1
    assert min(tight.worst, wide.worst) >= 0.8
    assert wide.kept_share < tight.kept_share < 0.95


def test_the_worst_window_counts(fidelity: ModuleType) -> None:
    added = [0.0] * 100 + [0.2] * 50 + [0.1] * 60
    case = fidelity.Kept(limit=0.1, ranks=1, added=added, shares=[0.5, 0.7] * 105)
    assert case.worst == pytest.approx(2.0)
    assert case.kept_share == pytest.approx(0.6)
    names = [row["name"] for row in fidelity.figures([case], {})]
    assert names == ["fidelity.limit0.1.ep1.worst_over_limit", "fidelity.limit0.1.ep1.kept_share"]
