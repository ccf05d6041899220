from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lrmoe.layer import MoELayer
from lrmoe.telemetry import CallRecord
from lrmoe.telemetry.watch import DROPPED_ENERGY_LEVEL, EnergyWatch
from tests.layer.harness import build, forward, leaves, pruning
from tests.reference import GRADS, make_case
from tests.telemetry.records import record

CASE = make_case(tokens=61, experts=8, top_k=3, seed=1)


def calls(
    share: float, count: int, *, layer: int = 3, ranks: int = 2, **changes: Any
) -> list[list[CallRecord]]:
    """Calls whose dropped energy is all on the last rank."""
    return [
        [
            record(layer, energy=10.0, energy_dropped=10.0 * ranks * share * (rank == ranks - 1), **changes)
            for rank in range(ranks)
        ]
        for _ in range(count)
    ]


def flags(watch: EnergyWatch, seen: list[list[CallRecord]]) -> list[bool]:
    for call in seen:
        watch.look(call)
    assert all(len({r.dropped_energy_high for r in call}) == 1 for call in seen)
    return [call[0].dropped_energy_high for call in seen]


def test_it_warns_once_a_layer_and_marks_the_calls(caplog: pytest.LogCaptureFixture) -> None:
    watch = EnergyWatch()
    assert flags(watch, calls(0.0035, 12)) == [False] * 9 + [True] * 3
    assert flags(watch, calls(0.01, 12, layer=5))[-1]
    assert flags(watch, calls(0.001, 30, layer=6)) == [False] * 30
    assert len(caplog.messages) == 2
    assert "layer 3" in caplog.messages[0]
    assert "0.35 %" in caplog.messages[0]
    assert "above 0.2 %" in caplog.messages[0]
    assert "layer 5" in caplog.messages[1]
    assert {r.levelno for r in caplog.records} == {logging.WARNING}


def test_the_running_share_forgets() -> None:
    watch = EnergyWatch()
    flags(watch, calls(0.01, 20))
    assert not flags(watch, calls(0.0, 40))[-1]
    low, high = DROPPED_ENERGY_LEVEL * 0.9, DROPPED_ENERGY_LEVEL * 1.1
    assert flags(watch, calls(low, 100))[-1] is False
    assert flags(watch, calls(high, 100))[-1] is True


def test_one_call_among_many_is_no_reason() -> None:
    watch = EnergyWatch()
    flags(watch, calls(0.0, 40))
    assert flags(watch, calls(5 * DROPPED_ENERGY_LEVEL, 1)) == [False]
    assert flags(watch, calls(5 * DROPPED_ENERGY_LEVEL, 5))[-1]


def test_exact_calls_do_not_count() -> None:
    assert flags(EnergyWatch(), calls(0.5, 30, kept=100)) == [False] * 30


def train(layer: MoELayer, steps: int) -> None:
    for _ in range(steps):
        leaf = leaves(CASE, GRADS)
        forward(layer, CASE, leaf).backward(CASE.grad_out)
        layer.clock.advance()


@pytest.mark.parametrize(("estimator", "expected"), [("topk", 1), ("sampled", 0)])
def test_a_layer_is_watched_where_its_rule_is_biased(
    estimator: str, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    layer = build(CASE, pruning(max_drop=0.5, estimator=estimator))
    train(layer, 12)
    assert caplog.messages == []  # nothing has been read
    for _ in range(2):
        found = [one.dropped_energy_high for one in layer.telemetry.records]
    assert found == [False] * 9 + [bool(expected)] * 3
    assert [r.dropped_energy_high for r in layer.telemetry.drain()] == found
    assert len(caplog.messages) == expected


def test_watching_reads_nothing_that_was_not_read_before() -> None:
    layer = build(CASE, pruning(max_drop=0.5, estimator="topk"))
    train(layer, 12)
    assert all(isinstance(call.pending["energy"], torch.Tensor) for call in layer.telemetry._calls)
