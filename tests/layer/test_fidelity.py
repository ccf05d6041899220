"""The limit on added variance and the automatic drop in the layer: one device, real calls."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from lrmoe.layer import MoELayer
from lrmoe.planning.auto import EVERY, STASH_RATIO
from lrmoe.telemetry import CallRecord
from tests.layer.harness import REENTRANT, build, forward, leaves, pruning, run
from tests.reference import GRADS, Case, make_case

BASE = make_case(tokens=160, experts=4, top_k=2, seed=5)


def drifting(call: int) -> Case:
    """The base case with tokens' gradients whose spread grows from call to call, and changing routing."""
    generator = torch.Generator().manual_seed(call)
    tokens = BASE.hidden.shape[0]
    spread = 0.2 + call / 150
    scale = (spread * torch.randn(tokens, 1, generator=generator, dtype=BASE.grad_out.dtype)).exp()
    ids = torch.rand(tokens, 4, generator=generator).argsort(dim=1)[:, :2]
    return dataclasses.replace(BASE, grad_out=BASE.grad_out * scale, ids=ids)


def records(layer: MoELayer, config: Any, calls: range, **kwargs: Any) -> list[CallRecord]:
    found = []
    for call in calls:
        found.append(run(drifting(call), config, layer=layer, **kwargs).record)
        layer.clock.advance()
    return found


@pytest.mark.parametrize("drop", ["always", "auto"])
def test_the_mean_over_fifty_calls_keeps_to_the_limit(drop: str) -> None:
    config = pruning(max_drop=0.8, max_added_variance=0.1, drop=drop)
    layer = build(BASE, config)
    found = records(layer, config, range(100))
    means = np.convolve([r.added_variance for r in found], np.ones(50) / 50, "valid")
    assert means.max() <= 0.11
    assert means.min() >= 0.07, "and the limit is used"
    reasons = {r.drop_reason for r in found}
    assert reasons == ({"variance"} if drop == "always" else {"variance", "auto"})
    assert all(0 < r.kept < r.pairs for r in found)


def test_the_first_call_keeps_to_the_bound_of_equal_chances() -> None:
    config = pruning(max_drop=0.8, max_added_variance=0.25)
    found = run(drifting(0), config).record
    assert found.kept_share == pytest.approx(1 / 1.245, abs=0.01)
    assert found.added_variance <= 0.25
    assert found.control["variance_predicted"] <= 0.25


def test_where_max_drop_is_tighter_it_binds_and_the_reason_says_so() -> None:
    config = pruning(max_drop=0.1, max_added_variance=5.0)
    layer = build(BASE, config)
    found = records(layer, config, range(4))
    assert [r.drop_reason for r in found] == ["always"] * 4
    assert [r.kept for r in found] == [320 - 32] * 4


@pytest.mark.parametrize("factor", [0.0, torch.nan], ids=["zero", "nan"])
def test_calls_without_a_finite_gradient_teach_nothing(factor: float) -> None:
    config = pruning(max_drop=0.8, max_added_variance=0.1)
    layer = build(BASE, config)
    limit = layer.controller.drops.variance
    assert limit is not None
    records(layer, config, range(10))
    run(drifting(10), config, layer=layer)
    nothing = dataclasses.replace(BASE, grad_out=BASE.grad_out * factor)
    run(nothing, config, layer=layer)  # hears of the call before
    known = limit.factor
    for _ in range(10):
        run(nothing, config, layer=layer)
    assert limit.factor == known
    assert records(layer, config, range(10, 11))[0].added_variance <= 0.25, "credit is half a limit at most"


def test_overload_on_one_device_still_drops_nothing() -> None:
    config = pruning(max_drop=0.5, max_added_variance=0.1, drop="overload")
    found = run(drifting(0), config).record
    assert found.kept == found.pairs
    assert found.drop_reason == "off"


def test_a_budget_that_needs_drops_gets_what_the_limit_allows() -> None:
    """Unpruned the call would run in parts; the fewest drops that spare them add little, once scores are known."""
    config = pruning(max_drop=0.6, max_added_variance=0.1, drop="overload", layer_budget=400_000)
    layer = build(BASE, config)
    found = records(layer, config, range(6))
    assert [r.chunks for r in found][2:] == [1] * 4
    assert {r.drop_reason for r in found[2:]} == {"budget"}
    assert found[0].drop_reason == "variance"
    assert all(r.added_variance <= 0.1 for r in found)


def test_warm_up_and_cool_down_stay_exact() -> None:
    config = pruning(
        max_drop=0.5, max_added_variance=0.02, drop="auto", warmup_steps=3, cooldown_steps=2, total_steps=8
    )
    layer = build(BASE, config)
    found = records(layer, config, range(8))
    assert [r.drop_reason for r in found] == ["warmup"] * 3 + ["variance"] * 3 + ["cooldown"] * 2
    assert [r.kept == r.pairs for r in found] == [True] * 3 + [False] * 3 + [True] * 2


def test_what_was_decided_is_in_the_record() -> None:
    config = pruning(max_drop=0.5, max_added_variance=0.2, drop="auto")
    layer = build(BASE, config)
    flat = records(layer, config, range(3))[-1].as_dict()
    names = {
        "variance_predicted", "variance_allowed", "variance_mean", "variance_drop", "auto_drop", "auto_time",
        "auto_steps", "auto_ratio",
    }  # fmt: skip
    assert names <= set(flat)
    assert flat["variance_predicted"] <= 1.05 * flat["variance_allowed"]
    assert flat["auto_ratio"] == STASH_RATIO, "no exact call was timed"
    assert json.loads(json.dumps(flat)) == flat


