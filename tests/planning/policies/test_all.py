"""What holds for every policy: legal on every load pattern, every source's pairs conserved, deterministic."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings

from lrmoe import config
from lrmoe.errors import PlanError
from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.policies import INFO, policy_info
from lrmoe.planning.problem import History
from lrmoe.simulate.generators import GENERATORS
from tests.planning.oracles import problems
from tests.planning.policies.helpers import CURRENT, PAST, SHAPES, VARIANTS, Shape, ask, copies, run, series

SLOTS_OF = {
    "none": lambda problem: 0,
    "shared": lambda problem: problem.slots,
    "resident": lambda problem: problem.slots,
    "unbounded": lambda problem: problem.topology.experts,
}


def assert_sound(problem: Problem, plan: LayerPlan) -> None:
    """Legality, conservation of every source's pairs, one instance per (expert, rank), exact backward, sane traffic."""
    plan.check(problem)
    sent = np.zeros_like(problem.counts_RE)
    for j, expert in enumerate(plan.instance_expert_J.tolist()):
        sent[:, expert] += plan.assign_RJ[:, j]
    overflow = 0 if plan.overflow_RE is None else plan.overflow_RE
    assert np.array_equal(sent + overflow, problem.counts_RE)
    places = list(zip(plan.instance_rank_J.tolist(), plan.instance_expert_J.tolist(), strict=True))
    assert places == sorted(set(places))
    assert set(plan.instance_expert_J.tolist()) == set(range(problem.topology.experts))
    assert np.array_equal(plan.forward_load_R, plan.backward_load_R)
    for field in dataclasses.fields(plan.moved):
        value = getattr(plan.moved, field.name)
        assert value.shape == (problem.topology.ranks,)
        assert value.dtype == np.int64
        assert value.min() >= 0


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("name", VARIANTS)
def test_sound_on_every_generator(name: str, generator: str) -> None:
    for shape in SHAPES:
        for problem, plan in run(VARIANTS[name], series(generator, shape, steps=3), shape, slots=2):
            assert_sound(problem, plan)
            limit = SLOTS_OF[INFO[name.split()[0]].slots](problem) + problem.topology.experts_per_rank
            assert copies(plan).sum(axis=1).max() <= limit


@settings(deadline=None, max_examples=40, derandomize=True)
@given(problems())
def test_sound_on_odd_tables(problem: Problem) -> None:
    """Idle experts, ranks and sources, empty calls, few pairs; with and without slots and a history of another load."""
    foreign = problem.topology.experts - problem.topology.experts_per_rank
    slotted = dataclasses.replace(problem, slots=min(2, foreign))
    past = History(counts=(problem.counts_RE[::-1, ::-1].copy(),), step=10)
    for one in (problem, slotted, dataclasses.replace(slotted, history=past)):
        for policy in VARIANTS.values():
            if problem.topology.experts % getattr(policy, "groups", 1) == 0:
                assert_sound(one, policy(one))


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("symi")])
def test_only_symi_leaves_pairs_out(name: str) -> None:
    for problem, plan in run(VARIANTS[name], series("burst", SHAPES[0], steps=2), SHAPES[0], slots=2):
        assert plan.exact
        assert plan.reason == "off"
        assert plan.kept == problem.pairs
        assert plan.overflow_RE is None
        assert not INFO[name.split()[0]].drops


@pytest.mark.parametrize("name", VARIANTS)
def test_repeats_give_the_same_plan(name: str) -> None:
    counts = series("lognormal", SHAPES[0], steps=3)
    first = run(VARIANTS[name], counts, SHAPES[0], slots=2)
    again = run(VARIANTS[name], np.asfortranarray(counts), SHAPES[0], slots=2)
    for (_, one), (_, two) in zip(first, again, strict=True):
        assert one.fingerprint() == two.fingerprint()
        assert all(
            np.array_equal(getattr(one.moved, field.name), getattr(two.moved, field.name))
            for field in dataclasses.fields(one.moved)
        )


PRINT = """
from tests.planning.policies.helpers import SHAPES, VARIANTS, run, series
counts = series("lognormal", SHAPES[0], steps=2)
print([plan.fingerprint() for policy in VARIANTS.values() for _, plan in run(policy, counts, SHAPES[0], slots=2)])
"""


