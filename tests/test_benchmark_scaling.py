"""The benchmark of growth: slopes, what is judged, and a small run of it."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from tests import benchmark

SIZES = (1, 2, 4, 8, 16, 32)


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    return benchmark.load("scaling")


def test_exponents_are_slopes_in_logarithms(scaling: ModuleType) -> None:
    assert scaling.exponent(SIZES, [3 * n**1.5 for n in SIZES]) == pytest.approx(1.5)
    assert scaling.exponent(SIZES, [7.0] * len(SIZES)) == pytest.approx(0)
    for sizes, times in (((1,), [1.0]), (SIZES, [0.0] * 6)):
        with pytest.raises(ValueError, match="two sizes or more"):
            scaling.exponent(sizes, times)


def test_the_upper_half_shows_growth_that_constants_hide(scaling: ModuleType) -> None:
    assert list(scaling.upper(SIZES)) == [8, 16, 32]
    assert list(scaling.upper(SIZES[:5])) == [4, 8, 16]
    assert list(scaling.upper(SIZES[:2])) == [1, 2]
    select = [100.0 + n**2 for n in SIZES]
    assert scaling.exponent(SIZES, select) < 0.7
    assert scaling.judged(SIZES, {"layer": [5000.0] * 6, "select": select})["select"] > scaling.BOUND


def test_a_step_is_no_growth(scaling: ModuleType) -> None:
    sizes = (*SIZES, 64)
    step = [float(n) * (2 if n >= 16 else 1) for n in sizes]
    assert scaling.steepness(sizes, step) == pytest.approx(1)
    assert scaling.exponent(sizes, step) > scaling.BOUND
    assert scaling.steepness(sizes, [float(n**2) for n in sizes]) == pytest.approx(2)


def test_phases_that_hardly_count_are_not_judged(scaling: ModuleType) -> None:
    times = {"layer": [1e6] * 6, "select": [float(n**2) for n in SIZES]}
    assert set(scaling.judged(SIZES, times)) == {"layer"}
    times["layer"] = [1e4] * 6
    assert set(scaling.judged(SIZES, times)) == {"layer", "select"}


def test_figures_name_what_grows_faster_than_its_input(scaling: ModuleType) -> None:
    times = {"layer": [float(n**2) for n in SIZES], "select": [n**2.5 / 9 for n in SIZES], "plan": [1.0] * 6}
    whole, steepest = scaling.figures_of("tokens", SIZES, times, [times["layer"]] * 3, {})
    assert (whole["name"], whole["value"]) == ("scaling.tokens.exponent", 2)
    assert whole["context"]["above_linear"] == {"layer": 2, "select": 2.5}
    assert whole["context"]["spread"] == 0
    assert (steepest["name"], steepest["value"]) == ("scaling.tokens.steepest_phase", 2.5)
    assert steepest["context"]["phase"] == "select"


def test_a_small_run_times_every_phase_of_a_pruned_call(
    scaling: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling.main(["--json", "--rounds", "1", "--vary", "top_k", "--most", "2"])
    row, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["name"] == "scaling.top_k.exponent"
    assert row["context"]["sizes"] == [1, 2]
    times = row["context"]["ms"]
    assert {"layer", "plan", "experts", "score", "select", "reroute", "experts_backward", "return"} <= set(
        times
    )
    total = [sum(times[name][place] for name in times if name != "layer") for place in (0, 1)]
    assert total == pytest.approx(times["layer"], rel=1e-3)
