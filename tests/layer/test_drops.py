"""What of `max_drop` a call may use: plans asked for, reasons given, debts that end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lrmoe.errors import ConfigError
from lrmoe.layer.controller import Controller, StepClock
from lrmoe.layer.drops import Chosen, DropControl
from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.score_bins import COLUMNS, ScoreHistory
from tests.layer.harness import pruning
from tests.planning.test_score_bins import sums_of

COUNTS = np.array([400, 400, 400, 400])


class Asked:
    """One control, the plans it asked for, and past scores of one spread."""

    def __init__(self, **fields: Any) -> None:
        self.config = pruning(**fields)
        self.control = DropControl(self.config)
        self.drops: list[float] = []
        rng = np.random.default_rng(0)
        self.history = ScoreHistory.from_sums(sums_of([rng.lognormal(0, 0.8, 3000) for _ in COUNTS]))

    def plan_at(self, drop: float) -> LayerPlan:
        self.drops.append(drop)
        problem = Problem(
            counts_RE=COUNTS[None],
            topology=Topology(ranks=1, experts=COUNTS.size),
            max_drop=drop,
            min_keep=self.config.min_keep,
        )
        return get_policy("lrmoe")(problem)

    def choose(self) -> Chosen:
        return self.control.choose(self.plan_at, self.plan_at, self.history)


def test_where_scores_stay_the_last_drop_is_the_only_plan_asked_for() -> None:
    asked = Asked(max_drop=0.9, max_added_variance=0.1)
    for _ in range(3):
        found = asked.choose()
    before = len(asked.drops)
    again = asked.choose()
    assert len(asked.drops) == before + 1
    assert again.plan.kept == pytest.approx(found.plan.kept, rel=0.05)


def test_where_the_least_kept_pairs_bind_the_limit_is_not_the_reason() -> None:
    asked = Asked(max_drop=0.8, max_added_variance=1.0, min_keep=300)
    chosen = asked.choose()
    assert chosen.plan.kept == 4 * 300
    assert chosen.plan.reason == "always"


def test_exact_calls_pay_a_large_debt_back() -> None:
    asked = Asked(max_drop=0.9, max_added_variance=0.1)
    assert asked.control.variance is not None
    asked.control.variance.debt = 2.0
    kept = [asked.choose().plan.kept for _ in range(40)]
    assert kept[0] == COUNTS.sum()
    assert kept[-1] < COUNTS.sum()


def test_what_predictions_missed_so_far_corrects_the_next() -> None:
    plain, wary = (Asked(max_drop=0.9, max_added_variance=0.1) for _ in range(2))
    assert wary.control.variance is not None
    wary.control.variance.factor = 4.0
    one, other = plain.choose(), wary.choose()
    assert other.plan.kept > one.plan.kept
    assert other.predicted is not None
    assert other.told["variance_predicted"] == pytest.approx(4 * other.predicted)


def test_sixteen_exact_calls_calibrate_after_one_that_warms_up() -> None:
    auto = Asked(max_drop=0.5, drop="auto").control.auto
    assert auto is not None
    for _ in range(40):
        auto.measure(np.array([[1.0, 2.0, 10.0, 10.0]]))
    assert auto.forward_rows == 160


def test_ranks_that_counted_differently_conclude_nothing() -> None:
    control = Asked(max_drop=0.9, max_added_variance=0.1).control
    assert control.variance is not None
    before = control.variance.state()
    control.book(np.array([[1.0, 5.0, 1.0], [2.0, 5.0, 1.0]]), 0.1)
    control.book(np.array([[0.0, 0.0, 0.0], [1.0, 5.0, 1.0]]), 0.1)
    control.book(np.zeros((2, 3)), 0.0)
    assert control.variance.state() == before
    control.book(np.array([[2.0, 1.0, 10.0], [2.0, 3.0, 10.0]]), 0.1)
    assert control.variance.calls == 2
    assert control.variance.mean == pytest.approx(0.2)
    assert control.variance.factor == pytest.approx(0.8 + 0.2 * 0.2 / 0.05)


GOVERNED = {"drop": "auto", "max_added_variance": 0.1}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda drops: drops["variance"].pop("debt"), r"state of layer 3: drops\.variance lacks debt"),
        (lambda drops: drops["auto"].pop("age"), r"drops\.auto lacks age"),
        (lambda drops: drops["auto"].update(age="old"), r"drops\.auto\.age='old': must be an integer >= 0"),
        (lambda drops: drops["auto"].update(frozen=1), r"drops\.auto\.frozen=1: must be true or false"),
        (
            lambda drops: drops["variance"].update(calls=True),
            r"drops\.variance\.calls=True: must be an integer",
        ),
        (
            lambda drops: drops["variance"].update(factor=None),
            r"drops\.variance\.factor=None: must be a number",
        ),
        (lambda drops: drops.update(auto=[1]), r"drops\.auto=\[1\]: must be a table"),
    ],
)
def test_a_malformed_state_is_refused_by_its_key_and_changes_nothing(
    damage: Callable[[Any], Any], message: str
) -> None:
    controller = Controller(config=pruning(**GOVERNED), experts=4, layer=3, clock=StepClock(), ranks=1)
    before = controller.state_dict()
    other = {**copy.deepcopy(before), "step": 7, "calls": 9, "score_sums": [[1.0] * COLUMNS] * 4}
    other["drops"]["variance"]["debt"] = 5.0
    damage(other["drops"])
    with pytest.raises(ConfigError, match=message):
        controller.load_state_dict(other)
    assert controller.state_dict() == before


@pytest.mark.parametrize(("name", "value"), [("calls", "many"), ("step", -1), ("calls_in_step", 1.5)])
def test_a_malformed_count_is_refused_and_changes_nothing(name: str, value: object) -> None:
    controller = Controller(config=pruning(**GOVERNED), experts=4, layer=0, clock=StepClock(), ranks=1)
    before = controller.state_dict()
    with pytest.raises(ConfigError, match=f"{name}={value!r}: must be an integer >= 0"):
        controller.load_state_dict({**before, "score_sums": [[1.0] * COLUMNS] * 4, name: value})
    assert controller.state_dict() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda state: state["own"].pop("calls"),
            r"state of layer 0: own\.calls=None: must be an integer >= 0",
        ),
        (lambda state: state["own"].update(predicted="much"), r"own\.predicted='much': must be a number"),
        (lambda state: state["own"].update(booked=[1.0]), r"own\.booked is \(1,\): must be two numbers"),
        (lambda state: state["own"].update(booked={"a": 1}), r"own\.booked=\{'a': 1\}: must be a list"),
        (lambda state: state.update(own=[1]), r"own=\[1\]: must be a table"),
        (lambda state: state.update(score_sums=[["x"]]), r"score_sums: must be lists of numbers"),
        (lambda state: state.update(score_sums=[[1.0]]), r"score_sums is \(1, 1\)"),
    ],
)
def test_malformed_scores_are_refused_by_their_key_and_change_nothing(
    damage: Callable[[Any], Any], message: str
) -> None:
    controller = Controller(config=pruning(**GOVERNED), experts=4, layer=0, clock=StepClock(), ranks=1)
    before = controller.state_dict()
    other = {**copy.deepcopy(before), "step": 7, "score_sums": [[1.0] * COLUMNS] * 4}
    other["own"]["calls"] = 3
    damage(other)
    with pytest.raises(ConfigError, match=message):
        controller.load_state_dict(other)
    assert controller.state_dict() == before


def test_a_state_without_one_of_the_parts_begins_that_part_anew() -> None:
    told = DropControl(pruning(max_added_variance=0.1))
    assert told.variance is not None
    told.variance.debt = 0.25
    both, new = DropControl(pruning(**GOVERNED)), DropControl(pruning(drop="auto"))
    both.load(told.state())
    assert both.variance is not None
    assert both.variance.debt == 0.25
    assert both.auto is not None
    assert new.auto is not None
    assert both.auto.state() == new.auto.state()
