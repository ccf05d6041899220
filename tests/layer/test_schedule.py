"""Warm-up, cool-down, overload, observation: when the layer prunes and what it reports."""

from __future__ import annotations

import pytest

from lrmoe.config import LRMoEConfig
from tests.layer.harness import build, pruning, run
from tests.reference import assert_result, make_case

CASE = make_case(tokens=40, experts=4, seed=2)


def test_warm_up_and_cool_down_are_exact_and_the_steps_between_prune() -> None:
    config = LRMoEConfig(max_drop=0.5, warmup_steps=2, cooldown_steps=3, total_steps=8)
    layer = build(CASE, config)
    reasons = []
    for _ in range(8):
        found = run(CASE, config, layer=layer)
        reasons.append(found.record.drop_reason)
        exact = found.record.kept == found.record.pairs
        assert exact == (found.record.drop_reason != "always")
        if exact:
            assert_result(found.result, CASE)
        layer.clock.advance()
    assert reasons == ["warmup"] * 2 + ["always"] * 3 + ["cooldown"] * 3


def test_by_default_the_first_twenty_steps_are_exact() -> None:
    assert run(CASE, LRMoEConfig(), step=19).record.drop_reason == "warmup"
    found = run(CASE, LRMoEConfig(), step=20).record
    assert found.drop_reason == "always"
    assert found.kept == 80 - 24


def test_evaluation_with_gradients_is_exact_and_leaves_no_record() -> None:
    layer = build(CASE, pruning(max_drop=0.5))
    with pytest.warns(UserWarning, match="evaluation mode"):
        evaluated = run(CASE, pruning(max_drop=0.5), layer=layer, training=False).result
    assert_result(evaluated, CASE)
    assert layer.last_record is None
    assert layer.telemetry.drain() == []


def test_overload_on_one_device_drops_nothing() -> None:
    found = run(CASE, pruning(max_drop=0.5, drop="overload"))
    assert found.record.kept == found.record.pairs
    assert_result(found.result, CASE)


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_the_record_of_a_pruned_call(estimator: str) -> None:
    found = run(CASE, pruning(max_drop=0.5, estimator=estimator), step=7).record
    assert (found.step, found.micro_batch, found.layer, found.world_size) == (7, 0, 0, 1)
    assert found.pairs == sum(found.counts_E) == 80
    assert found.kept == sum(found.quota_E) == 40
    assert found.kept_share == pytest.approx(0.5)
    assert list(found.forward_load_R) == [80]
    assert list(found.backward_load_R) == [40]
    assert found.rows_backward_local == 40
    assert found.forward_peak == pytest.approx(1.0)
    assert found.backward_peak == pytest.approx(0.5)
    assert found.nonfinite_scores == 0
    assert 0 < found.dropped_energy < 1
    flat = found.as_dict()
    assert {"kept_share", "forward_peak", "backward_peak", "drop_reason", "dropped_energy"} <= set(flat)
    assert {f"ms_{p}" for p in ("plan", "pack", "experts", "score", "select", "experts_backward")} <= set(
        flat
    )


def test_nothing_travels_on_one_device() -> None:
    found = run(CASE, pruning(max_drop=0.5)).record
    assert sum(found.bytes.values()) == 0


def test_observation_is_exact_and_reports_what_pruning_would_save() -> None:
    config = pruning(max_drop=0.5, observe=True)
    layer = build(CASE, config)
    found = run(CASE, config, layer=layer)
    assert_result(found.result, CASE)
    assert found.record.kept == found.record.pairs


def test_a_clock_that_will_be_advanced_is_waited_for() -> None:
    layer = build(CASE, pruning(warmup_steps=2))
    layer.clock.expected = True
    for _ in range(70):
        assert run(CASE, pruning(warmup_steps=2), layer=layer).record.drop_reason == "warmup"