@pytest.mark.parametrize("drop", ["always", "auto"])
def test_a_restored_layer_decides_as_the_one_that_went_on(drop: str) -> None:
    config = pruning(max_drop=0.7, max_added_variance=0.15, drop=drop, warmup_steps=4)
    layer = build(BASE, config)
    records(layer, config, range(30))
    saved = json.loads(json.dumps(layer.state_dict()))
    went_on = records(layer, config, range(30, 90))
    other = build(BASE, config, step=30)
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    resumed = records(other, config, range(30, 90))
    assert [r.quota_E for r in resumed] == [r.quota_E for r in went_on]
    assert [r.control for r in resumed] == [r.control for r in went_on]


@pytest.mark.parametrize("checkpoint", sorted(REENTRANT))
def test_a_recompute_teaches_nothing_twice(checkpoint: str) -> None:
    config = pruning(max_drop=0.7, max_added_variance=0.15, drop="auto")
    plain, again = build(BASE, config), build(BASE, config)
    one = records(plain, config, range(12))
    two = records(again, config, range(12), checkpoint=checkpoint)
    assert [r.quota_E for r in one] == [r.quota_E for r in two]
    assert plain.state_dict() == again.state_dict()


def test_evaluation_between_calls_changes_no_decision() -> None:
    config = pruning(max_drop=0.7, max_added_variance=0.15)
    plain, looked = build(BASE, config), build(BASE, config)
    for call in range(6):
        run(drifting(call), config, layer=plain)
        run(drifting(call), config, layer=looked)
        before = looked.state_dict()
        with torch.no_grad():
            forward(looked, BASE, leaves(BASE, []), training=False)
        assert looked.state_dict() == before
    assert plain.state_dict() == looked.state_dict()


def test_a_second_backward_is_not_booked_again() -> None:
    config = pruning(max_drop=0.5, max_added_variance=0.2)
    layer, leaf = build(BASE, config), leaves(BASE, GRADS)
    out = forward(layer, BASE, leaf)
    out.backward(BASE.grad_out, retain_graph=True)
    once = layer.state_dict()
    out.backward(BASE.grad_out)
    assert layer.state_dict() == once


def test_quotas_follow_past_scores() -> None:
    """Expert 0's tokens get large gradients: after one call it keeps more of its pairs than the others."""
    tokens = BASE.hidden.shape[0]
    ids = torch.arange(tokens)[:, None] % 4
    grad = BASE.grad_out * torch.where(ids == 0, 20.0, 1.0)
    case = dataclasses.replace(BASE, ids=ids, weights=BASE.weights[:, :1], grad_out=grad)
    config = pruning(max_drop=0.5)
    layer = build(case, config)
    first, second = (run(case, config, layer=layer).record.quota_E for _ in range(2))
    assert first == [20, 20, 20, 20]
    assert second[0] >= 36
    assert max(second[1:]) <= 16


def test_a_state_of_an_earlier_version_gives_mean_scores() -> None:
    config = pruning(max_drop=0.5, max_added_variance=0.2)
    layer = build(BASE, config)
    layer.load_state_dict({"step": 3, "calls_in_step": 1, "calls": 7, "score_mean": [1.0, 3.0, 0.0, 2.0]})
    sums = np.array(layer.state_dict()["score_sums"])
    assert sums[:, 1].tolist() == [1.0, 3.0, 0.0, 2.0]
    assert sums[:, 0].tolist() == [1.0, 1.0, 0.0, 1.0]
    run(drifting(0), config, layer=layer)


def test_auto_measures_exact_calls_then_stands_still() -> None:
    config = pruning(max_drop=0.6, drop="auto", warmup_steps=6)
    layer = build(BASE, config)
    found = records(layer, config, range(12))
    auto = layer.controller.drops.auto
    assert auto is not None
    assert auto.frozen
    assert auto.calls == 6
    assert auto.forward_rows == auto.backward_rows == 5 * 320, "the first call warms up"
    ratios = [r.control["auto_ratio"] for r in found[6:]]
    assert len(set(ratios)) == 1
    assert ratios[0] > 0
    assert {r.drop_reason for r in found[6:]} == {"auto"}
    state = layer.state_dict()["drops"]["auto"]
    records(layer, config, range(12, 15))
    after = layer.state_dict()["drops"]["auto"]
    assert {k: v for k, v in after.items() if k not in ("age", "drop", "time", "steps")} == {
        k: v for k, v in state.items() if k not in ("age", "drop", "time", "steps")
    }


def test_auto_learns_scores_although_their_bound_alone_would_drop_nothing() -> None:
    config = pruning(max_drop=0.5, drop="auto")
    layer = build(BASE, config)
    first, *later = records(layer, config, range(EVERY + 3))
    assert first.control["auto_drop"] == 0
    assert first.drop_reason == "auto"
    assert 0 < first.pairs - first.kept <= 0.5 / 8 * first.pairs
    assert all(record.control["variance_predicted"] > 0 for record in later if record.kept < record.pairs)
    assert later[0].kept < later[0].pairs
