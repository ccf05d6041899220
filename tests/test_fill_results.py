"""docs/results.md and its plot are made of a run's rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import fill_results
import results_plot


def row(
    system: str, seed: int, over: float | None, aux: float = 0.0, activations: str = "recompute"
) -> dict[str, Any]:
    """A row of headline.json."""
    return {
        "model": "qwen3-moe-micro", "aux": aux, "seed": seed, "activations": activations, "system": system,
        "steps": None if over is None else 240, "dloss": 0.001, "layer_ms": 400.0, "wall_ms": 900.0,
        "time_to_loss_s": None if over is None else 96.0, "over": {} if over is None else {"symi": over},
        "over_balanced": 1.05, "kept_share": 1.0 if system == "symi" else 0.5, "forward_peak": 1.01,
        "backward_peak": 0.5, "buffer_bytes": 1, "replicas": 6.0,
        "phases": {"experts": 70.0, "select": 5.0, "wire": 30.0},
        "balanced": {"experts": 68.0, "wire": 32.0}, "balanced_forward_ms": 50.0,
        "least_over_symi": None if over is None or system == "symi" else over - 0.03,
    }  # fmt: skip


def run() -> dict[str, Any]:
    """A run of two seeds, one of which did not reach the target with topk."""
    rows = [row("symi", seed, 1.0) for seed in (0, 1)]
    rows += [row("lrmoe-sampled50", 0, 0.5), row("lrmoe-sampled50", 1, 0.54)]
    rows += [row("lrmoe-topk20", 0, 0.7), row("lrmoe-topk20", 1, None)]
    rows += [row("symi", 0, 1.0, 0.0, "stash"), row("lrmoe-sampled50", 0, 0.6, 0.0, "stash")]
    return {
        "command": "make headline", "regime": "memorise", "target_loss": 0.05, "seeds": [0, 1], "every": 10,
        "size": {"ranks": 8, "hidden": 128, "width": 128}, "pairs_per_rank": 22016, "published": [0.212, 0.448],
        "link_rule": "A rule.", "links": {"qwen3-moe-micro": {"recompute": 2**29, "stash": 2**30}},
        "fairness": {"symi": {"max_drop": 0.0}}, "rows": rows,
        "context": {"hardware": {"cores": 2, "cpu": "a CPU"}, "versions": {"torch": "2"}, "date": "2026-01-01"},
    }  # fmt: skip


def test_ratios_come_with_errors_and_seeds_that_are_missing() -> None:
    page = fill_results.page_of(run(), [], [])
    assert "| lrmoe-sampled50 | 0.520 +- 0.020 |" in page
    assert "| lrmoe-topk20 | 0.700 (1 of 2 seeds) |" in page
    assert "0.552 to 0.788, that is 21.2% to 44.8% less" in page
    assert (
        "| qwen3-moe-micro | 0 | 1 | recompute | lrmoe-topk20 | - | 400.0 | - | - | - | 1.050 | +0.00100 |"
        in page
    )
    assert "512 MiB/s (qwen3-moe-micro, recompute), 1024 MiB/s (qwen3-moe-micro, stash)" in page
    assert "Wall clock" not in page


def test_readme_shows_the_systems_of_its_table_only() -> None:
    more = run()
    more["rows"].append(row("megatron", 0, 1.9))
    text = fill_results.short(more)
    assert "2 seeds:\n\n| | qwen3-moe-micro, aux 0 |" in text
    assert "| lrmoe-sampled50 | 0.520 +- 0.020 |" in text
    assert "megatron" not in text
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert text in fill_results.fill(readme, text)


def test_what_is_missed_is_told_by_phase_and_beside_what_can_be_reached() -> None:
    page = fill_results.page_of(run(), [], [])
    assert "| lrmoe-sampled50 | 0.490 +- 0.020 |" in page, "the least that a backward without overhead takes"
    assert "| qwen3-moe-micro, aux 0 | symi | 0.552 | 0.520 | kept |" in page
    assert "| lrmoe-sampled50 | +2.0 (+2.0%) | +5.0 (+5.0%) | -2.0 (-2.0%) | +5.0 (+5.0%) |" in page
    assert (
        "- `lrmoe-sampled50`: 1.050 of balanced counts: select +5.0%, experts (peak) +2.0%, wire (bytes) -2.0%; "
        "1.01 forward peak and 0.50 backward peak." in page
    )
    worse = run()
    for found in worse["rows"]:
        found["over"] = {"symi": 0.6, "ultraep": 0.74}
    page = fill_results.page_of(worse, [], [])
    assert "| symi | 0.552 | 0.600 | missed by 0.048 |" in page
    assert "| ultraep | 0.750 | 0.740 | kept |" in page


def test_stashed_activations_have_a_table_of_their_own_with_both_figures() -> None:
    page = fill_results.page_of(run(), [], [])
    assert ": 0.600 stashed, 0.500 recomputed, of SYMI's time" in page
    main, stashed = page.split("### With stashed activations")
    assert "| lrmoe-sampled50 | 0.600 |" in stashed
    assert "0.600" not in main
    alone = run()
    alone["rows"] = [found for found in alone["rows"] if found["activations"] == "recompute"]
    assert "stashed" not in fill_results.page_of(alone, [], [])


def test_tables_of_other_commands_are_shown_where_they_ran() -> None:
    wall = [
        {"name": f"link_wall.{name}.{quantity}", "value": value,
         "context": {"link_bytes_per_s": 10**8, "exchange_share_of_balanced_call": 0.33, "calls": 8}}
        for name, quantity, value in (
            ("symi", "wall_ms", 200.0), ("lrmoe", "wall_ms", 150.0), ("lrmoe", "wall_over_symi", 0.75)
        )
    ]  # fmt: skip
    ablate = [
        {"name": "ablate.memorise.lrm.topk.drop0.3.dloss", "value": 0.0012, "context": {"standard_error": 0.0003}},
        {"name": "ablate.continued.lrm.topk.drop0.5.dloss", "value": 0.004, "context": {}},
    ]  # fmt: skip
    page = fill_results.page_of(run(), ablate, wall)
    assert "800 Mbit/s" in page
    assert "| lrmoe | 150.0 | 0.750 | - |" in page
    assert "| lrm.topk | +0.0012 +- 0.0003 | +0.0040 |" in page


def test_only_what_stands_between_the_markers_changes() -> None:
    page = "before\n<!-- results:start -->\nold\n<!-- results:end -->\nafter\n"
    assert fill_results.fill(page, "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="results:start"):
        fill_results.fill("nothing", "new")
    assert fill_results.REGION.search(fill_results.PAGE.read_text())


def test_the_plot_is_an_image_with_a_name_and_a_bar_for_every_known_value() -> None:
    tree = ElementTree.fromstring(fill_results.plot_of(run()["rows"]))
    assert tree.attrib["role"] == "img"
    assert "SYMI" in tree.attrib["aria-label"]
    space = "{http://www.w3.org/2000/svg}"
    widths = [float(rect.attrib["width"]) for rect in tree.iter(f"{space}rect")]
    assert len(widths) == 1 + 2, "a legend and two systems"
    assert widths[1] < widths[2]
    texts = [text.text for text in tree.iter(f"{space}text")]
    assert "0.520" in texts


def test_values_that_are_not_known_have_no_bar() -> None:
    drawn = results_plot.bars("t", ["a", "b"], {"s": [results_plot.Bar(value=2.0), None]})
    assert drawn.count("<rect") == 2
