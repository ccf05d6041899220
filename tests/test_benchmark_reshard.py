"""The reshard benchmark: what fails it, and a small matrix of it on real processes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RESHARD = Path(__file__).resolve().parents[1] / "benchmarks" / "reshard.py"


@pytest.fixture(scope="module")
def reshard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_reshard", RESHARD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def case(module: Any, after: tuple[int, str], worst: float) -> Any:
    difference = module.Difference(worst=worst, where="loss of step", bitwise=worst == 0)
    return module.Case(before=(2, "owned"), after=after, difference=difference)


@pytest.mark.parametrize(
    ("same", "other", "fine"), [(0.0, 1e-12, True), (1e-16, 1e-12, False), (0.0, 1e-9, False)]
)
def test_what_fails_it(reshard: ModuleType, same: float, other: float, fine: bool) -> None:
    cases = [case(reshard, (2, "owned"), same), case(reshard, (4, "sharded"), other)]
    assert reshard.passed(cases) == fine
    found = {row["name"]: row["value"] for row in reshard.figures(cases, {})}
    assert found == {
        "reshard.cases": 2,
        "reshard.worst_relative_difference": max(same, other),
        "reshard.bitwise_same_layout": float(same == 0),
    }


@pytest.mark.long
@pytest.mark.distributed
def test_a_small_matrix() -> None:
    run = subprocess.run(
        [sys.executable, str(RESHARD), "--json", "--ranks", "1", "2"],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    found = {row["name"]: row["value"] for row in map(json.loads, run.stdout.splitlines())}
    assert found["reshard.cases"] == 16
    assert found["reshard.bitwise_same_layout"] == 1
    assert 0 < found["reshard.worst_relative_difference"] <= 1e-10
    assert "saved in" in run.stderr
