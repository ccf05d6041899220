"""The reshard benchmark: what fails it, and a small matrix of it on real processes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests import benchmark


@pytest.fixture(scope="module")
def reshard() -> ModuleType:
    return benchmark.load("reshard")


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
    ran = benchmark.run("reshard", "--ranks", "1", "2", limit_s=110)
    assert ran.code == 0, ran.said
    found = ran.values
    assert found["reshard.cases"] == 16
    assert found["reshard.bitwise_same_layout"] == 1
    assert 0 < found["reshard.worst_relative_difference"] <= 1e-10
    assert "saved in" in ran.said
