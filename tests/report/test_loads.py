"""Loads step by step, memory stacks, names and colours."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from lrmoe.report import curves, heat, html, sections, steps
from lrmoe.report.load import load_run
from lrmoe.report.memory import memory
from lrmoe.report.names import readable, styles
from tests.report.synthetic import COUNTS, FORWARD, LAYERS, MIB, PRUNED, STEPS, compare_run, train_run


def test_squares_lie_below_their_rank(tmp_path: Path) -> None:
    plot = heat.heat(load_run(compare_run(tmp_path / "run")))
    assert plot is not None
    assert plot.frames is not None
    assert plot.frames["grid"] == [[0, 3], [1, 4], [2, 5]], "a column for each rank"
    assert plot.frames["start"] == [1, 0, STEPS - 1], "lrmoe, first layer, last step"
    forward, backward, squares = plot.traces
    mean = sum(FORWARD) / 2
    assert forward["y"] == pytest.approx([rows / mean for rows in FORWARD])
    assert backward["y"] == pytest.approx([rows / mean for rows in PRUNED])
    last = [COUNTS[0] - 600, COUNTS[1] + 600, *COUNTS[2:]]
    assert squares["z"][0] == pytest.approx([last[0] * 6 / sum(last), last[3] * 6 / sum(last)])
    assert "hottest expert 0 with 1.76 times the mean" in plot.label or "hottest expert" in plot.label


def test_every_layer_and_step_is_there(tmp_path: Path) -> None:
    plot = heat.heat(load_run(compare_run(tmp_path / "run")))
    assert plot is not None
    assert plot.frames is not None
    offered = heat.controls(plot)
    assert offered is not None
    assert (offered["systems"], offered["steps"]) == (["megatron", "lrmoe"], STEPS)
    layers = plot.frames["systems"][0]["layers"]
    assert [layer["layer"] for layer in layers] == list(range(LAYERS))
    assert layers[0]["c"][4][0] == COUNTS[0] - 50, "step 5"
    assert {row[:2] for row in plot.table.rows} == set(product(("megatron", "lrmoe"), "012"))


def test_experts_of_one_rank_are_wrapped() -> None:
    grid = heat._grid(1, 20)
    assert [len(row) for row in grid] == [16, 16]
    assert grid[1][3:5] == [19, -1]
    assert heat._grid(2, 5) == [], "experts that ranks do not share evenly have no home to show"


def test_long_runs_are_thinned_and_their_pages_stay_small(tmp_path: Path) -> None:
    folder = train_run(tmp_path / "long", steps=400)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    wide = {
        "forward_R": [70000] * 8,
        "backward_R": [50000] * 8,
        "counts_E": [4096] * 128,
        "quota_E": [2048] * 128,
    }
    for line in lines:
        line["loads"] = [{"layer": layer, **wide} for layer in range(48)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = load_run(folder)
    shown = run.systems[0].layers[0].step
    assert (shown[0], shown[-1]) == (1, 400)
    assert steps.LEAST_STEPS <= len(shown) <= steps.MOST_STEPS
    assert len(html.render([run])) < 12e6


def test_runs_that_wrote_no_counts_show_ranks_alone(tmp_path: Path) -> None:
    folder = compare_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["loads"] = [{k: v for k, v in entry.items() if not k.endswith("_E")} for entry in line["loads"]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = load_run(folder)
    plot = heat.heat(run)
    assert plot is not None
    assert [trace["type"] for trace in plot.traces] == ["bar", "bar"]
    html.render([run])


def test_memory_is_stacked_against_the_budget(tmp_path: Path) -> None:
    plot = memory(load_run(compare_run(tmp_path / "run")))
    assert plot is not None
    stash = next(trace for trace in plot.traces if trace["name"] == "stash")
    assert stash["x"] == [20.0, 20.0, 14.0, 14.0]
    assert stash["y"][1] == ["measured", "predicted"] * 2
    assert plot.layout["shapes"][0]["x0"] == 48.0
    assert "memory budget 48 MiB" in plot.label
    assert plot.table.rows[0][-1] == "51 MiB", "all parts, optimizer states too"
    assert "No budget counts optimizer states" in plot.caption


def test_memory_of_a_layers_budget_is_that_of_a_call(tmp_path: Path) -> None:
    folder = compare_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    for entry in summary["systems"].values():
        entry["memory"] |= {"layer_budget": 30 * MIB, "memory_budget": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    plot = memory(load_run(folder))
    assert plot is not None
    assert "layer budget 30 MiB" in plot.label
    assert "optimizer" not in json.dumps(plot.traces)
    assert plot.caption.endswith("Shown: one layer call.")


def test_memory_of_a_training_run_has_its_prediction(tmp_path: Path) -> None:
    plot = memory(load_run(train_run(tmp_path / "run")))
    assert plot is not None
    assert [trace["x"] for trace in plot.traces] == [[3.0, 3.5]]


def test_energy_and_variance_have_points_where_pairs_were_left_out(tmp_path: Path) -> None:
    found = {plot.name: plot for plot in sections.plots(load_run(compare_run(tmp_path / "run")))}
    for name, value in (("energy", 0.04), ("variance", 0.09)):
        (trace,) = found[name].traces
        assert trace["name"] == "lrmoe"
        assert trace["y"] == [None] * 10 + [value] * (STEPS - 10)
    assert found["energy"].table.rows[0][4] == "4.00%"


def test_a_limit_on_variance_is_drawn_beside_the_mean_it_holds(tmp_path: Path) -> None:
    folder = train_run(tmp_path / "run")
    assert curves.limited(load_run(folder)) is None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[10:]:
        line |= {"lrmoe/variance_mean_worst": 0.08, "lrmoe/variance_predicted_worst": 0.09}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text("[lrmoe]\nmax_added_variance = 0.1\n")
    plot = curves.limited(load_run(folder))
    assert plot is not None
    assert plot.layout["shapes"][0]["y0"] == 0.1
    assert plot.traces[0]["y"][9:11] == [None, 0.08]
    assert plot.label.endswith("run at most 8.00% of a limit 0.1")


def test_own_policies_are_called_by_their_names() -> None:
    assert readable(["lrmoe", "a/mine.py:Plan"]) == {"lrmoe": "lrmoe", "a/mine.py:Plan": "Plan"}
    two = readable(["a/mine.py:Plan", "b/yours.py:Plan"])
    assert list(two.values()) == ["Plan (mine.py)", "Plan (yours.py)"]
    same = ["a/mine.py:Plan", "b/mine.py:Plan"]
    assert list(readable(same).values()) == same


def test_systems_keep_their_look_and_own_policies_get_another() -> None:
    package = [
        "megatron",
        "lrmoe",
        "lrmoe-sampled50",
        "lrmoe-topk20",
        "symi",
        "ultraep",
        "laer",
        "eplb",
        "llep",
    ]
    alone, all_of_them = styles(package), styles([*package, "x.py:A", "x.py:B"])
    assert {name: all_of_them[name] for name in package} == alone
    assert len(set(all_of_them.values())) == len(all_of_them)
    colours = {all_of_them[name][0] for name in package}
    assert not colours & {all_of_them["x.py:A"][0], all_of_them["x.py:B"][0]}


def test_the_page_is_about_the_own_policy(tmp_path: Path) -> None:
    run = load_run(compare_run(tmp_path / "run", ("megatron", "lrmoe", "some/my_file.py:Mine")))
    shown = sections.section(run, "run0")
    assert shown.tiles[0][2].endswith("Mine / megatron")
    assert shown.fairness is not None
    assert ("policy from", "-", "-", "some/my_file.py:Mine") in [tuple(row) for row in shown.fairness.rows]


def test_many_systems_share_one_map_of_loads(tmp_path: Path) -> None:
    names = ("megatron", "symi", "ultraep", "lrmoe", "llep")
    run = load_run(compare_run(tmp_path / "run", names))
    plot = next(plot for plot in sections.plots(run) if plot.name == "load")
    forward, backward = plot.traces
    assert forward["type"] == "heatmap"
    assert len(forward["z"]) == len(names)
    assert backward["z"][1][0] == pytest.approx(PRUNED[0] / 2048)
