from __future__ import annotations

from typing import Any

import pytest

from lrmoe.telemetry import PHASES, CallRecord
from lrmoe.telemetry.layers import layer_figures, layer_histograms, layer_loads, over_all
from tests.telemetry.records import record


def two_ranks() -> list[list[CallRecord]]:
    ours = [record(0), record(1, kept=90)]
    theirs = [record(0, ms={"experts": 5.0}, energy_dropped=2.0), record(1, kept=90, peak_measured=7)]
    return [ours, theirs]


def test_figures_are_the_mean_and_the_worst_layer() -> None:
    flat = layer_figures(two_ranks())
    assert flat["lrmoe/kept_share"] == pytest.approx(0.8)
    assert flat["lrmoe/kept_share_worst"] == pytest.approx(0.7)
    assert flat["lrmoe/backward_peak_worst"] == pytest.approx(1.2)
    assert flat["lrmoe/dropped_energy"] == pytest.approx((3 / 20 + 2 / 20) / 2)
    assert flat["lrmoe/dropped_energy_worst"] == pytest.approx(0.15)
    assert flat["lrmoe/ms_experts_worst"] == 5.0
    assert flat["lrmoe/bytes_dispatch"] == 200
    assert flat["lrmoe/mem_stash_measured"] == 1000
    assert flat["lrmoe/mem_stash_predicted"] == 900
    assert flat["lrmoe/mem_peak_measured_worst"] == 7
    assert flat["lrmoe/drop_reason"] == "always"
    assert {f"lrmoe/bytes_{phase}" for phase in PHASES} < flat.keys()


def test_the_worst_layer_is_worst_over_its_calls_not_in_one() -> None:
    calls = [record(0, kept=60), record(0, kept=100), record(1, kept=70), record(1, kept=70)]
    flat = layer_figures([calls])
    assert flat["lrmoe/kept_share"] == pytest.approx(0.75)
    assert flat["lrmoe/kept_share_worst"] == pytest.approx(0.7)


def test_memory_and_broken_scores_are_the_most_and_the_sum_of_a_layers_calls() -> None:
    fields: list[dict[str, Any]] = [
        {
            "mem": {"stash": size},
            "mem_predicted": {"stash": size},
            "peak_measured": size,
            "peak_predicted": size,
            "nonfinite_scores": size,
        }
        for size in (3, 9, 5)
    ]
    flat = layer_figures([[record(0, **one) for one in fields]])
    for name in ("stash_measured", "stash_predicted", "peak_measured", "peak_predicted"):
        assert flat[f"lrmoe/mem_{name}"] == flat[f"lrmoe/mem_{name}_worst"] == 9, name
    assert flat["lrmoe/nonfinite_scores"] == 17


def test_decisions_are_shown_of_the_calls_that_have_them() -> None:
    told = [{"variance_allowed": 0.1}, {}, {"variance_allowed": 0.3}, {"variance_allowed": 0.7}]
    calls = [record(layer, control=control) for layer, control in zip((0, 0, 0, 1), told, strict=True)]
    flat = layer_figures([calls])
    assert flat["lrmoe/variance_allowed"] == pytest.approx((0.2 + 0.7) / 2)
    assert flat["lrmoe/variance_allowed_worst"] == pytest.approx(0.7)
    assert not any("auto" in name for name in flat)


def test_the_latest_check_is_shown() -> None:
    checks: dict[str, Any] = {"check_cosine": 0.9, "check_relative_error": 0.4}
    calls = [
        record(0),
        record(1, step=3, **checks),
        record(2, step=7, check_cosine=0.8, check_relative_error=0.6),
    ]
    flat = layer_figures([calls])
    found = [flat[f"lrmoe/check_{name}"] for name in ("cosine", "relative_error", "layer")]
    assert found == [0.8, 0.6, 2]
    assert "lrmoe/check_layer" not in layer_figures([[record(0)]])
    later = record(0, step=9, check_cosine=0.7, check_relative_error=0.8)
    assert layer_figures([[*calls, later]])["lrmoe/check_layer"] == 0


def test_evaluation_does_not_count() -> None:
    assert layer_figures([[record(drop_reason="eval")]]) == {}
    assert layer_loads([[record(drop_reason="eval")]]) == []
    assert layer_histograms([[record(drop_reason="eval")]]) == {}
    assert layer_figures([]) == {}


def test_loads_are_summed_over_a_layers_calls() -> None:
    calls = [record(1), record(0), record(1, kept=90)]
    assert layer_loads([calls, calls]) == [
        {
            "layer": 0,
            "forward_R": [60, 40],
            "backward_R": [40, 30],
            "counts_E": [60, 40],
            "quota_E": [40, 30],
        },
        {
            "layer": 1,
            "forward_R": [120, 80],
            "backward_R": [100, 60],
            "counts_E": [120, 80],
            "quota_E": [100, 60],
        },
    ]


def test_histograms_hold_ranks_and_experts_of_a_layer_and_the_layers() -> None:
    found = layer_histograms(two_ranks())
    assert found["lrmoe/layer1/counts_E"] == [60, 40]
    assert found["lrmoe/layer1/quota_E"] == [60, 30]
    assert found["lrmoe/layer0/backward_R"] == [40, 30]
    assert found["lrmoe/kept_share_by_layer"] == pytest.approx([0.7, 0.9])
    assert found["lrmoe/dropped_energy_by_layer"] == pytest.approx([0.15, 0.1])
    assert found["lrmoe/added_variance_by_layer"] == pytest.approx([0.2, 0.2])


def test_shares_over_all_calls_weigh_by_energy() -> None:
    records = [[record(0, energy=30.0), record(1, energy_dropped=4.0)]]
    assert over_all(records, "energy_dropped") == pytest.approx(5 / 40)
    assert over_all([[record(energy=0.0)]], "energy_dropped") == 0.0
