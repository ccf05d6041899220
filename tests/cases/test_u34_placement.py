"""U34: every expert has its place, no rank holds one twice, and what cannot be spread evenly is refused early."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.config import POLICIES
from lrmoe.errors import ConfigError, PlanError
from lrmoe.integrations import transformers as lrmoe_hf
from lrmoe.layer import MoELayer
from lrmoe.planning import LayerPlan, Problem, Topology, get_policy, policy_info
from lrmoe.planning.problem import History
from lrmoe.planning.seats import seats_of
from tests.distributed.pool import Pool
from tests.integrations.models import make_model
from tests.layer.harness import exact

FEW = settings(deadline=None, max_examples=40, derandomize=True)
LAYOUTS = [(2, 4, 1), (3, 6, 1), (4, 8, 2), (2, 2, 3), (1, 4, 0)]  # ranks, experts, slots of foreign experts
SKEWED = {  # the case's loads, one hot expert, one hot rank, and nothing at all
    "hot": [100, 1, 1, 1, 1, 1, 1, 1],
    "hot rank": [50, 50, 1, 1, 1, 1, 1, 1],
    "even": [7] * 8,
    "single": [0, 0, 0, 0, 0, 0, 0, 5],
    "empty": [0] * 8,
}


def planned(policy: str, loads: list[list[int]], ranks: int, slots: int) -> list[tuple[Problem, LayerPlan]]:
    """The plans of consecutive calls, each of which the next one's history knows; sources share the loads."""
    found: list[tuple[Problem, LayerPlan]] = []
    for call in loads:
        table = np.array([[n // ranks + (r < n % ranks) for n in call] for r in range(ranks)], dtype=np.int64)
        past = tuple(problem.counts_RE for problem, _ in found)
        history = History(counts=past, previous=found[-1][1] if found else None, step=len(found))
        problem = Problem(
            counts_RE=table,
            topology=Topology(ranks=ranks, experts=len(call)),
            slots=min(slots, len(call) - len(call) // ranks),
            history=history,
        )
        found.append((problem, get_policy(policy)(problem)))
    return found


def assert_placed(problem: Problem, plan: LayerPlan, policy: str) -> None:
    plan.check(problem)
    places = list(zip(plan.instance_rank_J.tolist(), plan.instance_expert_J.tolist(), strict=True))
    assert len(set(places)) == len(places), "two copies of one expert on one rank"
    carried = {expert for _, expert in places}
    assert set(np.flatnonzero(problem.counts_E).tolist()) <= carried
    seats = seats_of(plan)
    experts, ranks = problem.topology.experts, problem.topology.ranks
    homes = [seats.expert_Q[seats.of(r)][: experts // ranks] for r in range(ranks)]
    assert np.concatenate(homes).tolist() == list(range(experts)), "every expert has a seat at home"
    kind, held = policy_info(policy).slots, np.bincount(plan.instance_rank_J, minlength=ranks)
    if kind in ("none", "shared"):
        assert int(held.max()) <= experts // ranks + problem.slots * (kind == "shared")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SKEWED)
def test_copies_of_hot_experts_lie_on_other_ranks(policy: str, name: str) -> None:
    for ranks, experts, slots in LAYOUTS:
        load = SKEWED[name][:experts]
        for problem, plan in planned(policy, [load, load, load[::-1]], ranks, slots):
            assert_placed(problem, plan, policy)


@pytest.mark.parametrize("policy", POLICIES)
@FEW
@given(
    layout=st.sampled_from(LAYOUTS),
    loads=st.lists(st.lists(st.integers(0, 60), min_size=8, max_size=8), min_size=1, max_size=3),
)
def test_any_loads(policy: str, layout: tuple[int, int, int], loads: list[list[int]]) -> None:
    ranks, experts, slots = layout
    calls = [load[:experts] for load in loads]
    first, again = (planned(policy, calls, ranks, slots) for _ in range(2))
    for (problem, plan), (_, repeated) in zip(first, again, strict=True):
        assert_placed(problem, plan, policy)
        assert plan.fingerprint() == repeated.fingerprint()


def test_the_cases_loads_are_spread_over_its_slots() -> None:
    """Loads [100, 1, 1, 1] with one foreign slot on each of two ranks: the hot expert is copied once and halved."""
    ((problem, plan),) = planned("lrmoe", [[100, 1, 1, 1]], 2, 1)
    assert_placed(problem, plan, "lrmoe")
    assert sorted(plan.forward_load_R.tolist()) == [51, 52]
    copies = [int(r) for r, e in zip(plan.instance_rank_J, plan.instance_expert_J, strict=True) if e == 0]
    assert sorted(copies) == [0, 1]


@FEW
@given(ranks=st.integers(1, 16), experts=st.integers(1, 40))
def test_experts_are_spread_evenly_or_refused(ranks: int, experts: int) -> None:
    """Never all that is left over on the last rank."""
    if experts % ranks:
        with pytest.raises(PlanError, match=f"experts={experts}.*ranks={ranks}.*multiple"):
            Topology(ranks=ranks, experts=experts)
    else:
        held = np.bincount(Topology(ranks=ranks, experts=experts).home_E, minlength=ranks)
        assert held.tolist() == [experts // ranks] * ranks


@pytest.mark.parametrize(("ranks", "experts"), [(2, 5), (8, 30), (4, 2), (3, 4)])
def test_the_cases_sizes_are_refused(ranks: int, experts: int) -> None:
    with pytest.raises(PlanError, match=f"experts={experts}.*ranks={ranks}"):
        Topology(ranks=ranks, experts=experts)


def refusals() -> tuple[str, str]:
    """Worker: five experts on two ranks, as a layer and as a host model."""
    group: Any = dist.group.WORLD
    with pytest.raises(PlanError) as layer:
        MoELayer(num_experts=5, hidden_size=8, intermediate_size=6, config=exact(), group=group)
    model = make_model("qwen3", num_experts=5)
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(ConfigError) as host:
        lrmoe_hf.shard_experts(model, group)
    assert [p.shape for p in model.parameters()] == shapes
    return str(layer.value), str(host.value)


def fingerprints() -> list[int]:
    """Worker: this process's own plans."""
    loads = [SKEWED["hot"], SKEWED["hot rank"], SKEWED["even"]]
    return [plan.fingerprint() for name in POLICIES for _, plan in planned(name, loads, 4, 2)]


@pytest.mark.distributed
def test_two_ranks_refuse_and_plan_alike(pool2: Pool) -> None:
    for layer, host in pool2.run(refusals):
        assert re.search(r"experts=5.*ranks=2", layer)
        assert re.search(r"5 experts.*2 ranks", host)
    first, second = pool2.run(fingerprints)
    assert first == second
