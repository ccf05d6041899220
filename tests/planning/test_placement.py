"""Replicas: legal, never above the fixed peak, near MILP, charged under a budget, few copies between nodes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.planning import Problem, Topology
from lrmoe.planning.placement import Placement, place
from lrmoe.simulate.generators import GENERATORS, generate
from tests.planning.oracles import milp_placement

MODEST = settings(deadline=None, max_examples=300, derandomize=True)


def ask(counts: np.ndarray, *, nodes: int = 1, **kwargs: object) -> Problem:
    ranks, experts = counts.shape
    topology = Topology(ranks=ranks, experts=experts, ranks_per_node=ranks // nodes if nodes > 1 else None)
    return Problem(counts_RE=counts, topology=topology, **kwargs)  # type: ignore[arg-type]


def fixed_load(problem: Problem) -> np.ndarray:
    return problem.counts_E.reshape(problem.topology.ranks, -1).sum(axis=1)


def check(problem: Problem, found: Placement) -> None:
    """Instances, slots, sums and the fixed peak."""
    ranks, experts = problem.topology.ranks, problem.topology.experts
    key = found.rank_J * experts + found.expert_J
    assert (np.diff(key) > 0).all()
    assert np.isin(problem.topology.home_E * experts + np.arange(experts), key).all()
    foreign = problem.topology.home_E[found.expert_J] != found.rank_J
    assert np.array_equal(np.bincount(found.rank_J[foreign], minlength=ranks), found.replicas_R)
    assert found.replicas_R.max() <= problem.slots
    assert found.pairs_J.min() >= 0
    assert np.array_equal(
        np.bincount(found.expert_J, found.pairs_J, minlength=experts).astype(np.int64), problem.counts_E
    )
    assert np.array_equal(
        np.bincount(found.rank_J, found.pairs_J, minlength=ranks).astype(np.int64), found.load_R
    )
    charge = problem.replica_rows if problem.budget_rows else 0
    assert (found.load_R + charge * found.replicas_R).max() <= fixed_load(problem).max()


@MODEST
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 4, 6]),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([0, 3, 40]),
    st.booleans(),
    st.sampled_from([None, 1, 20]),
)
def test_placements_are_legal_and_never_above_the_fixed_peak(
    seed: int, ranks: int, local: int, slots: int, charge: int, nodes: bool, local_rows: int | None
) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.poisson(
        rng.choice([0.3, 30]) * rng.lognormal(0, 1.5, (1, ranks * local)), (ranks, ranks * local)
    )
    counts *= rng.random(ranks * local) < 0.8
    problem = ask(
        counts,
        nodes=2 if nodes and ranks % 2 == 0 else 1,
        slots=min(slots, ranks * local - local),
        replica_rows=charge,
        budget_rows=10**6 if charge else None,
        local_rows=local_rows,
    )
    check(problem, place(problem))


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (16, 2), (32, 4), (32, 8)])
@pytest.mark.parametrize("name", ["lognormal", "zipf"])
def test_two_slots_are_within_one_percent_of_milp(experts: int, top_k: int, name: str) -> None:
    for seed in range(12):
        counts = generate(name, ranks=4, experts=experts, top_k=top_k, tokens=2048, seed=seed)[0]
        problem = ask(counts, slots=2)
        peak, mean = int(place(problem).load_R.max()), -(-problem.pairs // 4)
        if peak > 1.01 * mean:
            assert peak <= 1.01 * milp_placement(problem.counts_E, 4, 2)


@pytest.mark.parametrize(("experts", "top_k"), [(16, 2), (32, 4)])
def test_one_slot_is_within_one_percent_of_milp(experts: int, top_k: int) -> None:
    for seed in range(8):
        counts = generate("lognormal", ranks=4, experts=experts, top_k=top_k, tokens=2048, seed=seed)[0]
        problem = ask(counts, slots=1)
        peak, mean = int(place(problem).load_R.max()), -(-problem.pairs // 4)
        if peak > 1.01 * mean:
            assert peak <= 1.01 * milp_placement(problem.counts_E, 4, 1)


@pytest.mark.parametrize("charge", [100, 1000])
def test_charged_replicas_are_within_one_percent_of_milp(charge: int) -> None:
    for seed in range(6):
        counts = generate("lognormal", ranks=4, experts=16, top_k=2, tokens=2048, seed=seed)[0]
        problem = ask(counts, slots=2, replica_rows=charge, budget_rows=10**9)
        found = place(problem)
        peak = int((found.load_R + charge * found.replicas_R).max())
        assert peak <= 1.01 * milp_placement(problem.counts_E, 4, 2, charge)


@pytest.mark.parametrize(("ranks", "experts"), [(8, 128), (64, 256), (256, 512), (1024, 1024)])
def test_the_median_peak_at_two_slots(ranks: int, experts: int) -> None:
    peaks = []
    for seed in range(5):
        counts = generate("lognormal", ranks=ranks, experts=experts, top_k=8, tokens=2048, seed=seed)[0]
        problem = ask(counts, slots=2)
        found = place(problem)
        check(problem, found)
        peaks.append(found.load_R.max() * ranks / problem.pairs)
    assert np.median(peaks) <= 1.005


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_every_generator_gives_a_legal_placement(name: str, nodes: int) -> None:
    counts = generate(name, ranks=8, experts=32, top_k=4, tokens=512, seed=1, steps=2)[-1]
    for slots in (1, 2):
        problem = ask(counts, nodes=nodes, slots=slots)
        check(problem, place(problem))


def test_a_higher_level_needs_fewer_replicas() -> None:
    counts = generate("lognormal", ranks=8, experts=64, top_k=8, tokens=2048, seed=0)[0]
    problem = ask(counts, slots=2)
    mean = problem.pairs // 8
    used = [int(place(problem, level=int(share * mean)).replicas_R.sum()) for share in (1.0, 1.2, 1.6, 9.0)]
    assert used == sorted(used, reverse=True)
    assert used[0] > used[-1] == 0
    for share in (1.2, 1.6):
        assert place(problem, level=int(share * mean)).load_R.max() <= share * mean


def crossings(problem: Problem, found: Placement, per_node: int) -> int:
    """Distinct (expert, node) pairs whose weights cross between nodes."""
    home = problem.topology.home_E[found.expert_J] // per_node
    node = found.rank_J // per_node
    away = home != node
    return len(set(zip(found.expert_J[away].tolist(), node[away].tolist(), strict=True)))


def test_knowing_nodes_saves_copies_between_them_for_two_percent_of_the_peak() -> None:
    for seed in range(3):
        counts = generate("lognormal", ranks=64, experts=256, top_k=8, tokens=2048, seed=seed)[0]
        flat, aware = ask(counts, slots=2), ask(counts, nodes=8, slots=2)
        blind, found = place(flat), place(aware)
        check(aware, found)
        assert found.load_R.max() <= 1.021 * blind.load_R.max()
        assert 4 * crossings(aware, found, 8) <= crossings(aware, blind, 8)


def test_locality_replicas_appear_only_above_their_break_even() -> None:
    counts = np.full((4, 8), 100)
    counts[3, 0] = 700  # rank 3 sends much to an expert of rank 0
    counts[0, 6] = 700  # and rank 0 as much back, so loads stay even
    plain = place(ask(counts, slots=1))
    near = place(ask(counts, slots=1, local_rows=500))
    far = place(ask(counts, slots=1, local_rows=701))
    held = dict(
        zip(zip(near.rank_J.tolist(), near.expert_J.tolist(), strict=True), near.pairs_J, strict=True)
    )
    assert held[3, 0] >= 500
    assert held[0, 6] >= 500
    assert near.load_R.max() == plain.load_R.max()
    assert np.array_equal(far.pairs_J, plain.pairs_J)


def test_placements_do_not_change_with_the_memory_order_of_counts() -> None:
    counts = generate("zipf", ranks=8, experts=32, top_k=4, tokens=512, seed=5)[0]
    one = place(ask(counts, slots=1))
    two = place(ask(np.asfortranarray(counts), slots=1))
    for field in dataclasses.fields(one):
        assert np.array_equal(getattr(one, field.name), getattr(two, field.name))
