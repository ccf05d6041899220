"""Records, the clock, the ledger and the critical path, on hand-made numbers."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lrmoe
from lrmoe.telemetry import PHASES, CallRecord, Ledger, PhaseClock, Telemetry, critical_path_ms, figure
from lrmoe.telemetry.ledger import buffer_peak
from lrmoe.telemetry.record import OpenCall


def record(**fields: Any) -> CallRecord:
    given: dict[str, Any] = {
        "step": 0,
        "micro_batch": 0,
        "layer": 0,
        "world_size": 2,
        "tokens": 4,
        "pairs": 8,
        "kept": 6,
        "drop_reason": "always",
        "counts_E": [6, 2],
        "quota_E": [4, 2],
        "forward_load_R": [6, 2],
        "backward_load_R": [4, 2],
    }
    return CallRecord(**{**given, **fields})


def test_shares_and_peaks_are_over_the_complete_call() -> None:
    one = record(energy=4.0, energy_dropped=1.0, variance_added=2.0, bytes={"dispatch": 3, "exchange": 4})
    assert (one.kept_share, one.forward_peak, one.backward_peak) == (0.75, 1.5, 1.0)
    assert (one.dropped_energy, one.added_variance, one.wire_bytes) == (0.25, 0.5, 7)


def test_an_empty_call_has_no_division_by_zero() -> None:
    empty = record(pairs=0, kept=0, forward_load_R=[0, 0], backward_load_R=[0, 0])
    assert (empty.kept_share, empty.forward_peak, empty.backward_peak) == (1.0, 0.0, 0.0)
    assert (empty.dropped_energy, empty.added_variance) == (0.0, 0.0)


def test_the_flat_form_is_json_with_the_documented_names() -> None:
    flat = json.loads(json.dumps(record(ms={"plan": 2.0}, mem={"stash": 5}, bytes={"exchange": 9}).as_dict()))
    assert flat["ms_plan"] == 2.0
    assert flat["bytes_exchange"] == 9
    assert flat["mem_stash_measured"] == 5
    assert {f"{kind}_{phase}" for kind in ("ms", "bytes") for phase in PHASES} <= set(flat)
    documented = "kept_share forward_peak backward_peak dropped_energy added_variance nonfinite_scores chunks"
    assert {*documented.split(), "drop_reason"} <= set(flat)


def test_the_ledger_knows_what_is_alive_and_the_most_that_was() -> None:
    ledger = Ledger()
    first, second = torch.zeros(100), torch.zeros(50)
    ledger.add("dispatched", first, first[:10])
    ledger.add("backward", first, second)
    assert (ledger.current, ledger.peak) == (600, 600)
    del first
    third = torch.zeros(20)
    ledger.follow(third)
    assert (ledger.current, ledger.peak) == (280, 600)
    del second, third
    assert (ledger.current, ledger.peak) == (0, 600)
    assert ledger.read()["dispatched"] == 440


def test_the_critical_path_takes_the_slowest_rank_per_call_and_phase() -> None:
    first = [record(ms={"plan": 1.0, "experts": 5.0}, bytes={"dispatch": 1000}), record(ms={"experts": 1.0})]
    second = [record(ms={"plan": 3.0, "experts": 2.0}, bytes={"dispatch": 4000}), record(ms={"experts": 9.0})]
    assert critical_path_ms([first, second], float("inf")) == pytest.approx(3 + 5 + 9)
    assert critical_path_ms([first, second], 1e6) == pytest.approx(3 + 5 + 9 + 4)
    with pytest.raises(ValueError, match="zip"):
        critical_path_ms([first, second[:1]], 1e6)


def test_the_clock_charges_cpu_time_to_the_phase_and_keeps_wall_beside_it() -> None:
    clock = PhaseClock(torch.device("cpu"))
    for _ in range(2):
        with clock.phase("plan"):
            time.sleep(0.02)
    busy, wall = clock.read()
    assert set(busy) == set(wall) == {"plan"}
    assert wall["plan"] >= 40
    assert busy["plan"] < wall["plan"] / 2


def test_a_phase_inside_another_one_interrupts_it() -> None:
    clock = PhaseClock(torch.device("cpu"))
    with clock.phase("experts"):
        time.sleep(0.02)
        with clock.phase("replicas"):
            assert clock.latest == "replicas"
            time.sleep(0.06)
        assert clock.latest == "experts"
        time.sleep(0.02)
    _, wall = clock.read()
    assert set(wall) == {"experts", "replicas"}
    assert wall["replicas"] >= 60
    assert 40 <= wall["experts"] < 60, "the inner phase's time is not the outer one's too"


def test_the_ledger_counts_the_same_memory_once_per_part() -> None:
    ledger, rows = Ledger(), torch.zeros(10, 4)
    ledger.add("stash", rows, rows.view(4, 10), None, torch.zeros(0))
    ledger.add("dispatched", rows)
    assert ledger.read()["stash"] == ledger.read()["dispatched"] == 160
    ledger.seal()
    ledger.add("stash", rows)
    assert ledger.read()["stash"] == 320
    assert ledger.read()["backward"] == 0


def test_the_ledger_counts_a_new_buffer_where_one_that_is_gone_has_lain() -> None:
    ledger, room = Ledger(), np.zeros(40, dtype=np.float32)
    rows = torch.from_numpy(room)
    ledger.add("stash", rows)
    ledger.add("stash", rows.view(4, 10))
    del rows
    ledger.add("stash", torch.from_numpy(room))  # a second storage at the first one's address
    assert ledger.read()["stash"] == 320


def test_the_buffer_peak_is_the_larger_of_both_passes() -> None:
    assert buffer_peak({"dispatched": 5, "stash": 10, "outputs": 1, "backward": 3}) == 18
    assert buffer_peak({"dispatched": 5, "stash": 10, "outputs": 1, "backward": 30}) == 45
    assert buffer_peak({"dispatched": 5, "stash": 10, "outputs": 9, "backward": 3}) == 24
    assert buffer_peak({"weights": 99}) == 0


def test_telemetry_drains_in_call_order_and_is_bounded() -> None:
    telemetry = Telemetry(limit=3)
    for layer, step in ((1, 0), (0, 0), (1, 1), (0, 1)):
        telemetry.add(OpenCall(record=record(step=step, layer=layer), clock=PhaseClock(torch.device("cpu"))))
    assert [(r.step, r.layer) for r in telemetry.records] == [(0, 0), (1, 1), (1, 0)]
    assert [(r.step, r.layer) for r in telemetry.drain()] == [(0, 0), (1, 0), (1, 1)]
    assert telemetry.drain() == []


def test_a_figure_is_one_json_line_with_its_context() -> None:
    one = json.loads(json.dumps(figure("layer.fp32.drop0.over_gemms", 1.25, "ratio", "lower", seed=3)))
    assert {"name", "value", "unit", "better", "context"} == set(one)
    assert {"command", "seed", "versions", "hardware", "date"} <= set(one["context"])
    assert one["context"]["seed"] == 3


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("/usr/bin/lrmoe", "lrmoe"),
        (str(Path(lrmoe.__file__).parent / "cli" / "__main__.py"), "python -m lrmoe.cli"),
        ("/somewhere/lrmoe/__main__.py", "python -m lrmoe"),
    ],
)
def test_a_figure_names_the_command_that_can_be_typed_again(
    monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "plan"])
    assert figure("a.b.c", 1.0, "ratio", "lower")["context"]["command"] == f"{said} plan"
