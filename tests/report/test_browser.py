"""Pages in headless Chromium: drawn without complaint or request; keys, a phone, the dark, paper."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lrmoe.report import html
from lrmoe.report.load import load_run
from lrmoe.simulate.run import Settings, run
from tests.experiments.test_ablate import GOOD
from tests.experiments.test_ablate import summary as ablate_summary
from tests.report.browser import EXECUTABLE, Browser
from tests.report.synthetic import (
    STEPS,
    compare_run,
    headline_lines,
    plan_csv,
    plan_lines,
    replay_run,
    train_run,
)
from tests.report.test_matrix import SYSTEMS, row
from tests.report.test_matrix import summary as matrix_summary

pytestmark = [
    pytest.mark.skipif(
        EXECUTABLE is None, reason="needs a browser: no chromium, chromium-browser or google-chrome"
    ),
    pytest.mark.slow,
]
KINDS = (
    "compare", "train", "simulate", "replay", "plan", "sweep", "headline", "matrix", "ablate", "pair", "replays",
    "grids",
)  # fmt: skip
CASES = [
    row(model, seed, system, target)
    for model in ("qwen", "glm")
    for seed in (0, 1)
    for system in SYSTEMS
    for target in (0.1, 0.05)
]
MATRIX = [row("qwen", seed, system, 0.1) for seed in (0, 1) for system in SYSTEMS]
# Per plot: its traces, and the marks that Plotly made of them.
DRAWN = """[...document.querySelectorAll(".plot")].map((plot) => [
    plot.id, plot.data.length,
    plot.querySelectorAll(".js-line, .point path, .scatterlayer .points path, .heatmaplayer image").length])"""
OPEN = "document.querySelectorAll('details.run, details.folded').forEach((part) => { part.open = true; })"
ALL_DRAWN = "[...document.querySelectorAll('.plot')].every((plot) => plot.data)"
# Tables that are wider than their container although cells may wrap on paper; words of numbers' tables on two lines;
# tables whose first column scrolls away.
CUT = """[...document.querySelectorAll('.scroll')].filter((part) => part.scrollWidth > part.clientWidth + 1)
    .filter((part) => Boolean(part.closest('.broad')) === BROAD).map((part) => part.ariaLabel)"""
BROKEN = """[...document.querySelectorAll('table.wide:not(.text) :is(th, td)')].flatMap((cell) => {
    const found = [], texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), range = document.createRange();
    while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/[^\\s]+/g)) {
        range.setStart(texts.currentNode, word.index);
        range.setEnd(texts.currentNode, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) found.push(word[0]);
    }
    for (const whole of cell.querySelectorAll('.whole'))
        if (whole.getClientRects().length > 1) found.push(whole.textContent);
    return found;
})"""
UPRIGHT, ACROSS = 680, 960  # pixels that fit a page of paper
MOVED = """[...document.querySelectorAll('.scroll')].filter((part) => part.clientWidth).map((part) => {
    part.scrollLeft = 1e6;
    const first = part.querySelector('tbody th'), scrolled = part.scrollLeft > 1;
    const at = first.getBoundingClientRect(), edge = part.getBoundingClientRect();
    part.scrollLeft = 0;
    return [part.ariaLabel, scrolled, Math.abs(at.left - edge.left), at.width / edge.width];
}).filter(([, scrolled]) => scrolled)"""
WIDTHS = "[...document.querySelectorAll('.plot .main-svg')].map((svg) => svg.clientWidth)"
SMALL = """[...document.querySelectorAll("p, td, th, figcaption, summary")]
    .filter((element) => parseFloat(getComputedStyle(element).fontSize) < 12).length"""
CHOSEN = "document.querySelector('form.controls').elements"
BARS = """[...document.querySelectorAll("#run0-heat .barlayer .point path")]
    .map((bar) => bar.getAttribute("d")).join()"""
SQUARES = """document.querySelector("#run0-heat .heatmaplayer image").href.baseVal"""
SAID = "document.querySelector('form.controls output').textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind."""
    root = tmp_path_factory.mktemp("pages")
    summary = run(Settings(systems=("megatron", "lrmoe"), ranks=(4, 8), experts=(16,), tokens=128, top_k=2))
    _summary(root / "sim", {**summary, "context": {"command": "test"}})
    names = ("megatron", "symi", "lrmoe", "lrmoe-sampled50", "some/my_file.py:MyPolicy")
    runs: dict[str, list[Path]] = {
        "compare": [compare_run(root / "compared", names)],
        "train": [train_run(root / "trained", every=10, check=5)],
        "simulate": [root / "sim"],
        "replay": [replay_run(root / "call")],
        "plan": [plan_lines(root / "plan.jsonl")],
        "sweep": [plan_csv(root / "plan" / "capacity.csv")],
        "headline": [headline_lines(root / "headline")],
        "matrix": [_summary(root / "cells", matrix_summary(MATRIX))],
        "ablate": [_summary(root / "rules", ablate_summary({None: [0.1, 0.5], GOOD: [0.11, 0.53]}))],
        "pair": [compare_run(root / "one"), compare_run(root / "two")],
        "grids": [_summary(root / f"grid{i}", matrix_summary(CASES)) for i in range(2)],
        "replays": [replay_run(root / "first"), replay_run(root / "second")],
    }
    return {
        kind: html.write([load_run(path) for path in paths], root / f"{kind}.html")
        for kind, paths in runs.items()
    }


