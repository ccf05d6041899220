"""docs/benchmarks.md is made of committed figures, and is current."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import gen_benchmarks
import results_plot
from gen_benchmarks import Claim, Section

CONTEXT = {"hardware": {"cores": 2, "cpu": "a CPU"}, "versions": {"torch": "2"}, "date": "2026-01-01"}


def row(name: str, value: float | None, unit: str = "ratio", **context: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "context": {**CONTEXT, **context}}


def section(*claims: Claim) -> Section:
    return Section(title="T", about="About.", command="make it", file="x.jsonl", claims=claims)


def page(claim: Claim, *rows: dict[str, Any]) -> str:
    return gen_benchmarks.page([section(claim)], {"x.jsonl": rows})


def test_the_committed_page_and_plot_are_current() -> None:
    results = gen_benchmarks.read()
    assert gen_benchmarks.PAGE.read_text(encoding="utf-8") == gen_benchmarks.page(
        gen_benchmarks.sections(), results
    ), "run `make docs`"
    plot = gen_benchmarks.plot(results[gen_benchmarks.SCALING])
    assert gen_benchmarks.PLOT.read_text(encoding="utf-8") == plot, "run `make docs`"


def test_every_script_with_a_committed_result_is_on_the_page() -> None:
    files = {path.name for path in gen_benchmarks.RESULTS.glob("*.jsonl")}
    beside = {
        "headline-quick.jsonl",
        "replay_stash.jsonl",
    }  # the small run, and the second mode, of another one
    assert {one.file for one in gen_benchmarks.sections()} >= files - beside
    listed = (gen_benchmarks.RESULTS / "README.md").read_text(encoding="utf-8").replace("**", "")
    for one in gen_benchmarks.sections():
        assert f"| `{one.file}` | `{one.command}`" in listed


def test_a_claim_shows_its_figures_mark_and_verdict() -> None:
    rows = [row("a.x", 0.5), row("a.y", 0.9, standard_error=0.01), row("b.z", 7), row("a.none", None)]
    text = page(Claim(text="says", figures=r"a\.\w+", mark=0.8), *rows)
    assert (
        "`make it`; [`x.jsonl`](../benchmarks/results/x.jsonl); 2 cores of a CPU, torch 2; 2026-01-01."
        in text
    )
    assert "| says | `a.x` | 0.5 | <= 0.8 | kept |" in text
    assert "|  | `a.y` | 0.9 +- 0.01 | <= 0.8 | missed |" in text
    assert "b.z" not in text
    assert "a.none" not in text
    assert "made by" not in page(Claim(text="says", figures="b"), row("b", 1, command="it"))
    other = page(Claim(text="says", figures="b"), row("b", 10000, command="it --so"))
    assert "made by `it --so`" in other
    assert "| `b` | 10,000 |" in other
    higher = page(Claim(text="says", figures="b.z", mark=8, lower=False), *rows)
    assert "| says | `b.z` | 7 | >= 8 | missed |" in higher


def test_many_figures_are_a_range_that_is_kept_by_all_or_not() -> None:
    rows = [row(f"a.n{n}", n / 10, "ms") for n in range(1, 21)]
    text = page(Claim(text="says", figures=r"a\..+", mark=1.9), *rows)
    assert "| says | `a.n1 and 19 more` | 0.1 to 2 | <= 1.9 | missed |" in text


def test_a_claim_without_figures_says_so() -> None:
    claim = Claim(text="says", figures="nothing", mark=1)
    assert "| says | - | none committed | <= 1 | |" in page(claim, row("a", 1))
    assert "`make it`; none committed." in page(claim)


def test_lines_lie_on_logarithmic_axes() -> None:
    drawn = results_plot.lines("growth", {"linear": [(1, 1), (4, 4)], "flat": [(1, 1), (4, 1)]})
    root = ElementTree.fromstring(drawn)
    assert root.attrib["aria-label"] == "growth"
    space = "{http://www.w3.org/2000/svg}"
    linear, flat = (
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in root.iter(f"{space}polyline")
    )
    dashed = root.find(f"{space}line")
    assert dashed is not None
    assert linear == [tuple(float(dashed.attrib[f"{axis}{end}"]) for axis in "xy") for end in (1, 2)]
    assert flat[0] == linear[0]
    assert flat[1] == (linear[1][0], linear[0][1])
