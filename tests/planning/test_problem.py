"""The planner's question: what is refused, and that nothing wraps at 32 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lrmoe.errors import PlanError
from lrmoe.planning import Problem, Topology, get_policy


def problem(counts: object, *, ranks: int = 1, experts: int = 2, **kwargs: object) -> Problem:
    return Problem(counts_RE=counts, topology=Topology(ranks=ranks, experts=experts), **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.array([[1, -1]]), "-1.*non-negative"),
        (np.array([[1.0, 2.0]]), "float64.*integer"),
        (np.array([[True, False]]), "bool.*integer"),
        (np.array([[1, 2, 3]]), r"\(1, 3\).*\(1, 2\)"),
        (np.array([1, 2]), r"\(2,\).*\(1, 2\)"),
        (np.array([[1, 2], [3, 4]]), r"\(2, 2\).*\(1, 2\)"),
        (np.array([[2**62, 2**62]]), "too many pairs"),
        (np.array([[2**63, 0]], dtype=np.uint64), "too many pairs"),
    ],
)
def test_bad_counts_are_refused(counts: np.ndarray, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        problem(counts)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_drop": 1.0}, "max_drop=1.0"),
        ({"max_drop": -0.1}, "max_drop=-0.1"),
        ({"max_drop": float("nan")}, "max_drop=nan"),
        ({"drop": "sometimes"}, "drop='sometimes'"),
    ],
)
def test_bad_limits_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        problem(np.array([[1, 2]]), **kwargs)


@pytest.mark.parametrize(("ranks", "experts"), [(2, 5), (8, 30), (4, 2), (0, 4), (2, 0)])
def test_experts_must_split_evenly_over_ranks(ranks: int, experts: int) -> None:
    with pytest.raises(PlanError, match=f"experts={experts}|ranks={ranks}"):
        Topology(ranks=ranks, experts=experts)


def test_homes_are_contiguous_blocks() -> None:
    assert Topology(ranks=3, experts=6).home_E.tolist() == [0, 0, 1, 1, 2, 2]


def test_u07a_counts_beyond_32_bits_stay_exact() -> None:
    counts = np.array([[2**31 - 1, 5], [2**31 - 1, 2**33]], dtype=np.int64)
    question = problem(counts, ranks=2, max_drop=0.25)
    assert question.counts_E.tolist() == [2**32 - 2, 2**33 + 5]
    assert question.pairs == 2**32 + 2**33 + 3
    assert question.drop_cap == (2**32 + 2**33 + 3) // 4
    plan = get_policy("lrmoe")(question)
    plan.check(question)
    assert plan.forward_load_R.tolist() == [2**32 - 2, 2**33 + 5]
    assert plan.forward_load_R.dtype == plan.quota_E.dtype == np.int64
    assert question.pairs - plan.kept == question.drop_cap
    assert (plan.forward_load_R * 7168 * 2).tolist() == [(2**32 - 2) * 14336, (2**33 + 5) * 14336]


def test_narrow_integer_counts_do_not_wrap_when_summed() -> None:
    question = problem(np.full((1, 2), 200, dtype=np.uint8))
    assert question.pairs == 400
    assert problem(np.full((1, 2), 2**31 - 1, dtype=np.int32)).pairs == 2**32 - 2
