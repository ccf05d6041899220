"""What policies remember, through JSON and back: every plan as it was, and nothing that is no legal one."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lrmoe.config import POLICIES
from lrmoe.errors import ConfigError
from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.policies import EPLB, FlexMoE, SmartMoE, Symi
from lrmoe.planning.problem import History
from lrmoe.planning.saved import history_state, read_history

TOPOLOGY = Topology(ranks=4, experts=16)
EAGER: dict[str, Callable[[Problem], LayerPlan]] = {
    "flexmoe": FlexMoE(interval=1, threshold=1.0, sync_seconds=1e-9),
    "smartmoe": SmartMoE(interval=1),
    "eplb": EPLB(interval=1),
}


def counts(seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    drawn = np.random.default_rng(seed)
    return (drawn.pareto(1.0, (4, 16)) * 20).astype(np.int64)


def planned(policy: Callable[[Problem], LayerPlan], calls: int) -> History:
    history = History()
    for call in range(calls):
        plan = policy(Problem(counts_RE=counts(call), topology=TOPOLOGY, slots=2, history=history))
        history = History(counts=(*history.counts, plan.counts_RE), previous=plan, step=call + 1)
    return history


def through_json(history: History) -> History:
    return read_history(json.loads(json.dumps(history_state(history))), TOPOLOGY)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_goes_on_as_if_nothing_had_happened(name: str) -> None:
    policy = EAGER.get(name) or get_policy(name)
    before = planned(policy, 4)
    after = through_json(before)
    assert after.step == before.step == 4
    assert [c.dtype for c in after.counts] == [np.int64] * 4
    assert all(np.array_equal(a, b) for a, b in zip(before.counts, after.counts, strict=True))
    assert before.previous is not None
    assert after.previous is not None
    assert after.previous.fingerprint() == before.previous.fingerprint()
    for call in (4, 5):
        plans = [
            policy(Problem(counts_RE=counts(call), topology=TOPOLOGY, slots=2, history=history))
            for history in (before, after)
        ]
        assert plans[0].fingerprint() == plans[1].fingerprint()


def test_a_plan_with_every_field() -> None:
    """Overflow, copies, traffic, a backward of its own, parts; numbers of numpy's where a user's policy left them."""
    plan = Symi(slots_per_rank=6, capacity_factor=0.9)(Problem(counts_RE=counts(1), topology=TOPOLOGY))
    kept_E = np.maximum(plan.quota_E - 1, 0)
    first_J = np.zeros_like(plan.instance_expert_J)
    experts, places = np.unique(plan.instance_expert_J, return_index=True)
    first_J[places] = kept_E[experts]
    whole = dataclasses.replace(
        plan, quota_E=kept_E, backward_J=first_J, reason="budget", recompute=True, forward_chunks=3
    )
    assert all(value is not None for value in vars(whole).values())
    assert plan.overflow_RE is not None
    assert plan.overflow_RE.any()
    of_numpy: Any = np.int64(3)
    given = dataclasses.replace(whole, forward_chunks=of_numpy)
    after = through_json(History(counts=(counts(1),), previous=given, step=1)).previous
    assert after is not None
    assert after.fingerprint() == whole.fingerprint()


def test_nothing_remembered_yet() -> None:
    after = through_json(History())
    assert (after.step, after.counts, after.previous) == (0, (), None)


Change = Callable[[dict[str, Any]], object]
BAD: dict[str, tuple[Change, str]] = {
    "no step": (lambda s: s.pop("step"), "past lacks step"),
    "a step in words": (lambda s: s.update(step="2"), r"past.step='2': must be an integer"),
    "a negative step": (lambda s: s.update(step=-1), r"past.step=-1: must be an integer >= 0"),
    "counts of another type": (lambda s: s.update(counts=3), r"past.counts=3: must be a list"),
    "a call of another type": (lambda s: s.update(counts=[None]), r"past.counts\[0\]: holds object"),
    "counts in parts": (lambda s: s["counts"].append([[0.5] * 16] * 4), r"past.counts\[3\]: holds float64"),
    "uneven counts": (lambda s: s["counts"][1][0].pop(), r"past.counts\[1\]: must be equally long lists"),
    "counts of other experts": (
        lambda s: s["counts"].append([[1] * 8] * 4),
        r"past.counts\[3\] has shape \(4, 8\): must be \(4, 16\)",
    ),
    "a negative count": (lambda s: s["counts"][0][0].__setitem__(0, -1), "past.counts holds a negative"),
    "a plan of another type": (lambda s: s.update(previous=[]), r"past.previous=\[\]: must be a table"),
    "a plan without quotas": (lambda s: s["previous"].pop("quota_E"), "past.previous lacks quota_E"),
    "a plan with no quotas": (lambda s: s["previous"].update(quota_E=None), "past.previous: "),
    "a quota too many": (lambda s: s["previous"]["quota_E"].append(0), "past.previous: quota_E has shape"),
    "a rank too high": (
        lambda s: s["previous"]["instance_rank_J"].__setitem__(0, 4),
        r"past.previous: instance_rank_J leaves \[0, 4\)",
    ),
    "pairs that nobody sent": (
        lambda s: s["previous"]["assign_RJ"][0].__setitem__(0, 10**6),
        "past.previous: source rank 0 sends",
    ),
    "an unknown reason": (lambda s: s["previous"].update(reason="mood"), "past.previous: reason='mood'"),
    "a reason of another type": (
        lambda s: s["previous"].update(reason=1),
        "past.previous.reason=1: must be text",
    ),
    "no parts": (lambda s: s["previous"].update(forward_chunks=0), "past.previous: forward_chunks=0"),
    "a flag in numbers": (
        lambda s: s["previous"].update(recompute=1),
        "past.previous.recompute=1: must be true",
    ),
    "traffic of other ranks": (
        lambda s: s["previous"]["traffic"]["fetch_R"].append(1),
        r"past.previous.traffic.fetch_R has shape \(5,\): must be \(4,\)",
    ),
    "no copies": (lambda s: s["previous"]["copies_J"].__setitem__(0, 0), "past.previous: copies_J"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_history_is_named(name: str) -> None:
    change, said = BAD[name]
    state = copy.deepcopy(json.loads(json.dumps(history_state(planned(EAGER["eplb"], 3)))))
    read_history(state, TOPOLOGY)
    change(state)
    with pytest.raises(ConfigError, match=said):
        read_history(state, TOPOLOGY)
