"""Two runs on one page: one table with both columns and the ratio, shared axes, and only fair ratios."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lrmoe.errors import ConfigError
from lrmoe.report import html, pair, sections, simulation_pair
from lrmoe.report.data import Run
from lrmoe.report.load import load_run
from lrmoe.simulate.run import Settings, run
from tests.report.synthetic import LINK, compare_run, train_run
from tests.report.test_html import COMPARED


def _trained(tmp_path: Path) -> tuple[Run, Run]:
    slow = train_run(tmp_path / "exact", kept=1.0, every=10)
    fast = train_run(tmp_path / "pruned", steps=24, rate=0.12, every=8)
    (fast / "config.toml").write_text("[lrmoe]\nmax_drop = 0.3\nseed = 1\n\n[train]\nname = 'pruned'\n")
    return load_run(slow), load_run(fast)


def _compared(folder: Path, link: float) -> Run:
    """A comparison recorded over another link."""
    compare_run(folder)
    summary = json.loads((folder / "summary.json").read_text())
    summary["link_bytes_per_s"] = link
    for entry in summary["systems"].values():
        entry["call_ms"]["wire"] *= LINK / link
    (folder / "summary.json").write_text(json.dumps(summary))
    return load_run(folder)


def test_one_table_has_both_columns_and_the_ratio(tmp_path: Path) -> None:
    both = pair.pair(*_trained(tmp_path))
    (table,) = pair.headlines(both)
    assert table.columns == ("", "exact", "pruned", "second / first")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["steps"] == ("30", "24", "0.800")
    assert rows["MoE-layer time, wall"] == ("3.000 s", "2.400 s", "0.800")
    assert rows["pairs kept in backward"] == ("100.0%", "70.0%", "0.700")
    assert rows["steps skipped, gradient not finite"] == ("0", "0", "-"), "nothing over nothing is no ratio"


def test_both_runs_share_every_plot(tmp_path: Path) -> None:
    page = html.render(_trained(tmp_path))
    body = page.split("<script")[0]
    assert body.count("<h1") == 1, "one page, not two stacked ones"
    drawn = json.loads(re.findall(r'<script type="application/json" id="plots">(.*?)</script>', page)[0])
    assert set(drawn) == {f"pair-{name}" for name in (*COMPARED, "peaks") if name != "load"}
    for name in ("loss-time", "loss-steps", "kept"):
        traces = drawn[f"pair-{name}"]["data"]
        assert {"exact", "pruned"} <= {trace["name"] for trace in traces}
        assert len({trace["line"]["color"] for trace in traces if "line" in trace}) == 2
        assert not any("xaxis" in trace or "yaxis" in trace for trace in traces), "one pair of axes"
    peaks = [trace["name"] for trace in drawn["pair-peaks"]["data"]]
    assert sorted(peaks) == ["exact, backward", "exact, forward", "pruned, backward", "pruned, forward"]


def test_settings_that_differ_are_listed_and_only_those(tmp_path: Path) -> None:
    assert pair.differences(pair.pair(*_trained(tmp_path))).rows == [("lrmoe.seed", "-", "1")]


def test_comparisons_meet_system_by_system(tmp_path: Path) -> None:
    both = pair.pair(_compared(tmp_path / "a", LINK), _compared(tmp_path / "b", LINK))
    tables = pair.headlines(both)
    assert [table.columns[1:3] for table in tables] == [
        ("a: lrmoe", "b: lrmoe"),
        ("a: megatron", "b: megatron"),
    ]
    rows = {row[0]: row[3] for row in tables[0].rows}
    assert rows["MoE-layer time, critical path (modelled link)"] == "1.000"
    assert "Both reached loss 2.3" in pair.verdict(both)
    plots = {plot.name: plot for plot in sections.plots(both.both)}
    assert set(plots) == {*COMPARED, "peaks"} - {"load"}
    shown = [trace["name"] for trace in plots["peaks"].traces]
    assert shown == [f"{system.name}, backward" for system in both.both.systems], "eight lines are too many"


def test_critical_paths_are_put_on_one_link_before_they_are_compared(tmp_path: Path) -> None:
    first, second = _compared(tmp_path / "a", LINK), _compared(tmp_path / "b", LINK / 4)
    assert first.systems[1].series.critical_s[-1] < second.systems[1].series.critical_s[-1]
    both = pair.pair(first, second)
    left, right = both.matched[0]
    assert right.series.critical_s == pytest.approx(left.series.critical_s)
    assert right.number("moe_time_critical_s") == pytest.approx(left.number("moe_time_critical_s"))
    assert right.phase_ms["wire"] == pytest.approx(left.phase_ms["wire"])
    assert "the second was recorded with" in pair.method(both)


def test_a_training_run_meets_what_a_comparison_is_about_without_modelled_times(tmp_path: Path) -> None:
    both = pair.pair(load_run(train_run(tmp_path / "mine")), _compared(tmp_path / "demo", LINK))
    (table,) = pair.headlines(both)
    assert table.columns[1:3] == ("mine", "demo: lrmoe")
    assert not any("critical" in row[0] for row in table.rows)
    assert "wire" not in both.matched[0][1].phase_ms
    assert "They did not stop at the same loss" in pair.verdict(both)
    html.render([both.runs[0], both.runs[1]])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    loaded = load_run(train_run(tmp_path / "mine"))
    (table,) = pair.headlines(pair.pair(loaded, loaded))
    assert table.columns[1:3] == ("mine (first)", "mine (second)")


@pytest.fixture(scope="module")
def simulated() -> dict[str, Any]:
    return run(Settings(systems=("megatron", "lrmoe"), ranks=(4,), experts=(16,), tokens=128, top_k=2))


def _simulation(folder: Path, summary: dict[str, Any]) -> Run:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({**summary, "context": {}}))
    return load_run(folder)


def test_simulations_stand_side_by_side(simulated: dict[str, Any], tmp_path: Path) -> None:
    changed = json.loads(json.dumps(simulated))
    changed["scenarios"][0]["systems"]["lrmoe"]["backward_peak"] *= 2
    changed["settings"]["slots"] = 7
    left, right = _simulation(tmp_path / "a", simulated), _simulation(tmp_path / "b", changed)
    peaks, _, settings = simulation_pair.tables(left, right, ("a", "b"))
    assert [(row[0], row[3]) for row in peaks.rows] == [("megatron", "1.000"), ("lrmoe", "2.000")]
    assert [(row[0], row[2]) for row in settings.rows] == [("slots", "7")]
    body = html.render([left, right]).split("<script")[0]
    assert body.count("<h1") == body.count("<figure") == 1


def test_what_cannot_stand_side_by_side_is_refused(simulated: dict[str, Any], tmp_path: Path) -> None:
    planned, trained = _simulation(tmp_path / "sim", simulated), load_run(train_run(tmp_path / "mine"))
    with pytest.raises(ConfigError, match="'sim' is of `simulate` and 'mine' of `train`"):
        html.render([planned, trained])
    other = json.loads(json.dumps(simulated))
    other["scenarios"][0]["ranks"] = 8
    with pytest.raises(ConfigError, match="no cluster in which both planned"):
        html.render([planned, _simulation(tmp_path / "other", other)])
