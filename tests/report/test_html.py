"""The page: self-contained, complete, and safe to open whatever a run is called."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lrmoe.errors import ConfigError
from lrmoe.report import html, tables, words
from lrmoe.report.bars import phases
from lrmoe.report.commands import report
from lrmoe.report.data import Run
from lrmoe.report.load import load_run
from lrmoe.report.numbers import even, seconds, size
from lrmoe.report.sections import plots
from tests.report.synthetic import LINK, compare_run, train_run

HOSTILE = '<img src=x onerror=alert(1)></script><a href="https://evil.example/">'
COMPARED = ("loss-time", "loss-steps", "load", "heat", "phases", "memory", "kept", "energy", "variance")


def marks(trace: dict[str, Any]) -> int:
    """Points, bars or squares of a trace that have a value."""
    if trace["type"] == "heatmap":
        return sum(value is not None for row in trace["z"] for value in row)
    measured = trace["x"] if trace.get("orientation") == "h" else trace["y"]
    assert trace["type"] == "bar" or len(trace["x"]) == len(trace["y"])
    return sum(value is not None for value in measured)


class Elements(HTMLParser):
    """Tags with their attributes, and the text of script elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "script":
            self.scripts[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page(compared: Run) -> Elements:
    return Elements(html.render([compared]))


def test_nothing_is_loaded_from_outside(page: Elements) -> None:
    for tag, attributes in page.found:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_every_plot_has_data_a_name_and_its_numbers(page: Elements, compared: Run) -> None:
    drawn = json.loads(page.scripts[0])
    shown = {a["id"]: a for a in page.all("div") if a.get("class") == "plot"}
    assert set(drawn) == set(shown)
    assert len(drawn) == len(plots(compared)) == len(COMPARED)
    for name, plot in drawn.items():
        assert shown[name]["role"] == "img"
        assert re.search(r"\d", shown[name]["aria-label"] or ""), "the accessible name tells the numbers"
        assert all(marks(trace) > 0 for trace in plot["data"])
    assert len(page.all("figure")) == len(page.all("figcaption")) == len(COMPARED)
    assert all(plot.table.rows for plot in plots(compared))


def test_the_sentence_and_the_tiles_say_the_ratio(compared: Run) -> None:
    base, ours = (system.number("moe_time_critical_s") for system in compared.systems)
    assert base is not None
    assert ours is not None
    wall, our_wall = (system.number("moe_time_wall_s") for system in compared.systems)
    assert wall is not None
    assert our_wall is not None
    text = words.verdict(compared)
    assert f"lrmoe needed {even(ours / base)} of megatron's time (critical path, modelled link; wall" in text
    assert f"wall {even(our_wall / wall)})" in text
    assert words.tiles(compared)[0][1] == f"{ours / base:.2f}"


def test_times_say_what_is_modelled_and_over_which_link(compared: Run) -> None:
    speed = f"modelled link of {size(LINK)}/s"
    assert speed in tables.headline(compared).note, "the note goes to the terminal and to the page"
    chart = phases(compared)
    assert chart is not None
    assert speed in chart.caption
    assert all(f"{s.name} {seconds(s.number('moe_time_wall_s'))}" in chart.caption for s in compared.systems)
    assert "bytes on the link (modelled)" in [trace["name"] for trace in chart.traces]
    assert any("modelled" in row[0] for row in tables.headline(compared).rows)


def test_notes_in_a_terminal_start_at_the_left(compared: Run) -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(tables.headline(compared).rich())
    lines = console.export_text().splitlines()
    end = next(i for i, text in enumerate(lines) if text.startswith("\u2514"))
    assert lines[end + 1].startswith("In brackets: against megatron.")
    assert not any(text.startswith(" ") for text in lines[end + 1 :])


def test_without_a_link_only_wall_time_is_compared(tmp_path: Path) -> None:
    folder = compare_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    summary["link_bytes_per_s"] = None
    for entry in summary["systems"].values():
        entry["moe_time_critical_s"] = None
        del entry["call_ms"]["wire"]
    (folder / "summary.json").write_text(json.dumps(summary))
    run = load_run(folder)
    assert "of megatron's time (wall)" in words.verdict(run)
    assert "there is no critical path" in tables.headline(run).note
    chart = phases(run)
    assert chart is not None
    assert not any("modelled" in str(trace["name"]) for trace in chart.traces)


def test_an_unreached_target_claims_no_ratio(tmp_path: Path) -> None:
    run = load_run(compare_run(tmp_path / "run", reached=False))
    assert "was not reached by megatron, lrmoe" in words.verdict(run)
    assert words.tiles(run) == []
    assert "%)" not in html.render([run]).split("</style>")[1].split("<script")[0]


def without_target(folder: Path, systems: tuple[str, ...], reached: bool = True) -> Run:
    """A comparison that ended after its steps."""
    path = compare_run(folder, systems, reached) / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({**summary, "target_loss": None, "common_loss": 2.5}))
    return load_run(folder)


