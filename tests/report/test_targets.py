"""One comparison with several target losses, and the system that ratios are taken to."""

from __future__ import annotations

from typing import Any

from lrmoe.experiments.compare.figures import figures
from lrmoe.report import tables
from lrmoe.report.data import Run, SystemRun
from lrmoe.report.targets import targets

_NAMES = ("steps", "critical_s", "wall_s", "wire_bytes", "buffer_peak_bytes", "kept_share")


def entry(*times: float | None) -> dict[str, Any]:
    """A system's entry of summary.json, with a time for each target; None was not reached."""
    found: list[dict[str, Any]] = []
    for target, time in zip((2.0, 1.0), times, strict=True):
        values = dict.fromkeys((*_NAMES, "dropped_energy", "added_variance"), time)
        found.append({"target": target, "reached": time is not None, **values})
    reached = times[-1] is not None
    return {"reached": reached, "steps": 9, "moe_time_critical_s": times[-1] or 9.0, "to_target": found}


def run(against: str | None) -> Run:
    systems = {"megatron": entry(4.0, 8.0), "symi": entry(2.0, 4.0), "lrmoe": entry(1.0, None)}
    summary: dict[str, Any] = {
        "targets": [2.0, 1.0],
        "target_loss": 1.0,
        "against": against,
        "systems": systems,
        "seed": 0,
        "preset": "demo",
        "link_bytes_per_s": 1e6,
        "context": {},
    }
    shown = tuple(SystemRun(name=name, key=name, figures=figures) for name, figures in systems.items())
    return Run(name="run", kind="compare", summary=summary, config={}, systems=shown)


def test_every_system_has_a_row_for_each_loss() -> None:
    table = targets(run("symi"))
    assert [row[:3] for row in table.rows] == [
        ("megatron", "2", "4"),
        ("megatron", "1", "8"),
        ("symi", "2", "2"),
        ("symi", "1", "4"),
        ("lrmoe", "2", "1"),
        ("lrmoe", "1", "not reached"),
    ]
    assert table.rows[4][3] == "1.000 s (-50.0%)"
    assert table.rows[2][3] == "2.000 s"
    assert "against symi" in table.note


def test_ratios_are_to_the_system_that_was_asked_for() -> None:
    values = {item["name"]: item["value"] for item in figures(run("symi").summary)}
    assert values["compare.lrmoe.target2.time_to_loss_over_symi"] == 0.5
    assert values["compare.megatron.target1.time_to_loss_over_symi"] == 2
    assert values["compare.megatron.time_critical_over_symi"] == 2
    assert values["compare.lrmoe.target1.reached"] == 0
    assert "compare.lrmoe.target1.time_to_loss" not in values
    assert not any(name.endswith("over_megatron") for name in values)
    assert "In brackets: against symi." in tables.headline(run("symi")).note


def test_they_are_to_fixed_ownership_where_nothing_was_asked_for() -> None:
    values = {item["name"]: item["value"] for item in figures(run(None).summary)}
    assert values["compare.symi.target2.time_to_loss_over_megatron"] == 0.5
    assert "In brackets: against megatron." in tables.headline(run(None)).note
