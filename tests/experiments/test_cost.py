"""Critical path, bytes, memory and link speed of a step, from synthetic records."""

from __future__ import annotations

import json
import math

import pytest

from lrmoe.config import LRMoEConfig
from lrmoe.errors import RankError
from lrmoe.experiments.compare.cost import StepCost, link_speed, step_cost
from lrmoe.experiments.compare.lane import Lane
from lrmoe.experiments.systems.registry import get_system
from lrmoe.experiments.trajectories.smoothing import LossWindow
from lrmoe.telemetry import CallRecord, critical_path_ms
from tests.experiments.records import record

LINK = 1e6  # bytes per second


def two_ranks() -> list[list[CallRecord]]:
    """Two layer calls: the slower rank changes between phases and between calls."""
    rank0 = [
        record(ms={"experts": 5.0, "pack": 1.0}, sent={"dispatch": 400}, mem={"stash": 100, "backward": 50}),
        record(
            ms={"experts": 2.0, "pack": 2.0},
            sent={"dispatch": 100},
            layer=1,
            mem={"stash": 10, "backward": 80},
        ),
    ]
    rank1 = [
        record(ms={"experts": 3.0, "pack": 4.0}, sent={"dispatch": 300, "return": 900}, mem={"stash": 60}),
        record(ms={"experts": 6.0, "pack": 1.0}, sent={"dispatch": 500}, layer=1, mem={"stash": 70}),
    ]
    return [rank0, rank1]


def test_critical_path_takes_the_slowest_rank_of_each_call_and_phase() -> None:
    cost = step_cost(two_ranks())
    assert cost.phase_ms == {"experts": 5.0 + 6.0, "pack": 4.0 + 2.0}
    assert cost.critical_bytes == 400 + 900 + 500
    assert cost.critical_s(LINK) == pytest.approx(17e-3 + 1800 / LINK)


def test_critical_path_agrees_with_telemetry() -> None:
    ranks = two_ranks()
    assert step_cost(ranks).critical_s(LINK) * 1e3 == pytest.approx(critical_path_ms(ranks, LINK))


def test_totals_over_ranks() -> None:
    cost = step_cost(two_ranks())
    assert cost.calls == 2
    assert cost.cpu_ms == 6 + 4 + 7 + 7
    assert cost.wire_bytes == 400 + 100 + 1200 + 500
    assert cost.replica_bytes == 0
    moved = record(ms={}, sent={"dispatch": 10, "replicas": 7}, bytes_saved_lean=5)
    assert step_cost([[moved], [moved]]).replica_bytes == 14
    assert step_cost([[moved], [moved]]).row_per_pair_bytes == 2 * 22
    assert cost.wall_ms == 2 * 14, "the rank with most wall time, not the sum of each phase's slowest"
    assert (cost.pairs, cost.kept, cost.kept_share) == (200, 140, 0.7)
    assert (cost.forward_peak_rows, cost.backward_peak_rows) == (120, 70)


def test_buffers_are_all_stashes_and_one_transient_of_the_fullest_rank() -> None:
    assert step_cost(two_ranks()).buffer_bytes == (100 + 10) + 80


def test_micro_batches_do_not_add_to_memory_but_to_rows() -> None:
    calls = [record(ms={"experts": 1.0}, sent={}, micro_batch=i, mem={"stash": 100}) for i in range(3)]
    cost = step_cost([calls, calls])
    assert cost.buffer_bytes == 100
    [load] = cost.loads
    assert (load.layer, load.forward_R, load.backward_R) == (0, (180, 120), (105, 105))
    assert (load.counts_E, load.quota_E) == ((180, 120), (105, 105)), (
        "counts are global: not summed over ranks"
    )


def test_energies_are_summed_over_calls_and_ranks_before_they_are_divided() -> None:
    ranks = [
        [record(ms={}, sent={}, energy=3.0, energy_dropped=0.5, variance_added=1.0)],
        [record(ms={}, sent={}, energy=1.0, energy_dropped=0.5, variance_added=2.0)],
    ]
    cost = step_cost(ranks)
    assert (cost.energy, cost.energy_dropped, cost.variance_added) == (4.0, 1.0, 3.0)
    assert (cost.dropped_energy, cost.added_variance) == (0.25, 0.75)
    line = cost.as_dict()
    assert (line["dropped_energy"], line["added_variance"], line["kept_share"]) == (0.25, 0.75, 0.7)
    exact = step_cost([[record(ms={}, sent={})]])
    assert (exact.dropped_energy, exact.added_variance) == (0.0, 0.0)


def test_ranks_that_recorded_different_calls_are_refused() -> None:
    with pytest.raises(RankError, match="different layer calls"):
        step_cost([[record(ms={}, sent={})], []])


def test_a_step_without_calls_costs_nothing() -> None:
    cost = step_cost([[], []])
    assert (cost.critical_s(LINK), cost.wire_bytes, cost.kept_share, cost.buffer_bytes) == (0.0, 0, 1.0, 0)


def test_link_speed_makes_exchange_a_third_of_a_balanced_layer() -> None:
    costs = [step_cost(two_ranks())] * 3
    speed = link_speed(costs)
    assert speed is not None
    compute_s = sum(cost.cpu_ms for cost in costs) / 2 / 1e3  # per rank, perfectly shared
    exchange_s = sum(cost.wire_bytes for cost in costs) / 2 / speed
    assert exchange_s / (compute_s + exchange_s) == pytest.approx(1 / 3)


def test_no_link_speed_without_bytes() -> None:
    assert link_speed([step_cost([[record(ms={"experts": 1.0}, sent={})]])]) is None