def test_many_systems_are_rows_and_their_curves_differ(tmp_path: Path) -> None:
    names = ("megatron", *(f"system{i}" for i in range(9)))
    run = without_target(tmp_path / "many", names)
    headline, fairness = tables.headline(run), tables.fairness(run)
    assert headline.title == "Training for 60 steps"
    assert [row[0] for row in headline.rows] == [row[0] for row in fairness.rows] == list(names)
    assert "The loss that all reached: 2.5, smoothed." in headline.note
    assert "The same for all: replica slots: 0; estimator: sampled, score lrm." in fairness.note
    (curves,) = [plot for plot in plots(run) if plot.name == "loss-steps"]
    drawn = [
        trace["line"]
        for trace in curves.traces
        if trace.get("mode") == "lines" and trace["line"]["width"] > 2
    ]
    assert len({(line["color"], line["dash"]) for line in drawn}) == len(names)
    assert words.verdict(run).startswith(
        "Every system did 60 steps. MoE-layer time for them, the shortest: system"
    )
    assert words.verdict(run).count("wall") == words.MOST_NAMED


def test_a_comparison_of_steps_names_what_did_not_finish(tmp_path: Path) -> None:
    run = without_target(tmp_path / "lost", ("megatron", "lrmoe"), reached=False)
    assert words.verdict(run) == "megatron, lrmoe did not do all 60 steps with a finite loss."


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    run = load_run(compare_run(tmp_path / "run", ("megatron", HOSTILE)))
    elements = Elements(html.render([run]))
    assert not elements.all("img")
    assert all(str(link["href"]).startswith("#run0-") for link in elements.all("a"))
    assert len(elements.all("script")) == 3
    drawn = elements.scripts[0]
    assert "<" not in drawn
    labels = [
        trace["name"] for plot in json.loads(drawn).values() for trace in plot["data"] if "name" in trace
    ]
    assert not any("<" in label for label in labels), "Plotly reads HTML in labels"


def test_numbers_that_are_not_finite_become_gaps(tmp_path: Path) -> None:
    assert html._script_json({"y": [1.0, float("nan"), float("inf")]}) == '{"y":[1.0,null,null]}'


def test_training_run(tmp_path: Path) -> None:
    elements = Elements(html.render([load_run(train_run(tmp_path / "mine"))]))
    assert set(json.loads(elements.scripts[0])) == {f"run0-{name}" for name in (*COMPARED, "peaks")}


def test_figures_of_a_training_run_are_words_with_units(tmp_path: Path) -> None:
    run = load_run(train_run(tmp_path / "mine", every=10))
    rows = {row[0]: row[1] for row in tables.headline(run).rows}
    assert rows["MoE-layer time, wall"] == "3.000 s"
    assert rows["bytes on the wire"] == "3 MiB"
    assert rows["pairs kept in backward"] == "70.0%"
    assert rows["last loss on held-out text"] == "2.500"
    assert not any("_" in title or title in run.summary for title in rows if title != "steps")
    raw = {row[0]: row[1] for row in tables.train_summary(run).rows}
    assert raw["wire_bytes"] == str(3 * 2**20), "the page still holds the figures under their own names"


def test_the_whole_loss_curve_is_in_view_and_peaks_are_steps(tmp_path: Path) -> None:
    found = {plot.name: plot for plot in plots(load_run(train_run(tmp_path / "mine")))}
    for name in ("loss-time", "loss-steps"):
        assert "range" not in found[name].layout["yaxis"], "a range would cut off the first steps"
        raw = found[name].traces[0]
        assert raw["y"][0] == pytest.approx(4.9)
        assert raw["opacity"] * raw["line"]["width"] > 0.6, (
            "every step stays visible beside the smoothed line"
        )
    assert {trace["line"]["shape"] for trace in found["peaks"].traces} == {"hv"}
    assert "range" in plots(load_run(compare_run(tmp_path / "two")))[0].layout["yaxis"]


def test_losses_on_held_out_text_are_drawn_where_they_were_measured(tmp_path: Path) -> None:
    found = {plot.name: plot for plot in plots(load_run(train_run(tmp_path / "mine", every=8)))}
    drawn = [trace for trace in found["loss-steps"].traces if "held-out" in trace["name"]]
    assert [(trace["x"], trace["y"]) for trace in drawn] == [([8, 16, 24], pytest.approx([4.7, 3.9, 3.1]))]
    assert "held-out" in found["loss-steps"].caption
    assert [row[4] for row in found["loss-steps"].table.rows if row[1] == "16"] == ["3.9"]
    plain = {plot.name: plot for plot in plots(load_run(train_run(tmp_path / "plain")))}
    assert "held-out" not in plain["loss-steps"].caption


def test_report_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs=[folder]) == 0
    assert (folder / "report.html").stat().st_size > 1_000_000
    assert report(runs=[folder, folder], out=tmp_path / "two.html") == 0
    assert (tmp_path / "two.html").is_file()
    assert "two.html" in capsys.readouterr().out


@pytest.mark.parametrize("count", [0, 3])
def test_report_takes_one_or_two_runs(folder: Path, count: int) -> None:
    with pytest.raises(ConfigError, match=f"runs: {count} given"):
        report(runs=[folder] * count)


def test_unwritable_page_is_an_error_that_names_it(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out=.*cannot be written"):
        report(runs=[folder], out=tmp_path / "no" / "such.html")
