"""The benchmarks of bias and of the variance limit, cut short."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.timeout(300)
def test_only_the_unbiased_rule_averages_out() -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "unbiased.py"), "--json", "--batches", "6", "--warm-steps", "2"],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    found = {row["name"]: row["value"] for row in map(json.loads, run.stdout.splitlines())}
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
    spec = importlib.util.spec_from_file_location("benchmark_fidelity", BENCHMARKS / "fidelity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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
