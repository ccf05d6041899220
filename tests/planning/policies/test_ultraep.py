"""UltraEP: the cap tau, slots, one domain a node, masters that keep a pair, the search after the quick tries."""

from __future__ import annotations

import numpy as np
import pytest

from lrmoe.planning.policies import UltraEP
from lrmoe.planning.policies.ultraep import _Solver
from lrmoe.simulate.generators import GENERATORS
from tests.planning.policies.helpers import SHAPES, Shape, ask, copies, loads, run, series


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("slots", [0, 1, 2, 5])
def test_no_rank_is_planned_more_than_the_cap(generator: str, slots: int) -> None:
    shape = Shape(8, 32)
    policy = UltraEP()
    for problem, plan in run(policy, series(generator, shape, steps=2, tokens=2000), shape, slots=slots):
        (cap,) = policy.caps(problem)
        fixed = problem.counts_E.reshape(8, -1).sum(axis=1)
        assert cap <= fixed.max()
        assert cap >= np.ceil(problem.pairs / 8)
        # local_first rounds each source: by less than one pair per source and instance of an expert with replicas.
        split_on = (copies(plan)[:, copies(plan).sum(axis=0) > 1] > 0).sum(axis=1)
        assert (plan.forward_load_R <= cap + 8 * split_on).all()
        assert plan.replicas_R.max() <= slots


def test_the_first_try_is_one_percent_above_the_mean() -> None:
    problem = ask(loads([4000, 4000, 0, 0], ranks=2), slots=1)
    assert UltraEP().caps(problem) == [4040]
    assert UltraEP(balance_threshold=1.5).caps(problem) == [6060]
    assert UltraEP().caps(ask(loads([2000, 2000, 2000, 2010], ranks=2), slots=1)) == [
        4010
    ]  # never above the highest


def test_tries_rise_by_a_hundredth_of_the_highest_load() -> None:
    # One slot each on ranks 1 and 2, and rank 0 must export 3 experts' pairs: 6000 of 2000 mean.
    load = [2000, 2000, 2000, 0, 0, 0, 0, 0, 0]
    caps = UltraEP().caps(ask(loads(load, ranks=3), slots=1))
    # Highest 6000: tries at 2020, 2080, 2140; the two replicas carry at most 1999 each, so 2020 holds.
    assert caps == [2020]
    caps = UltraEP().caps(ask(loads([3000, 0, 0, 1500, 0, 0], ranks=2), slots=1))
    assert caps == [2273]  # ceil(1.01 * 2250)


def test_search_finds_the_smallest_cap_its_oracle_accepts() -> None:
    # Four equal experts on rank 0 and one slot elsewhere: at most one expert less one pair can leave each slot.
    problem = ask(loads([3000] * 4 + [0] * 4, ranks=2), slots=1)
    policy = UltraEP()
    (cap,) = policy.caps(problem)
    assert cap == 12000 - 2999
    solver = _Solver(policy, problem, np.arange(2))
    assert solver.oracle(cap, policy.min_tokens_per_replica) is not None
    assert solver.oracle(cap - 1, policy.min_tokens_per_replica) is None
    assert UltraEP(allow_zero_master=True).caps(problem) == [12000 - 3000]


def test_a_static_floor_refuses_small_replicas_in_the_search() -> None:
    load = loads([900, 900, 900, 900, 0, 0, 0, 0], ranks=2)
    assert UltraEP().caps(ask(load, slots=1)) == [3600]
    assert UltraEP(min_tokens_per_replica=1).caps(ask(load, slots=1)) == [3600 - 899]


def test_a_master_keeps_a_pair() -> None:
    problem = ask(loads([0, 500, 0, 0], ranks=2), slots=2)
    quota = {
        int(r): int(p)
        for r, p in zip(
            UltraEP()(problem).instance_rank_J, UltraEP()(problem).assign_RJ.sum(axis=0), strict=True
        )
        if p
    }
    assert quota[0] >= 1


@pytest.mark.parametrize("generator", ["lognormal", "hot_rank"])
def test_replicas_stay_in_their_node(generator: str) -> None:
    shape = SHAPES[0]
    for problem, plan in run(UltraEP(), series(generator, shape, steps=2), shape, slots=3):
        node_R = problem.topology.node_R
        home_J = problem.topology.home_E[plan.instance_expert_J]
        assert (node_R[home_J] == node_R[plan.instance_rank_J]).all()
        assert len(UltraEP().caps(problem)) == 2
    wide = run(UltraEP(confine=False), series("hot_rank", shape, steps=1), shape, slots=3)[0][1]
    home_J = wide.topology.home_E[wide.instance_expert_J]
    assert (wide.topology.node_R[home_J] != wide.topology.node_R[wide.instance_rank_J]).any()


def test_local_pairs_go_first() -> None:
    (problem, plan), *_ = run(UltraEP(), series("hot_set", Shape(4, 16), steps=1), Shape(4, 16), slots=3)
    quota_J = plan.assign_RJ.sum(axis=0)
    own_J = plan.assign_RJ[plan.instance_rank_J, np.arange(quota_J.size)]
    here_J = problem.counts_RE[plan.instance_rank_J, plan.instance_expert_J]
    replicated = copies(plan).sum(axis=0)[plan.instance_expert_J] > 1
    assert replicated.any()
    assert (own_J[replicated] >= np.minimum(quota_J, here_J)[replicated] - 4).all()


def test_replicas_are_fetched_twice_and_returned_once() -> None:
    (_, plan), *_ = run(UltraEP(), series("hot_rank", Shape(4, 16), steps=1), Shape(4, 16), slots=2)
    moved = plan.moved
    assert plan.replicas_R.sum() > 0
    for found in (moved.fetch_R, moved.refetch_R, moved.return_R):
        assert np.array_equal(found, plan.replicas_R)
    assert not moved.state_R.any()
    assert not moved.resident_R.any()
