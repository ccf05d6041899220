"""What the layers of a model hold on the fullest rank, from synthetic records."""

from __future__ import annotations

import pytest

from lrmoe.config import LRMoEConfig
from lrmoe.experiments.compare.cost import step_cost
from lrmoe.experiments.compare.memory import memory_summary, model_memory
from lrmoe.telemetry import CallRecord
from tests.experiments.records import record


def _call(layer: int, micro_batch: int = 0, **mem: int) -> CallRecord:
    return record(ms={}, sent={}, layer=layer, micro_batch=micro_batch, mem=mem)


def test_stashes_of_a_micro_batch_add_up_and_buffers_pass() -> None:
    rank0 = [
        _call(0, weights=10, stash=5, dispatched=7, backward=3),
        _call(1, weights=10, stash=6, dispatched=4, backward=9),
        _call(0, 1, weights=10, stash=1),
    ]
    memory = model_memory([rank0, [_call(0, weights=10, stash=1)]])
    assert memory.measured["weights"] == 20
    assert memory.measured["stash"] == 11, "of the fuller micro-batch"
    assert (memory.measured["dispatched"], memory.measured["backward"]) == (7, 9), "one call at a time"
    assert memory.call_measured == {**dict.fromkeys(memory.measured, 0), "weights": 10, "stash": 6} | {
        "dispatched": 4,
        "backward": 9,
    }


def test_the_fullest_step_and_the_budgets_go_into_the_summary() -> None:
    steps = [
        step_cost([[record(ms={}, sent={}, mem={"stash": size}, mem_predicted={"stash": size + 1})]]).memory
        for size in (3, 8, 5)
    ]
    found = memory_summary(steps, LRMoEConfig(memory_budget="1GiB"), 12)
    assert (found["measured"]["stash"], found["predicted"]["stash"]) == (8, 9)
    assert (found["memory_budget"], found["layer_budget"], found["optimizer"]) == (2**30, None, 12)
    assert memory_summary([], LRMoEConfig(), 0) == {}


def test_a_line_of_metrics_does_not_repeat_it() -> None:
    cost = step_cost([[record(ms={}, sent={}, mem={"stash": 3})]])
    assert "memory" not in cost.as_dict()
    assert cost.as_dict()["pairs"] == pytest.approx(100)
