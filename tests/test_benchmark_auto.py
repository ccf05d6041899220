"""The benchmark of `drop="auto"`: how it counts steps, times layers and fits, on made-up runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lrmoe.experiments.trajectories.trajectory import Trajectory
from tests import benchmark


@pytest.fixture
def auto() -> ModuleType:
    return benchmark.load("auto")


@pytest.fixture
def times(auto: ModuleType) -> Any:
    return auto.Times(
        over_exact={0.0: 1.0, 0.5: 0.8, 0.9: 0.5},
        errors={0.0: 0.0, 0.5: 0.01, 0.9: 0.01},
        ratio=1.5,
        choosing=0.2,
    )


def trajectory(folder: Path, losses: np.ndarray, kept: float = 1.0, added: float = 0.0) -> Trajectory:
    lines = [
        {
            "loss": loss,
            "smoothed_loss": loss,
            "kept_share": kept,
            "dropped_energy": 0.0,
            "added_variance": added,
        }
        for loss in losses.tolist()
    ]
    return Trajectory(folder, lines, {})


def test_memorised_steps_and_what_never_gets_there(auto: ModuleType, times: Any, tmp_path: Path) -> None:
    falling = np.linspace(1.0, 0.0, 101)
    found = {0.0: [trajectory(tmp_path, falling)], 0.5: [trajectory(tmp_path, falling + 0.5, 0.5)]}
    runs = auto.memorised(found, 0.3)
    assert runs[0.0][0].steps == 71
    assert runs[0.0][0].time(times) == pytest.approx(71)
    assert math.isinf(runs[0.5][0].steps)
    assert len(runs[0.5][0].dropped) == 101


def test_continued_steps_come_from_paired_differences_over_the_slope(
    auto: ModuleType, times: Any, tmp_path: Path
) -> None:
    noise = np.random.default_rng(0).normal(scale=0.2, size=(2, 200))
    trend = 2.0 - 0.001 * np.arange(1, 201)
    noise -= np.polyval(np.polyfit(np.arange(150), noise[:, 50:].mean(axis=0), 1), np.arange(-50, 150))
    exact = [trajectory(tmp_path, trend + one) for one in noise]
    late = [trajectory(tmp_path, trend + one + 0.015, 0.5, 0.4) for one in noise]  # by 15 steps
    runs, slope = auto.continued({0.0: exact, 0.5: late})
    assert slope == pytest.approx(-0.001)
    assert [run.steps for run in runs[0.0]] == [150, 150]
    assert [run.steps for run in runs[0.5]] == pytest.approx([165, 165])
    assert runs[0.5][0].time(times) == pytest.approx(165 * 0.8)
    assert auto.noise_share(runs) == pytest.approx(0.1 / 0.4)


def test_auto_is_held_against_the_best_fixed_drop(auto: ModuleType, times: Any) -> None:
    def run(steps: float, dropped: float) -> Any:
        return auto.Run(steps=steps, dropped=np.full(8, dropped), added=dropped)

    runs = {
        0.0: [run(100, 0.0), run(110, 0.0)],
        0.5: [run(105, 0.5), run(115, 0.5)],
        0.9: [run(math.inf, 0.9), run(math.inf, 0.9)],
        None: [run(106, 0.7), run(116, 0.7)],
    }
    found = {row["name"]: row for row in auto.figures("memorise", runs, times, seeds=[0, 1])}
    ratio = found["auto.memorise.time_to_loss_over_best_fixed"]
    assert ratio["context"]["best_fixed_drop"] == 0.5
    assert ratio["value"] == pytest.approx(np.mean([106 * 0.65 / 84, 116 * 0.65 / 92]), abs=1e-4)
    assert found["auto.memorise.chosen_drop"]["value"] == pytest.approx(0.7)
    assert found["auto.memorise.drop0.9.added_variance"]["context"]["not_reached"] == 2
    assert "auto.memorise.drop0.9.time_to_loss_over_exact" not in found
    assert found["auto.memorise.drop0.5.time_to_loss_over_exact"]["value"] == pytest.approx(0.838, abs=1e-3)


def test_ratio_and_choosing_are_what_calls_were_made_of(auto: ModuleType) -> None:
    timing = auto.auto_times

    def call(lane: Any, forward: float, backward: float, select: float, rows: float) -> Any:
        return timing.Timed(
            regime="memorise", lane=lane.name, step=60, layer=0, cpu_ms=100.0, wire_bytes=1,
            phase_ms={"experts": forward, "experts_backward": backward, "select": select},
            phase_bytes={}, forward_peak=1.0, backward_peak=rows,
        )  # fmt: skip

    calls = []
    for lane in timing.LANES:
        for layer in (0, 1):
            kept = 1.0 - lane.drop
            one = call(lane, 10.0, 15.0 * kept, 2.0 if lane.drop else 0.0, kept)
            calls.append(replace(one, layer=layer))
    times = timing.Times.of(calls, timing.STASH)
    assert times.ratio == pytest.approx(1.5)
    assert times.choosing == pytest.approx(0.2)
    assert times.over_exact[0.5] == pytest.approx(19.5 / 25)
    assert times.at(np.array([0.0, 0.55])) == pytest.approx([1.0, (19.5 + 18.0) / 50])
