"""The legality check finds every kind of illegal plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from lrmoe.errors import PlanError
from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.plan import Traffic

COUNTS = np.array([[4, 1, 0, 3], [2, 5, 0, 1]])


@pytest.fixture
def question() -> Problem:
    return Problem(counts_RE=COUNTS, topology=Topology(ranks=2, experts=4), max_drop=0.25)


def changed(question: Problem, **changes: object) -> LayerPlan:
    return dataclasses.replace(get_policy("lrmoe")(question), **changes)  # type: ignore[arg-type]


def test_the_policys_plan_is_legal(question: Problem) -> None:
    changed(question).check(question)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quota_E": [6, 6, 0, 5]}, r"expert 3 is 5.*\[1, 4\]"),
        ({"quota_E": [6, 0, 0, 4]}, r"expert 1 is 0.*\[1, 6\]"),
        ({"quota_E": [6, 6, 1, 4]}, r"expert 2 is 1.*\[0, 0\]"),
        ({"quota_E": [-1, 6, 0, 4]}, "expert 0 is -1"),
        ({"quota_E": [3, 3, 0, 4]}, "6 pairs left out.*cap is 4 of 16"),
        ({"quota_E": [6, 6, 0]}, r"shape \(3,\)"),
        ({"quota_E": np.array([5.5, 5.5, 0.0, 4.0])}, "float64"),
        ({"instance_rank_J": [0, 0, 1, 2]}, r"instance_rank_J leaves \[0, 2\)"),
        ({"instance_rank_J": [0, -1, 1, 1]}, "instance_rank_J leaves"),
        ({"instance_expert_J": [0, 1, 2, 4]}, "instance_expert_J leaves"),
        ({"instance_expert_J": [0, 1, 2]}, "one length"),
        ({"instance_expert_J": [0, 0, 2, 3], "instance_rank_J": [0, 0, 1, 1]}, "two instances"),
        ({"instance_expert_J": [1, 0, 2, 3]}, "source rank 0 sends 1 pairs of expert 0 and has 4"),
        ({"assign_RJ": COUNTS + np.array([[1, -1, 0, 0], [0, 0, 0, 0]])}, "source rank 0 sends 5 pairs"),
        ({"assign_RJ": COUNTS[::-1]}, "source rank 0 sends 2 pairs of expert 0 and has 4"),
        ({"assign_RJ": COUNTS * np.array([[1, 1, 1, -1], [1, 1, 1, 1]])}, "negative"),
        ({"assign_RJ": COUNTS[:, :3]}, r"assign_RJ has shape \(2, 3\)"),
        ({"backward_J": [1, 0, 0, 0]}, "backward runs 1 pairs of expert 0"),
        ({"backward_J": [4, 4, 0]}, r"backward_J has shape \(3,\)"),
        ({"overflow_RE": COUNTS}, "source rank 0 sends"),
        ({"counts_RE": COUNTS + 1}, "counts_RE differs from the problem's"),
        ({"backward_J": [6.0, 6.0, 0.0, 4.0]}, "backward_J has dtype float64"),
        ({"copies_J": [1.0, 1.0, 1.0, 1.0]}, "copies_J has dtype float64"),
        ({"copies_J": [True, True, True, True]}, "copies_J has dtype bool"),
        ({"overflow_RE": COUNTS * 0.0}, "overflow_RE has dtype float64"),
    ],
)
def test_every_kind_of_illegal_plan_is_found(
    question: Problem, changes: dict[str, object], message: str
) -> None:
    arrays = {k: np.asarray(v) for k, v in changes.items()}
    with pytest.raises(PlanError, match=message):
        changed(question, **arrays).check(question)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reason": "because"}, "reason='because': must be one of 'off', 'always', 'overload', 'budget'"),
        ({"forward_chunks": 0}, r"forward_chunks=0: must be a whole number in \[1, 64\]"),
        ({"backward_chunks": 65}, "backward_chunks=65"),
        ({"backward_chunks": 2.0}, "backward_chunks=2.0"),
        ({"forward_chunks": True}, "forward_chunks=True"),
        ({"quota_E": [6, 6, 0, 4]}, "quota_E has dtype list"),
    ],
)
def test_words_and_numbers_of_a_plan_are_checked(
    question: Problem, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        changed(question, **changes).check(question)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Traffic)])
@pytest.mark.parametrize("value", [np.array([-1, 0]), np.zeros(3, dtype=np.int64), np.array([0.5, 0])])
def test_traffic_is_counted_in_whole_experts_per_rank(
    question: Problem, name: str, value: np.ndarray
) -> None:
    moved = changed(question).moved
    changed(question, traffic=moved).check(question)
    with pytest.raises(PlanError, match=f"traffic.{name} has"):
        changed(question, traffic=dataclasses.replace(moved, **{name: value})).check(question)


def test_fingerprints_tell_plans_apart(question: Problem) -> None:
    plan = changed(question)
    assert plan.fingerprint() == changed(question).fingerprint()
    assert 0 <= plan.fingerprint() < 2**63
    for name in ("instance_expert_J", "instance_rank_J", "assign_RJ", "quota_E"):
        other = getattr(plan, name).copy()
        other.flat[0] += 1
        assert changed(question, **{name: other}).fingerprint() != plan.fingerprint(), name


def test_fingerprints_cover_everything_that_ranks_must_agree_on(question: Problem) -> None:
    none_R = np.zeros(2, dtype=np.int64)
    traffic = Traffic(fetch_R=none_R, refetch_R=none_R, return_R=none_R, state_R=none_R, resident_R=none_R)
    changes: list[dict[str, Any]] = [
        {},
        {"reason": "budget"},
        {"forward_chunks": 2},
        {"backward_chunks": 2},
        {"recompute": True},
        {"traffic": traffic},
        *[{"traffic": dataclasses.replace(traffic, **{name: none_R + 1})} for name in vars(traffic)],
        {"counts_RE": COUNTS + 1},
        {"backward_J": np.arange(4)},
        {"copies_J": np.arange(4)},
        {"overflow_RE": np.arange(4)},
    ]
    prints = [changed(question, **change).fingerprint() for change in changes]
    assert len(set(prints)) == len(prints)
