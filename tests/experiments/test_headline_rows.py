"""The headline's arithmetic: time to loss, ratios seed by seed, figures over seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lrmoe.experiments.headline.rows import Outcome, figures, rows_of
from lrmoe.experiments.stage.lines import MAIN, STASH, Call
from tests.experiments.staged import call

LINK = 600_000  # bytes/s of the calls that `balanced` makes


def outcome(system: str, steps: int | None, seed: int = 0, loss: float = 0.05) -> Outcome:
    return Outcome(
        model="tiny", aux=0.0, seed=seed, system=system, steps=steps, final_loss=loss, exact_loss=0.05
    )


def made(system: str, ms: float, step: int, layer: int, seed: int = 0) -> Call:
    """A call whose critical path is `ms` and half of it over the link."""
    sent = {"dispatch": round(ms / 2 / 1e3 * LINK)}
    return call(
        system=system, step=step, layer=layer, seed=seed, phase_ms={"experts": ms / 2}, phase_bytes=sent
    )


def balanced(system: str = "megatron", seed: int = 0) -> Call:
    """6 ms of compute, 3000 bytes in 5 ms; replicas and scores that do not count."""
    return call(system=f"balanced:{system}", seed=seed)


def test_time_to_loss_is_the_mean_call_of_every_layer_times_the_steps() -> None:
    calls = [made("symi", ms, step, layer) for ms, step, layer in ((10, 10, 0), (20, 20, 0), (40, 10, 1))]
    calls += [made("symi", 1000, 30, 0)]  # after the target
    (row,) = rows_of([outcome("symi", 25)], [*calls, balanced()])
    assert row.layer_ms == pytest.approx(15 + 40)
    assert row.time_to_loss_s == pytest.approx(55 * 25 / 1e3)
    assert row.over == {"symi": pytest.approx(1.0)}
    assert row.over_balanced == pytest.approx(55 / 2 / 11)
    assert row.phases == {"experts": pytest.approx(70 / 6), "wire": pytest.approx(70 / 6)}
    assert row.balanced == {"experts": pytest.approx(6), "wire": pytest.approx(5)}
    assert row.balanced_forward_ms == pytest.approx(11)


def test_bytes_of_copies_count_with_their_phase_and_excess_sums_to_the_ratio() -> None:
    sent = {"dispatch": 3000, "replicas": 600}
    calls = [call(system="lrmoe", phase_ms={"experts": 8.0, "replicas": 2.0}, phase_bytes=sent)]
    (row,) = rows_of([outcome("lrmoe", 10)], [*calls, balanced(), balanced("lrmoe")])
    assert row.phases == {
        "experts": pytest.approx(8),
        "replicas": pytest.approx(3),
        "wire": pytest.approx(5),
    }
    assert sum(row.phases.values()) / sum(row.balanced.values()) == pytest.approx(row.over_balanced)


def test_the_least_time_is_that_of_a_balanced_call_whose_backward_runs_kept_pairs_alone() -> None:
    exact = {"plan": 1.0, "experts": 3.0, "experts_backward": 6.0}
    reference = call(system="balanced:megatron", phase_ms=exact, phase_bytes={})
    calls = [
        replace(made("symi", 20, 10, 0), kept=100),
        made("lrmoe", 12, 10, 0),
        reference,
        balanced("lrmoe"),
    ]
    rows = rows_of([outcome("symi", 100), outcome("lrmoe", 110)], calls)
    assert rows[0].least_over_symi is None
    assert rows[1].kept_share == 0.5
    spent = sum(rows[0].phases.values()) * 100
    assert rows[1].least_over_symi == pytest.approx((4 + 0.5 * 6) * 110 / spent)


def test_settings_of_activations_are_compared_within_themselves() -> None:
    calls = [made("symi", 10, 10, 0), made("lrmoe", 5, 10, 0), balanced(), balanced("lrmoe")]
    calls += [replace(c, activations=STASH) for c in calls]
    calls[5] = replace(calls[5], phase_ms={"experts": 5.5})
    rows = rows_of([outcome("symi", 100), outcome("lrmoe", 100)], calls)
    assert [(row.system, row.activations) for row in rows] == [
        ("symi", MAIN), ("lrmoe", MAIN), ("symi", STASH), ("lrmoe", STASH),
    ]  # fmt: skip
    found = {f["name"]: f for f in figures(rows, "memorise")}
    name = "headline.tiny.memorise.0.lrmoe"
    assert found[f"{name}.time_to_loss_over_symi"]["value"] == pytest.approx(0.5)
    assert found[f"{name}.stash.time_to_loss_over_symi"]["value"] == pytest.approx(0.8)
    assert found[f"{name}.stash.time_to_loss_over_symi"]["context"]["activations"] == STASH
    assert f"{name}.stash.dloss" not in found


def test_ratios_are_of_one_seed_and_their_error_is_over_seeds() -> None:
    outcomes, calls = [], []
    for seed, (fixed, ours) in enumerate(((100, 50), (200, 80))):
        outcomes += [outcome("symi", 100, seed), outcome("lrmoe", 110, seed, loss=0.06)]
        calls += [made("symi", fixed, 10, 0, seed), made("lrmoe", ours, 10, 0, seed)]
        calls += [balanced(seed=seed), balanced("lrmoe", seed=seed)]
    found = {f["name"]: f for f in figures(rows_of(outcomes, calls), "memorise", command="make headline")}
    ratio = found["headline.tiny.memorise.0.lrmoe.time_to_loss_over_symi"]
    assert ratio["value"] == pytest.approx((0.55 + 0.44) / 2)
    assert ratio["context"]["by_seed"] == {"0": pytest.approx(0.55), "1": pytest.approx(0.44)}
    assert ratio["context"]["standard_error"] == pytest.approx(0.055)
    assert ratio["context"]["command"] == "make headline"
    assert found["headline.tiny.memorise.0.lrmoe.dloss"]["value"] == pytest.approx(0.01)
    assert found["headline.tiny.memorise.0.lrmoe.steps"]["value"] == 110
    assert "headline.tiny.memorise.0.symi.time_to_loss_over_symi" not in found
    assert "headline.tiny.memorise.0.lrmoe.time_to_loss_over_ultraep" not in found


def test_a_target_that_was_not_reached_gives_no_ratio_but_is_counted() -> None:
    outcomes = [outcome("symi", 100), outcome("lrmoe", None)]
    calls = [made("symi", 10, 10, 0), made("lrmoe", 5, 10, 0), balanced(), balanced("lrmoe")]
    rows = rows_of(outcomes, calls)
    assert rows[1].time_to_loss_s is None
    assert rows[1].over == {}
    found = {f["name"].rpartition(".")[2]: f for f in figures(rows, "memorise") if ".lrmoe." in f["name"]}
    assert set(found) == {"layer_time_over_balanced", "dloss"}
    assert rows[1].least_over_symi is None


def test_outcomes_that_were_not_executed_have_no_row() -> None:
    assert rows_of([outcome("symi", 10), outcome("eplb", 10)], [made("symi", 1, 10, 0), balanced()])[0].system
    assert len(rows_of([outcome("eplb", 10)], [balanced()])) == 0


def test_one_seed_has_no_standard_error() -> None:
    rows = rows_of([outcome("symi", 10)], [made("symi", 1, 10, 0), balanced()])
    found = figures(rows, "scratch")
    assert found
    assert all(line["context"]["standard_error"] is None for line in found)
