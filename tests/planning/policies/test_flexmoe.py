"""FlexMoE: its triggers, the rounds of one variant, expanding and packing of the other, states that move."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lrmoe.planning.policies import FlexMoE
from lrmoe.simulate.generators import GENERATORS
from tests.planning.policies.helpers import SHAPES, Shape, ask, copies, loads, run, series


@pytest.mark.parametrize("variant", ["laer", "pack"])
@pytest.mark.parametrize(("hot", "acts"), [(1199, False), (1201, True)])
def test_it_acts_above_the_threshold_only(variant: str, hot: int, acts: bool) -> None:
    rest = 2000 - hot
    load = loads([hot - 400, 400, rest - 300, 300], ranks=2)
    # Without extra slots the layout it meets is fixed ownership; with one, variant laer already holds copies.
    policy = FlexMoE(variant=variant, slots=0, threshold=1.2)
    first, second = run(policy, np.stack([load] * 2), Shape(2, 4), slots=0)
    assert policy.triggered(first[0].counts_E, copies(first[1])) == acts
    if variant == "pack":  # variant laer has nothing to give up without extra slots
        assert (second[1].moved.state_R.sum() > 0) == acts
    else:
        assert not second[1].moved.state_R.any()


@pytest.mark.parametrize("variant", ["laer", "pack"])
def test_it_looks_at_the_first_history_and_every_interval_after(variant: str) -> None:
    policy = FlexMoE(variant=variant, interval=3, threshold=1.0, sync_seconds=0.0)
    done = run(policy, series("rotating", SHAPES[0], steps=8), SHAPES[0], slots=2)
    layouts = [copies(plan) for _, plan in done]
    changed = [step for step in range(1, 8) if not np.array_equal(layouts[step - 1], layouts[step])]
    assert changed[0] == 1
    assert set(changed) <= {1, 4, 7}  # a round without gain leaves the layout as it is
    assert len(changed) > 1
    for step, (_, plan) in enumerate(done):
        arrived = ((layouts[step] > 0) & (layouts[max(step - 1, 0)] == 0)).sum(axis=1)
        assert plan.moved.state_R.tolist() == plan.moved.fetch_R.tolist() == arrived.tolist()
        assert plan.moved.resident_R.tolist() == [2] * 8
        assert plan.moved.return_R.sum() == 2 * ((layouts[step] > 0).sum() - 32)


@pytest.mark.parametrize("generator", GENERATORS)
def test_rounds_keep_every_slot_filled_and_never_raise_the_peak(generator: str) -> None:
    counts = series(generator, SHAPES[0], steps=1)[0]
    policy = FlexMoE(variant="laer", interval=1, threshold=1.0)
    done = run(policy, np.stack([counts] * 4), SHAPES[0], slots=2)
    for _, plan in done:
        assert (copies(plan).sum(axis=1) == 6).all()
        assert (copies(plan).sum(axis=0) >= 1).all()
    # Its estimate spreads pairs over all copies, the real split stays in nodes: compare on one node.
    flat = Shape(8, 32)
    done = run(policy, np.stack([series(generator, flat, steps=1)[0]] * 4), flat, slots=2)
    peaks = [int(plan.forward_load_R.max()) for _, plan in done]
    slack = 8 * 6  # single pairs of the even split
    assert all(later <= earlier + slack for earlier, later in itertools.pairwise(peaks))


def test_one_round_replaces_the_coldest_spare_copy_by_the_hottest_expert() -> None:
    # Slots of 2 ranks: home 0 1 | 2 3 and one extra each: rank 0 holds expert 2, rank 1 holds expert 0.
    # Loads per copy: 50, 40, 5, 3. Hot 0 has copies on both ranks; cold 2 is spare; rank 0 holds it too.
    load = loads([100, 40, 10, 3], ranks=2)
    done = run(FlexMoE(variant="laer", threshold=1.0), np.stack([load] * 2), Shape(2, 4), slots=1)
    assert copies(done[0][1]).tolist() == [[1, 1, 1, 0], [1, 0, 1, 1]]
    after = copies(done[1][1])
    assert after.sum(axis=1).tolist() == [3, 3]
    assert after[:, 2].sum() == 1
    assert after[:, 0].sum() == 3
    assert done[1][1].forward_load_R.max() < done[0][1].forward_load_R.max()


def test_with_a_copy_of_everything_in_every_node_that_is_the_floor() -> None:
    shape = Shape(4, 4, 2)
    done = run(
        FlexMoE(variant="laer", interval=1, threshold=1.0),
        series("hot_set", shape, steps=4),
        shape,
        slots=2,
    )
    for _, plan in done:
        assert (copies(plan).reshape(2, 2, 4).sum(axis=1) >= 1).all()


def test_pack_expands_the_largest_copy_down_to_the_threshold() -> None:
    # 2 ranks, mean 600: 1000 a copy is above 1.2 * 600, 500 is not; the other experts never were.
    load = loads([1000, 100, 60, 40], ranks=2)
    policy = FlexMoE(variant="pack", sync_seconds=0.0)
    plan = policy(ask(load, past=load, slots=2))
    assert copies(plan).sum(axis=0).tolist() == [2, 1, 1, 1]
    assert plan.forward_load_R.tolist() == [600, 600]


def test_pack_expands_only_while_the_sum_of_gradients_costs_less() -> None:
    load = loads([1000, 100, 60, 40], ranks=2)
    # Peak 1000 -> 600 (the mean) saves 400 rows.
    for cost, expanded in ((399.0, 2), (401.0, 1)):
        policy = FlexMoE(variant="pack", pair_seconds=1.0, sync_seconds=cost)
        assert copies(policy(ask(load, past=load, slots=2))).sum(axis=0)[0] == expanded


def test_pack_fills_ranks_by_load_within_their_slots() -> None:
    load = loads([95, 80, 10, 9, 8, 7], ranks=2)
    plan = FlexMoE(variant="pack", threshold=1.0, sync_seconds=1.0)(ask(load, past=load, slots=0))
    # 95 | 80, then 10 and 9 to the lighter second rank, which is full; the rest must go to the first.
    assert copies(plan).tolist() == [[1, 0, 0, 0, 1, 1], [0, 1, 1, 1, 0, 0]]


def test_copies_on_one_rank_are_told_apart_in_the_next_call() -> None:
    load = loads([1000, 400, 10, 3], ranks=2)
    policy = FlexMoE(variant="laer", threshold=1.0, interval=5)
    done = run(policy, np.stack([load] * 3), Shape(2, 4), slots=1)
    assert copies(done[1][1]).tolist() == [[1, 1, 1, 0], [2, 0, 0, 1]]
    assert np.array_equal(copies(done[1][1]), copies(done[2][1]))