def _summary(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_plot_is_drawn_without_complaint_or_request_and_fits_a_phone(
    browser: Browser, pages: dict[str, Path], kind: str
) -> None:
    browser.media()
    browser.open(pages[kind])
    browser.run(OPEN)
    browser.wait(ALL_DRAWN)
    found: list[tuple[str, int, int]] = browser.run(DRAWN)
    assert found, "a page without plots"
    for name, traces, marks in found:
        assert marks >= traces > 0, f"{name}: {marks} marks of {traces} traces"
    assert browser.complaints() == []
    asked = [url for url in browser.requests() if not url.startswith("data:")]
    assert asked == [pages[kind].as_uri()]
    assert browser.run("document.documentElement.scrollWidth") <= 1280
    browser.resize(width=320, height=640, phone=True)
    browser.wait(f"{WIDTHS}.every((width) => width <= 320)")
    assert browser.run("document.documentElement.scrollWidth") == 320, "a phone scrolls down only"
    assert min(browser.run(WIDTHS)) > 200
    assert browser.run(SMALL) == 0, "text below 12 pixels"
    assert all(marks >= traces > 0 for _, traces, marks in browser.run(DRAWN))
    if kind == "pair":
        few = "[...document.querySelectorAll('table.few')]"
        assert browser.run(f"{few}.every((t) => t.clientWidth <= t.parentElement.clientWidth + 1)"), (
            "the last column would need sideways scrolling"
        )
    assert browser.complaints() == []


def test_what_is_closed_is_drawn_once_it_is_opened(browser: Browser, pages: dict[str, Path]) -> None:
    browser.media()
    browser.open(pages["grids"])
    inside = "document.querySelectorAll('details.run')[1].querySelector('.plot')"
    assert not browser.run(f"Boolean({inside}.data)"), "closed at first"
    tall = browser.run("document.documentElement.scrollHeight")
    assert tall < 1500, "what both reached is on the first screens"
    left, right = browser.run(
        "[...document.querySelectorAll('.beside table')].map((table) => table.getBoundingClientRect())"
        ".map((edges) => [edges.left, edges.top])"
    )
    assert left[1] == right[1]
    assert left[0] < right[0]
    browser.run("document.querySelectorAll('details.run')[1].open = true")
    browser.wait(f"{inside}.data")
    assert browser.run(f"{inside}.querySelector('.main-svg').clientWidth") > 600


@pytest.mark.parametrize("width", [1280, 390])
def test_a_wide_table_scrolls_beside_its_first_column(
    browser: Browser, pages: dict[str, Path], width: int
) -> None:
    browser.media()
    browser.open(pages["grids"], width=width, height=900, phone=width < 500)
    browser.run(OPEN)
    found: list[tuple[str, bool, float, float]] = browser.run(MOVED)
    assert any("loss 0.1" in name for name, *_ in found), "a case's table does not fit"
    for name, _, away, share in found:
        assert away < 2, f"{name}: the first column scrolled away"
        assert share < 0.5, f"{name}: the first column leaves no room"
    assert browser.run("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("kind", KINDS)
def test_paper_cuts_no_table_off(browser: Browser, pages: dict[str, Path], kind: str) -> None:
    browser.media(kind="print")
    browser.open(pages[kind], width=UPRIGHT)
    browser.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    browser.wait(ALL_DRAWN)
    assert browser.run(CUT.replace("BROAD", "false")) == []
    assert browser.run(BROKEN) == []
    browser.resize(width=ACROSS, height=900)
    assert browser.run(CUT.replace("BROAD", "true")) == []


def test_a_broad_table_of_numbers_lies_across_the_paper(browser: Browser, pages: dict[str, Path]) -> None:
    browser.media()
    browser.open(pages["matrix"])
    columns = "[...document.querySelectorAll('.broad table')].map((table) => table.rows[0].cells.length)"
    assert max(browser.run(columns)) == 13
    printed = browser.call("Page.printToPDF", preferCSSPageSize=True)
    sizes = re.findall(rb"/MediaBox ?\[0 0 (\d+) (\d+)\]", base64.b64decode(printed["data"]))
    across = [int(width) > int(height) for width, height in sizes]
    assert True in across, "the broad table's page"
    assert False in across, "other pages stay upright"


def test_rules_keep_their_order_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    ticks = "[...document.querySelectorAll('#run0-ablate-memorise .ytick text')].map((t) => t.textContent)"
    browser.media()
    browser.open(pages["ablate"])
    wide = browser.run(ticks)
    browser.open(pages["ablate"], width=390, height=900, phone=True)
    assert [text.replace(" ", "") for text in browser.run(ticks)] == [text.replace(" ", "") for text in wide]


def test_words_of_a_wide_table_become_cards_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    browser.media()
    browser.open(pages["simulate"], width=360, height=700, phone=True)
    cell = "document.querySelector('table.many.text td')"
    assert browser.run(f"getComputedStyle({cell}).display") == "grid"
    assert browser.run(f"getComputedStyle({cell}, '::before').content") == '"title"'
    table = "document.querySelector('table.many.text')"
    assert browser.run(f"{table}.scrollWidth <= {table}.parentElement.clientWidth")


def test_the_slider_moves_with_keys_and_the_marks_follow(browser: Browser, pages: dict[str, Path]) -> None:
    browser.media()
    browser.open(pages["compare"])
    browser.run(f"{CHOSEN}.step.focus()")
    assert browser.run(f"{CHOSEN}.step.matches(':focus-visible')"), "the focus is to be seen"
    seen = set()
    for key, step in (("", STEPS), ("ArrowLeft", STEPS - 1), ("Home", 1), ("ArrowRight", 2), ("End", STEPS)):
        if key:
            browser.press(key)
        assert browser.run(f"{CHOSEN}.step.getAttribute('aria-valuetext')") == f"step {step}"
        assert f"step {step}:" in browser.run(SAID)
        assert f"step {step}:" in browser.run("document.getElementById('run0-heat').ariaLabel")
        seen.add(browser.run(SQUARES))
    assert len(seen) == 4, "the squares of four steps differ, the last step is there twice"
    assert browser.complaints() == []


def test_the_page_says_of_the_first_view_what_the_file_says(browser: Browser, pages: dict[str, Path]) -> None:
    page = pages["compare"].read_text()
    written = re.search(r'id="run0-heat" role="img" aria-label="([^"]+)"', page)
    assert written
    browser.media()
    browser.open(pages["compare"])
    assert browser.run("document.getElementById('run0-heat').ariaLabel") == written[1]


def _choose(browser: Browser, name: str, value: str) -> None:
    browser.run(
        f"{CHOSEN}.{name}.value = '{value}'; {CHOSEN}.{name}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )


def test_systems_layers_and_shares_can_be_chosen(browser: Browser, pages: dict[str, Path]) -> None:
    browser.media()
    browser.open(pages["compare"])
    about = "document.getElementById('run0-heat').ariaLabel"
    assert browser.run(about).startswith("Loads of MyPolicy"), "the user's own policy comes first"
    before = browser.run(BARS)
    _choose(browser, "system", "0")
    assert browser.run(about).startswith("Loads of megatron")
    assert browser.run(BARS) != before, "megatron keeps every row in backward"
    _choose(browser, "layer", "2")
    assert "layer 2, step" in browser.run(SAID)
    _choose(browser, "system", "2")
    _choose(browser, "show", "kept")
    shares: list[list[float]] = browser.run("document.getElementById('run0-heat').data[2].z")
    assert [share for row in shares for share in row] == pytest.approx([0.7] * 6, abs=0.01)


def test_dark_paper_and_back(browser: Browser, pages: dict[str, Path]) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    ink = "document.querySelector('#run0-kept .xtick text').style.fill"
    browser.media(dark=True)
    browser.open(pages["compare"])
    assert browser.run(colour) == "rgb(20, 23, 26)"
    dark = browser.run(ink)
    browser.media(kind="print", dark=True)
    browser.wait(f"{ink} !== {json.dumps(dark)}")
    assert browser.run(colour) == "rgb(255, 255, 255)", "paper stays white"
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.run("getComputedStyle(document.querySelector('.controls label')).display") == "none"
    assert max(browser.run(WIDTHS)) <= 680, "wider plots would be cut off"
    browser.media(dark=True)
    browser.wait(f"{ink} === {json.dumps(dark)}")
    assert browser.complaints() == []


def test_names_that_screen_readers_say(browser: Browser, pages: dict[str, Path]) -> None:
    browser.media()
    browser.open(pages["compare"])
    nodes: list[dict[str, Any]] = browser.call("Accessibility.getFullAXTree")["nodes"]
    by_role: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            by_role.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("image", "slider", "combobox", "region", "figure", "navigation", "table"):
        assert by_role[role], role
        assert all(by_role[role]), f"a {role} without a name: {by_role[role]}"
    assert any(name == "step" for name in by_role["slider"])
    levels = browser.run("[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(later <= sooner + 1 for sooner, later in pairwise(levels))
    targets = "[...document.querySelectorAll('nav a')].every((a) => document.getElementById(a.hash.slice(1)))"
    assert browser.run(targets)


def test_a_screenshot_is_no_empty_page(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    browser.media()
    browser.open(pages["compare"])
    assert browser.screenshot(tmp_path / "page.png").stat().st_size > 60_000


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_stand_out_from_the_page() -> None:
    css = (resources.files("lrmoe.report") / "templates" / "report.css").read_text()
    themes = [
        dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root {(.*?)}", css, re.S)
    ]
    assert len(themes) == 3
    for theme in themes:
        assert theme.keys() == themes[0].keys()
        page = _luminance(theme["page"])
        for name, least in [("ink", 7.0), ("ink-soft", 4.5), *((f"series-{i}", 3.0) for i in range(10))]:
            light, dark = sorted((page, _luminance(theme[name])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= least, (theme["page"], name)
