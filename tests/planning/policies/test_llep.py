"""LLEP: the threshold, the cap unless forced, the least chunk, contiguous ranges of tokens, an optional slot limit."""

from __future__ import annotations

import numpy as np
import pytest

from lrmoe.planning.policies import LLEP
from lrmoe.simulate.generators import GENERATORS
from tests.planning.policies.helpers import SHAPES, Shape, ask, copies, loads, run, series


@pytest.mark.parametrize(("hot", "acts"), [(1299, False), (1301, True)])
def test_it_acts_from_the_threshold_on(hot: int, acts: bool) -> None:
    rest = 1000 + 1000 - hot
    problem = ask(loads([hot, 0, rest, 0], ranks=2))
    policy = LLEP(min_tokens=1)
    assert policy.needed(problem) == acts
    plan = policy(problem)
    assert (plan.replicas_R.sum() > 0) == acts
    assert plan.forward_load_R.tolist() == ([1000, 1000] if acts else [hot, rest])


def test_the_papers_test_looks_at_experts() -> None:
    problem = ask(loads([1000, 1000, 900, 1100], ranks=2))  # ranks are even, experts are not
    assert not LLEP(threshold=1.05).needed(problem)
    assert LLEP(threshold=1.05, test="expert").needed(problem)


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.5])
def test_no_rank_exceeds_the_cap_unless_a_remainder_was_forced(generator: str, alpha: float) -> None:
    policy = LLEP(alpha=alpha, min_tokens=10)
    for problem, plan in run(policy, series(generator, SHAPES[0], steps=3, tokens=500), SHAPES[0], slots=0):
        _, forced = policy.spread(problem)
        if policy.needed(problem) and not forced:
            assert plan.forward_load_R.max() <= policy.cap(problem)
        if not policy.needed(problem):
            assert not plan.foreign_J.any()


def test_a_remainder_below_the_least_chunk_is_forced_on_the_emptiest_rank() -> None:
    # Cap 100 a rank; rank 0 has 150, the others 80, 85, 85 and less room than the least chunk.
    load = loads([150, 80, 85, 85], ranks=4)
    policy = LLEP(threshold=1.0, min_tokens=40)
    spread, forced = policy.spread(ask(load))
    assert forced
    # What was forced on rank 1 leaves its own expert 50, and the next remainder goes to rank 2.
    assert spread == {0: {0: 100, 1: 50}, 1: {1: 50, 2: 30}}
    spread, forced = LLEP(threshold=1.0, min_tokens=0).spread(ask(load))
    assert not forced
    assert spread == {0: {0: 100, 1: 20, 2: 15, 3: 15}}


def test_a_remainder_that_fits_whole_is_never_too_small() -> None:
    spread, forced = LLEP(threshold=1.0, min_tokens=60).spread(ask(loads([150, 50], ranks=2)))
    assert not forced
    assert spread == {0: {0: 100, 1: 50}}


def test_a_forced_remainder_goes_to_another_rank_even_if_that_is_fuller() -> None:
    policy = LLEP(threshold=0.0, alpha=0.5, min_tokens=0)
    problem = ask(loads([120, 0, 100, 100], ranks=2))
    assert policy.cap(problem) == 80
    assert policy.spread(problem)[0][0] == {0: 80, 1: 40}


def test_the_cap_rounds_down_once() -> None:
    problem = ask(loads([7, 0], ranks=2))
    assert LLEP(alpha=1.5).cap(problem) == 5  # int(1.5 * 7 // 2), not int(1.5 * (7 // 2)) = 4
    assert LLEP().cap(problem) == 3


def test_every_instance_takes_a_range_of_the_tokens_laid_end_to_end() -> None:
    problem = ask([[90, 0], [60, 50]])
    plan = LLEP(threshold=1.0, min_tokens=0)(problem)
    # Expert 0 has 150 pairs at a cap of 100: rank 0 takes the first 100, rank 1 the last 50, all from source 1.
    table = {
        (int(rank), int(expert)): plan.assign_RJ[:, j].tolist()
        for j, (rank, expert) in enumerate(zip(plan.instance_rank_J, plan.instance_expert_J, strict=True))
    }
    assert table == {(0, 0): [90, 10], (1, 0): [0, 50], (1, 1): [0, 50]}


@pytest.mark.parametrize("generator", ["lognormal", "hot_rank", "hot_set"])
def test_a_slot_limit_holds(generator: str) -> None:
    shape = Shape(8, 32)
    for slots in (0, 1, 2):
        policy = LLEP(slots=slots, min_tokens=0, threshold=1.0)
        for _, plan in run(policy, series(generator, shape, steps=2), shape, slots=0):
            assert plan.replicas_R.max() <= slots


def test_everything_on_one_expert_is_spread_over_all_ranks() -> None:
    problem = ask(loads([8000, 0, 0, 0, 0, 0, 0, 0], ranks=8))
    plan = LLEP(min_tokens=100)(problem)
    assert plan.forward_load_R.tolist() == [1000] * 8
    assert (copies(plan)[:, 0] == 1).all()
    assert plan.moved.fetch_R.tolist() == plan.moved.return_R.tolist() == [0] + [1] * 7
    assert not plan.moved.refetch_R.any()


def test_it_has_no_limit_of_its_own() -> None:
    shape = Shape(4, 64)
    (_, plan), *_ = run(LLEP(min_tokens=0), series("hot_rank", shape, steps=1), shape, slots=0)
    assert plan.replicas_R.max() > 2
    assert np.ptp(plan.forward_load_R) <= 4