@pytest.mark.parametrize("width", [1, 4])
def test_smoothed_loss_is_the_mean_of_the_last_steps(width: int) -> None:
    window = LossWindow(width)
    means = [window.add(float(loss)) for loss in range(8)]
    assert means[: width - 1] == [None] * (width - 1)
    assert means[width - 1 :] == [sum(range(i - width + 1, i + 1)) / width for i in range(width - 1, 8)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_never_reaches_the_target(bad: float) -> None:
    window = LossWindow(2)
    reached = [LossWindow.reaches(window.add(loss), 2.0) for loss in (1.0, bad, 1.0, 1.0)]
    assert reached == [False, False, False, True]


def test_window_must_hold_a_step() -> None:
    with pytest.raises(ValueError, match="width=0"):
        LossWindow(0)


def lane_after(losses: list[float], *, target: float | None = 2.0) -> Lane:
    targets = [] if target is None else [target]
    lane = Lane(get_system("lrmoe"), LRMoEConfig(), targets=targets, smoothing_steps=2, max_steps=9)
    for loss in losses:
        if lane.running:
            lane.add(loss, 100, step_cost(two_ranks()))
    return lane


def test_time_to_loss_is_summed_until_the_smoothed_loss_first_arrives() -> None:
    lane = lane_after([3.0, 1.5, 2.75, 1.25, 0.5])
    summary = lane.summary(LINK)
    assert (summary["reached"], summary["steps"], summary["smoothed_loss"]) == (True, 4, 2.0)
    assert summary["moe_time_critical_s"] == pytest.approx(4 * step_cost(two_ranks()).critical_s(LINK))
    assert summary["moe_time_wall_s"] == pytest.approx(4 * 28e-3)
    assert (summary["wire_bytes"], summary["tokens"], summary["kept_share"]) == (4 * 2200, 400, 0.7)
    assert (summary["forward_peak_rows"], summary["backward_peak_rows"]) == (60, 35)
    assert summary["call_ms"] == {
        "experts": pytest.approx(5.5),
        "pack": pytest.approx(3.0),
        "wire": pytest.approx(1800 / LINK / 2 * 1e3),
    }


def test_without_a_target_the_last_step_ends_a_lane() -> None:
    lane = lane_after([3.0, 1.0, 2.0, *[1.5] * 20], target=None)
    assert (lane.reached, lane.running, len(lane.lines)) == (True, False, 9)
    assert lane.lowest == 1.5
    assert [len(lane.until(loss)) for loss in (2.0, 1.5, 1.4)] == [2, 3, 0]
    summary = lane.summary(LINK, 1.5)
    assert summary["steps_to_common_loss"] == 3
    assert summary["critical_s_to_common_loss"] == pytest.approx(3 * step_cost(two_ranks()).critical_s(LINK))
    lost = lane_after([3.0] * 8 + [math.nan], target=None)
    assert not lost.reached
    assert not lost.running


def test_several_targets_run_to_the_lowest_and_each_has_its_own_figures() -> None:
    lane = Lane(get_system("lrmoe"), LRMoEConfig(), targets=[3.0, 1.0, 2.0], smoothing_steps=1, max_steps=9)
    for loss, energy in ((4.0, 0.0), (3.0, 4.0), (2.5, 2.0), (1.0, 1.0)):
        assert lane.running
        ranks = [[record(ms={"experts": 1.0}, sent={}, energy=energy, energy_dropped=1.0)]]
        lane.add(loss, 100, step_cost(ranks))
    assert lane.reached
    found = {entry["target"]: entry for entry in lane.summary(LINK)["to_target"]}
    assert list(found) == [3.0, 1.0, 2.0]
    assert [found[target]["steps"] for target in (3.0, 2.0, 1.0)] == [2, 4, 4], "first at or below it"
    assert found[3.0]["critical_s"] == pytest.approx(2e-3)
    assert found[3.0]["wall_s"] == pytest.approx(4e-3)
    assert found[3.0]["dropped_energy"] == 0.25, "the exact first step scored nothing and does not count"
    assert found[1.0]["dropped_energy"] == pytest.approx((1 / 4 + 1 / 2 + 1 / 1) / 3)


def test_a_target_that_was_not_reached_has_no_figures_and_steps_stand_for_a_missing_target() -> None:
    missed = lane_after([3.0, 2.9, 2.8]).summary(LINK)["to_target"]
    assert [(entry["target"], entry["reached"], entry["critical_s"]) for entry in missed] == [
        (2.0, False, None)
    ]
    done = lane_after([3.0] * 9, target=None).summary(LINK)["to_target"]
    assert [(entry["target"], entry["reached"], entry["steps"]) for entry in done] == [(None, True, 9)]


def test_an_unreached_target_is_said() -> None:
    lane = lane_after([3.0, 2.9, 2.8])
    assert lane.running
    assert lane.summary(LINK)["reached"] is False


def test_divergence_stops_the_lane_and_stays_valid_json() -> None:
    lane = lane_after([3.0, math.nan, 1.0, 1.0])
    assert not lane.running
    summary = lane.summary(None)
    assert (summary["reached"], summary["steps"], summary["final_loss"]) == (False, 2, None)
    assert summary["moe_time_critical_s"] is None
    json.dumps(summary, allow_nan=False)
    json.dumps([line.as_dict() for line in lane.lines], allow_nan=False)


def test_lines_hold_what_the_report_reads() -> None:
    line = lane_after([3.0]).lines[0].as_dict()
    assert isinstance(lane_after([3.0]).lines[0].cost, StepCost)
    assert line["loads"][0]["forward_R"] == (60, 40)
    assert {
        "system",
        "step",
        "loss",
        "smoothed_loss",
        "wall_s",
        "phase_ms",
        "critical_bytes",
        "kept_share",
    } <= set(line)
