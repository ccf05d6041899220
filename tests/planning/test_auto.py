"""Weighing the drop: time of a call against steps, calibration, and when it decides anew."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from lrmoe.config import LRMoEConfig
from lrmoe.errors import InfeasibleError
from lrmoe.layer.drops import DropControl
from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.auto import (
    CHOOSING,
    EVERY,
    NOISE_SHARE,
    RECOMPUTE_RATIO,
    STASH_RATIO,
    AutoDrop,
    grid,
    weigh,
)
from lrmoe.planning.variance import predicted_variance

COUNTS = np.full((2, 8), 500)


def plan_at(drop: float) -> LayerPlan:
    return get_policy("lrmoe")(
        Problem(counts_RE=COUNTS, topology=Topology(ranks=2, experts=8), max_drop=drop)
    )


def growing(scale: float) -> Callable[[LayerPlan], float]:
    return lambda plan: scale * predicted_variance(plan.counts_E, plan.quota_E, None)


def test_time_counts_peak_rows_and_steps_count_added_variance() -> None:
    plan = plan_at(0.5)
    none, half = weigh([(0.0, plan_at(0.0)), (0.5, plan)], growing(1.0), 3.0)
    assert (none.time, none.steps) == (1.0, 1.0)
    assert half.time == pytest.approx((1 + CHOOSING + 3.0 * 0.5) / 4)
    assert half.steps == pytest.approx(1 + NOISE_SHARE * 1.0)
    assert half.cost == half.time * half.steps


@pytest.mark.parametrize("scale", [0.5, 2.0, 10.0, 100.0])
def test_the_decision_is_the_least_cost_of_a_fine_grid_to_one_step(scale: float) -> None:
    auto = AutoDrop()
    assert auto.due(known=True)
    auto.decide(plan_at, growing(scale), 0.9)
    fine = np.linspace(0, 0.9, 400)
    time = (1 + CHOOSING * (fine > 0) + STASH_RATIO * (1 - fine)) / (1 + STASH_RATIO)
    cost = time * (1 + NOISE_SHARE * scale * fine / (1 - fine))
    assert auto.drop in grid(0.9)
    assert abs(auto.drop - fine[np.argmin(cost)]) <= 0.9 / 8 + 1e-9
    assert auto.time * auto.steps <= cost.min() * 1.02


def test_noise_that_costs_more_than_it_saves_is_not_bought() -> None:
    auto = AutoDrop()
    auto.decide(plan_at, growing(1e4), 0.5)
    assert (auto.drop, auto.time, auto.steps) == (0.0, 1.0, 1.0)


def test_a_drop_that_fits_no_budget_is_left_out() -> None:
    def tight(drop: float) -> LayerPlan:
        if drop < 0.3:
            raise InfeasibleError("needs more")
        return plan_at(drop)

    auto = AutoDrop()
    auto.decide(tight, growing(1e4), 0.6)
    assert auto.drop == pytest.approx(0.3)


def test_it_decides_at_the_first_call_when_scores_become_known_and_every_so_often() -> None:
    auto = AutoDrop()
    due = [auto.due(known=call > 0) for call in range(2 * EVERY + 3)]
    assert [call for call, one in enumerate(due) if one] == [0, 1, 1 + EVERY, 1 + 2 * EVERY]


def test_calibration_leaves_the_first_call_out_sums_over_ranks_and_is_frozen() -> None:
    auto = AutoDrop()
    assert auto.ratio == STASH_RATIO
    auto.measure(np.array([[900.0, 1.0, 10, 10], [1.0, 1.0, 10, 10]]))
    assert auto.ratio == STASH_RATIO
    auto.measure(np.array([[1.0, 4.0, 10, 10], [3.0, 8.0, 30, 20]]))
    assert auto.ratio == pytest.approx((12 / 30) / (4 / 40))
    auto.measure(np.zeros((2, 4)))
    assert auto.calls == 2
    auto.due(known=False)
    auto.measure(np.array([[1.0, 100.0, 1, 1], [1.0, 100.0, 1, 1]]))
    assert auto.ratio == pytest.approx(4.0)
    assert not auto.measuring


def test_choosing_must_pay_for_itself() -> None:
    none, little, much = weigh([(d, plan_at(d)) for d in (0.0, 0.1, 0.2)], growing(0.0), 1.5)
    assert none.time == 1.0
    assert little.time > 1.0 > much.time


def test_peaks_are_those_that_the_plan_tells() -> None:
    plan = plan_at(0.5)
    assert plan.peak_rows == (plan.forward_load_R.max(), plan.backward_load_R.max())


def test_the_unmeasured_ratio_follows_the_configuration_and_not_the_state() -> None:
    stash, recompute = AutoDrop(), AutoDrop(unmeasured=RECOMPUTE_RATIO)
    recompute.load(stash.state())
    assert recompute.ratio == RECOMPUTE_RATIO > stash.ratio
    for config, ratio in (("stash", STASH_RATIO), ("auto", STASH_RATIO), ("recompute", RECOMPUTE_RATIO)):
        control = DropControl(LRMoEConfig(drop="auto", activations=config))
        assert control.auto is not None
        assert control.auto.ratio == ratio


def test_state_is_json_and_decides_alike() -> None:
    auto = AutoDrop()
    for _ in range(3):
        auto.measure(np.array([[1.0, 2.5, 10, 10]]))
    auto.due(known=True)
    auto.decide(plan_at, growing(3.0), 0.7)
    again = AutoDrop()
    again.load(json.loads(json.dumps(auto.state())))
    assert again == auto
    assert type(again.calls) is int
    assert type(again.frozen) is bool
