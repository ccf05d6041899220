"""The whole plan: legal on every generator, targets of peak, one plan on every process, home-only without slots."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.quotas import home_quotas
from lrmoe.simulate.generators import GENERATORS, generate
from tests.planning.oracles import closed_form, problems

MODEST = settings(deadline=None, max_examples=200, derandomize=True)

_PRINT_PLANS = """
import numpy as np
from lrmoe.planning import Problem, Topology, get_policy
for seed in range(6):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(40 * rng.lognormal(0, 1.5, (1, 32)) * rng.random((8, 1)), (8, 32))
    for nodes in (None, 4):
        problem = Problem(counts_RE=counts, topology=Topology(ranks=8, experts=32, ranks_per_node=nodes),
                          slots=1 + seed % 2, max_drop=0.2, drop=["always", "overload"][seed % 2], move_rows=0.5,
                          local_rows=200, score_mean_E=rng.lognormal(0, 1, 32))
        print(get_policy("lrmoe")(problem).fingerprint())
"""


def make(counts: np.ndarray, *, nodes: int = 1, **kwargs: object) -> Problem:
    ranks, experts = counts.shape
    topology = Topology(ranks=ranks, experts=experts, ranks_per_node=ranks // nodes if nodes > 1 else None)
    return Problem(counts_RE=counts, topology=topology, **kwargs)  # type: ignore[arg-type]


def plan(problem: Problem) -> LayerPlan:
    answer = get_policy("lrmoe")(problem)
    answer.check(problem)
    return answer


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("slots", [0, 1, 2])
def test_plans_are_legal_on_every_generator(name: str, slots: int) -> None:
    for nodes, seed in ((1, 0), (2, 1)):
        counts = generate(name, ranks=8, experts=32, top_k=4, tokens=512, seed=seed, steps=2)[-1]
        problem = make(counts, nodes=nodes, slots=slots, max_drop=0.2)
        found = plan(problem)
        fixed = problem.counts_E.reshape(8, -1).sum(axis=1).max()
        assert found.forward_load_R.max() <= fixed
        assert found.pairs - found.kept == problem.drop_cap


@MODEST
@given(problems(), st.integers(1, 3), st.booleans(), st.sampled_from([None, 5]))
def test_plans_are_legal_and_their_backward_is_of_least_peak(
    question: Problem, slots: int, nodes: bool, local_rows: int | None
) -> None:
    topology = question.topology
    slots = min(slots, topology.experts - topology.experts_per_rank)
    if nodes and topology.ranks % 2 == 0:
        topology = dataclasses.replace(topology, ranks_per_node=topology.ranks // 2)
    problem = dataclasses.replace(question, slots=slots, topology=topology, local_rows=local_rows)
    found = plan(problem)
    if found.backward_J is None:
        return
    expert_J, rank_J = found.instance_expert_J, found.instance_rank_J
    assert found.backward_load_R.max() == closed_form(expert_J, rank_J, found.quota_E, topology.ranks)
    if problem.drop == "always":
        least = max(
            closed_form(expert_J, rank_J, found.counts_E, topology.ranks, problem.drop_cap),
            closed_form(expert_J, rank_J, problem.floor_E, topology.ranks),
        )
        assert found.backward_load_R.max() == least


@MODEST
@given(problems())
def test_without_slots_every_expert_stays_home(problem: Problem) -> None:
    found = plan(problem)
    assert found.backward_J is None
    assert np.array_equal(found.instance_rank_J, problem.topology.home_E)
    assert np.array_equal(found.assign_RJ, problem.counts_RE)
    assert np.array_equal(found.quota_E, home_quotas(problem))
    assert (found.forward_chunks, found.backward_chunks, found.recompute) == (1, 1, False)


@pytest.mark.parametrize(("ranks", "experts"), [(8, 128), (64, 256)])
def test_targets_of_peak_at_two_slots(ranks: int, experts: int) -> None:
    forward, backward = [], []
    for seed in range(7):
        counts = generate("lognormal", ranks=ranks, experts=experts, top_k=8, tokens=4096, seed=seed)[0]
        found = plan(make(counts, slots=2, max_drop=0.2))
        mean = found.pairs / ranks
        forward.append(found.forward_load_R.max() / mean)
        backward.append(found.backward_load_R.max() / mean)
    assert np.median(forward) <= 1.005
    assert np.median(backward) <= 0.805


def test_plans_are_identical_across_processes() -> None:
    outputs = set()
    for seed in ("0", "1", "31337"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_PLANS],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 12


@MODEST
@given(problems(), st.integers(0, 2))
def test_plans_are_identical_across_repeats(question: Problem, slots: int) -> None:
    slots = min(slots, question.topology.experts - question.topology.experts_per_rank)
    one = dataclasses.replace(question, slots=slots)
    two = dataclasses.replace(one, counts_RE=np.asfortranarray(one.counts_RE.astype(np.int32)))
    assert plan(one).fingerprint() == plan(two).fingerprint()


@pytest.mark.parametrize("counts", [np.zeros((2, 4), np.int64), np.eye(2, 4, dtype=np.int64)])
@pytest.mark.parametrize("slots", [0, 1, 2])
def test_idle_calls_and_single_pairs(counts: np.ndarray, slots: int) -> None:
    for drop in ("always", "overload"):
        found = plan(make(counts, slots=slots, max_drop=0.3, drop=drop))
        assert found.kept == found.pairs == counts.sum()


def test_counts_beyond_32_bits() -> None:
    counts = np.array([[2**40, 5, 0, 7], [2**41, 2**33, 1, 0]])
    found = plan(make(counts, slots=1, max_drop=0.25))
    assert found.forward_load_R.sum() == counts.sum()
    assert found.forward_load_R.max() <= -(-int(counts.sum()) // 2)
    assert found.backward_load_R.max() <= -(-int(0.75 * counts.sum()) // 2) + 1