def test_other_processes_give_the_same_plans() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([".", *filter(None, sys.path)])},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    counts = series("lognormal", SHAPES[0], steps=2)
    here = [
        plan.fingerprint()
        for policy in VARIANTS.values()
        for _, plan in run(policy, counts, SHAPES[0], slots=2)
    ]
    assert outputs == {f"{here}\n"}


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.split()[0] in PAST])
def test_placement_from_history_never_sees_the_current_counts(name: str) -> None:
    shape = SHAPES[0]
    past, now, other = series("lognormal", shape, steps=3, seed=1)
    plans = []
    for counts in (now, other[:, ::-1].copy()):
        # Call 10 is one in which every policy with an interval that divides it may act.
        (problem, _), *_ = run(VARIANTS[name], counts[None], shape, slots=2)
        history = History(counts=(past,), step=10)
        plans.append(VARIANTS[name](dataclasses.replace(problem, history=history)))
    assert np.array_equal(copies(plans[0]), copies(plans[1]))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.split()[0] in CURRENT])
def test_planners_of_current_counts_ignore_history(name: str) -> None:
    shape = SHAPES[0]
    past, now = series("lognormal", shape, steps=2, seed=2)
    (problem, plan), *_ = run(VARIANTS[name], now[None], shape, slots=2)
    with_past = dataclasses.replace(problem, history=History(counts=(past,), previous=plan, step=10))
    assert VARIANTS[name](with_past).fingerprint() == plan.fingerprint()


@pytest.mark.parametrize("name", [*CURRENT, *PAST])
def test_without_slots_history_or_gain_every_expert_is_at_home_alone(name: str) -> None:
    problem = ask(np.full((4, 8), 50))
    plan = get_policy(name)(problem)
    assert np.array_equal(copies(plan), copies(get_policy("megatron")(problem)))
    assert np.array_equal(plan.forward_load_R, np.full(4, 400))


@pytest.mark.parametrize("name", [*CURRENT, *PAST])
def test_history_of_another_shape_is_refused_or_unused(name: str) -> None:
    history = History(counts=(np.ones((4, 4), dtype=np.int64),), step=10)
    problem = dataclasses.replace(ask(np.ones((2, 4))), history=history)
    if name in CURRENT:
        get_policy(name)(problem).check(problem)
    else:
        with pytest.raises(PlanError, match=r"history.counts has shape \(4, 4\)"):
            get_policy(name)(problem)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.split()[0] in PAST])
def test_a_previous_plan_of_other_ranks_does_not_count(name: str) -> None:
    shape = SHAPES[0]
    (problem, plan), *_ = run(VARIANTS[name], series("zipf", shape, steps=1), shape, slots=2)
    for other in (Shape(4, 32), Shape(16, 32)):
        (_, strange), *_ = run(VARIANTS[name], series("zipf", other, steps=1), other, slots=2)
        again = dataclasses.replace(problem, history=History(previous=strange, step=1))
        assert VARIANTS[name](again).fingerprint() == plan.fingerprint()


def test_every_system_has_its_facts() -> None:
    assert tuple(INFO) == config.POLICIES
    for name, info in INFO.items():
        assert policy_info(name) is info
        assert info.title
        assert info.source
        assert info.acts
        assert info.moves
        assert info.inputs in ("nothing", "current counts", "history", "both")
        assert info.slots in ("none", "shared", "resident", "unbounded")
        assert (info.inputs == "history") == (name in PAST)
    assert [name for name, info in INFO.items() if info.drops] == ["symi"]
    assert INFO["topoep"].title == "TopoEP stand-in (TAOT)"


def test_facts_of_an_unknown_policy_are_refused() -> None:
    with pytest.raises(PlanError, match="policy='nobody'"):
        policy_info("nobody")


def test_counts_beyond_32_bits_are_planned_exactly() -> None:
    big = 2**40 + 3
    problem = ask([[big, 1, 5, 0], [big, 2, 0, 7]], slots=1, past=[[big, 1, 5, 0], [big, 2, 0, 7]])
    assert problem.topology == Topology(ranks=2, experts=4)
    for policy in VARIANTS.values():
        assert_sound(problem, policy(problem))
