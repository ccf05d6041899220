"""SmartMoE: a permutation with n experts a rank, changed every interval and only for the better."""

from __future__ import annotations

import numpy as np
import pytest

from lrmoe.planning.policies import SmartMoE
from lrmoe.planning.policies.smartmoe import greedy
from lrmoe.simulate.generators import GENERATORS
from tests.planning.policies.helpers import SHAPES, Shape, copies, loads, run, series


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_permutation_with_n_experts_a_rank(generator: str) -> None:
    for _, plan in run(SmartMoE(interval=1), series(generator, SHAPES[0], steps=4), SHAPES[0], slots=2):
        assert (copies(plan).sum(axis=0) == 1).all()
        assert (copies(plan).sum(axis=1) == 4).all()
        assert not plan.moved.resident_R.any()


def test_experts_go_by_load_to_the_least_loaded_rank_with_a_place() -> None:
    home = np.array([0, 0, 1, 1])
    assert greedy(np.array([9, 8, 2, 1]), home, 2).tolist() == [0, 1, 1, 0]
    # The third expert finds rank 1 lighter but full at two experts.
    assert greedy(np.array([9, 4, 4, 4]), home, 2).tolist() == [0, 1, 1, 0]
    # On a tie the expert stays where it is.
    assert greedy(np.array([5, 5, 5, 5]), np.array([1, 0, 1, 0]), 2).tolist() == [1, 0, 1, 0]


def test_a_placement_is_adopted_only_if_its_peak_is_lower() -> None:
    # Owners hold 31 + 29 + 0 and 20 + 20 + 20. The greedy one gives 31 + 20 + 0 and 29 + 20 + 20: nothing moves.
    load = [31, 29, 0, 20, 20, 20]
    assert greedy(np.array(load), np.array([0, 0, 0, 1, 1, 1]), 2).tolist() == [0, 1, 0, 1, 0, 1]
    _, (_, kept) = run(SmartMoE(interval=1), np.stack([loads(load, ranks=2)] * 2), Shape(2, 6), slots=0)
    assert copies(kept).argmax(axis=0).tolist() == [0, 0, 0, 1, 1, 1]
    assert not kept.moved.state_R.any()
    steps = np.stack([loads([9, 8, 2, 1], ranks=2)] * 2)
    _, (_, better) = run(SmartMoE(interval=1), steps, Shape(2, 4), slots=0)
    assert copies(better).argmax(axis=0).tolist() == [0, 1, 1, 0]
    assert better.forward_load_R.tolist() == [10, 10]
    assert better.moved.fetch_R.tolist() == better.moved.state_R.tolist() == [1, 1]
    assert not better.moved.return_R.any()


def test_the_peak_never_rises_on_the_counts_it_was_chosen_from() -> None:
    counts = series("lognormal", SHAPES[0], steps=1)[0]
    done = run(SmartMoE(interval=1, window=1), np.stack([counts] * 3), SHAPES[0], slots=0)
    peaks = [int(plan.forward_load_R.max()) for _, plan in done]
    assert peaks[1] < peaks[0]
    assert peaks[2] == peaks[1]


def test_it_looks_every_ten_calls_at_the_mean_of_two() -> None:
    done = run(SmartMoE(), series("rotating", SHAPES[0], steps=22), SHAPES[0], slots=0)
    owners = [copies(plan).argmax(axis=0) for _, plan in done]
    changed = [step for step in range(1, 22) if not np.array_equal(owners[step - 1], owners[step])]
    assert changed == [10, 20]
    for step in changed:
        recent = done[step - 1][0].counts_E + done[step - 2][0].counts_E
        assert np.array_equal(owners[step], greedy(recent, owners[step - 1], 8))
    assert all(plan.moved.state_R.any() == (step in changed) for step, (_, plan) in enumerate(done))
    assert np.array_equal(owners[0], done[0][0].topology.home_E)


def test_the_hottest_expert_bounds_the_peak() -> None:
    load = loads([100, 1, 1, 1], ranks=2)
    _, (_, plan) = run(SmartMoE(interval=1), np.stack([load] * 2), Shape(2, 4), slots=0)
    assert plan.forward_load_R.max() >= 100
