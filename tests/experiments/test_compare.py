"""A tiny comparison, whole: two gloo processes, real text, both systems, the folder it leaves behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError, LRMoEError
from lrmoe.experiments.compare.command import compare
from lrmoe.experiments.compare.cost import step_cost
from lrmoe.experiments.compare.figures import figures
from lrmoe.experiments.compare.lane import Lane
from lrmoe.experiments.compare.racers import turns
from lrmoe.experiments.compare.run import _check_same_start, common_loss
from lrmoe.experiments.systems.registry import SYSTEMS, get_system
from lrmoe.report import tables
from lrmoe.report.load import load_run
from lrmoe.report.numbers import size
from lrmoe.telemetry.traces import read_trace
from tests.experiments.records import record

WARMUP = 2
FIELDS = {"target_loss", "world_size", "link_bytes_per_s", "seed", "model", "context", "systems"}
SYSTEM_FIELDS = {
    "reached",
    "steps",
    "final_loss",
    "moe_time_wall_s",
    "moe_time_critical_s",
    "wire_bytes",
    "buffer_peak_bytes",
    "kept_share",
}


def tiny(tmp_path: Path) -> list[str]:
    """Overrides that make the demo small."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(200)))
    shape = "hidden_size=32,intermediate_size=32,moe_intermediate_size=32,num_hidden_layers=2,head_dim=16"
    overrides = [
        f"model.overrides.{pair}" for pair in f"{shape},num_attention_heads=2,num_experts=4".split(",")
    ]
    overrides += ["model.overrides.num_key_value_heads=1", "model.overrides.num_experts_per_tok=2"]
    overrides += [f"data.path={json.dumps(str(text))}", "data.seq_len=32", "train.batch_size=4"]
    overrides += [f"train.runs={json.dumps(str(tmp_path / 'runs'))}", f"lrmoe.warmup_steps={WARMUP}"]
    return [*overrides, "compare.smoothing_steps=3", "compare.link_skip_steps=1", "compare.link_steps=2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    tmp_path = tmp_path_factory.mktemp("compare")
    overrides = [*tiny(tmp_path), "compare.max_steps=40", "optim.lr=0.01", "optim.warmup_steps=1"]
    code = compare(preset="demo", name="tiny", target_loss=4.0, overrides=overrides)
    return tmp_path / "runs" / "tiny", code


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "summary.json").read_text()), lines


@pytest.mark.distributed
def test_both_reach_the_target_and_the_summary_has_every_field(finished: tuple[Path, int]) -> None:
    folder, code = finished
    summary, lines = read(folder)
    assert code == 0
    assert set(summary) >= FIELDS
    assert (summary["target_loss"], summary["world_size"], summary["seed"]) == (4.0, 2, 0)
    assert set(summary["context"]) == {"command", "versions", "hardware", "date"}
    for name, entry in summary["systems"].items():
        assert set(entry) >= SYSTEM_FIELDS
        assert entry["reached"]
        assert entry["steps"] == sum(line["system"] == name for line in lines)
    assert {path.name for path in folder.iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "trace.parquet",
        "summary.json",
        "report.html",
    }
    for name, entry in summary["systems"].items():
        trace = read_trace(folder / "trace.parquet", system=name)
        assert (trace.ranks, trace.experts, trace.layers) == (2, 4, (0, 1))
        assert np.unique(trace.step_C).size == entry["steps"]


@pytest.mark.distributed
def test_a_finished_comparison_is_not_overwritten_unasked(finished: tuple[Path, int]) -> None:
    folder, _ = finished
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    options = [f"train.runs={json.dumps(str(folder.parent))}"]
    with pytest.raises(ConfigError, match=f"{folder} holds an earlier run .*--overwrite"):
        compare(preset="demo", name="tiny", overrides=options)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.distributed
def test_a_comparison_that_cannot_start_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--ep 3: 4 experts .* valid: 1, 2, 4"):
        compare(preset="demo", name="twice", ep=3, overrides=tiny(tmp_path))
    assert not (tmp_path / "runs" / "twice").exists()


@pytest.mark.distributed
def test_systems_start_equal_and_differ_only_in_backward(finished: tuple[Path, int]) -> None:
    summary, lines = read(finished[0])
    first = {line["system"]: line for line in lines if line["step"] == 1}
    assert first["megatron"]["loss"] == first["lrmoe"]["loss"]
    assert [load["forward_R"] for load in first["megatron"]["loads"]] == [
        load["forward_R"] for load in first["lrmoe"]["loads"]
    ]
    for line in lines:
        exact = line["system"] == "megatron" or line["step"] <= WARMUP
        assert line["kept_share"] == 1.0 if exact else 0.7 <= line["kept_share"] < 0.72
        kept = sum(sum(load["backward_R"]) for load in line["loads"])
        assert kept == line["kept"], "rows that backward computed are the kept pairs"
    wire = {name: entry["wire_bytes"] / entry["steps"] for name, entry in summary["systems"].items()}
    assert wire["lrmoe"] < wire["megatron"]


@pytest.mark.distributed
def test_steps_alternate_so_that_neither_always_leads(finished: tuple[Path, int]) -> None:
    _, lines = read(finished[0])
    leaders = [next(line["system"] for line in lines if line["step"] == step) for step in (1, 2, 3, 4)]
    assert leaders == ["megatron", "lrmoe", "megatron", "lrmoe"]


@pytest.mark.distributed
def test_figures_of_the_summary(finished: tuple[Path, int]) -> None:
    summary, _ = read(finished[0])
    found = {item["name"]: item for item in figures(summary)}
    ours, base = (summary["systems"][name]["moe_time_critical_s"] for name in ("lrmoe", "megatron"))
    assert found["compare.lrmoe.time_critical_over_megatron"]["value"] == pytest.approx(ours / base)
    assert "compare.megatron.time_critical_over_megatron" not in found
    assert found["compare.lrmoe.wire_bytes"]["unit"] == "bytes"
    for item in found.values():
        assert set(item) == {"name", "value", "unit", "better", "context"}
        assert {"command", "seed", "versions", "hardware", "date"} <= set(item["context"])


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Every system and one from a file, over 2 ranks, 4 steps."""
    tmp_path = tmp_path_factory.mktemp("all")
    (tmp_path / "mine.py").write_text("from lrmoe.planning.policies.llep import LLEP as Mine\n")
    overrides = [*tiny(tmp_path), "compare.max_steps=4", "lrmoe.replica_slots=2", "train.accumulate=2"]
    systems = [*SYSTEMS, f"{tmp_path / 'mine.py'}:Mine"]
    code = compare(preset="small", name="all", systems=systems, ep=2, overrides=overrides)
    return tmp_path / "runs" / "all", code


@pytest.mark.distributed
def test_every_system_runs_and_exact_ones_share_a_trajectory(everything: tuple[Path, int]) -> None:
    summary, lines = read(everything[0])
    assert everything[1] == 0, "a comparison of steps has no target to miss"
    names = list(summary["systems"])
    assert names[:-1] == list(SYSTEMS)
    losses = {name: [line["loss"] for line in lines if line["system"] == name] for name in names}
    for name, entry in summary["systems"].items():
        assert entry["reached"]
        assert entry["steps"] == len(losses[name]) == 4
        assert entry["moe_time_critical_s"] > 0
        executed = "largest_difference_eps" in entry
        assert executed == (name != "megatron" and not name.startswith("lrmoe"))
        assert executed == (entry["role"] == "executes the shared run's calls")
        if executed or name == "megatron":
            assert losses[name] == losses["megatron"]
            assert entry["kept_share"] == 1
        if executed:
            assert entry["largest_difference_eps"] < 32
    assert losses["lrmoe-topk20"] != losses["megatron"]
    found = {item["name"] for item in figures(summary)}
    assert {"compare.symi.replica_bytes", "compare.eplb.largest_difference_eps"} <= found
    assert "compare.laer.time_to_common_loss_over_megatron" in found


def test_a_system_that_ended_for_its_budget_does_not_hide_the_common_loss() -> None:
    lanes = [lane("megatron", 5.0), lane("lrmoe", 4.5)]
    assert common_loss(lanes) == 5.0
    lanes[0].extra["infeasible"] = "too large"
    assert common_loss(lanes) == 4.5


@pytest.mark.distributed
def test_tables_of_every_system(everything: tuple[Path, int]) -> None:
    run = load_run(everything[0])
    names = [system.name for system in run.systems]
    headline, given = tables.headline(run), tables.fairness(run)
    assert [row[0] for row in headline.rows] == names
    assert [row[0] for row in given.rows] == names
    assert "share one training run" in headline.note
    assert "rows on the wire: one per pair" in given.note
    for heading in (
        "slots beyond E/R",
        "bytes of slots",
        "plans from",
        "traffic counted",
        "storage",
        "estimator",
    ):
        assert heading in given.columns
    row = dict(zip(given.columns, given.rows[names.index("symi")], strict=True))
    assert row["storage"] == "sharded"
    assert row["plans from"] == "history"
    assert row["bytes of slots"] == size(2 * 2 * 3 * 32 * 32 * (4 + 4)), (
        "resident, two layers, states sharded"
    )
    assert (everything[0] / "report.html").stat().st_size > 0


@pytest.mark.distributed
def test_an_unreached_target_exits_with_1_prints_json_and_replaces_what_was_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "short"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("old")
    (folder / "notes.txt").write_text("mine")
    options: dict[str, Any] = {"systems": ["lrmoe-topk20"], "target_loss": 0.1, "as_json": True}
    overrides = [*tiny(tmp_path), "compare.max_steps=2"]
    assert compare(name="short", overrides=overrides, overwrite=True, **options) == 1
    out = capfd.readouterr().out
    found = {item["name"]: item["value"] for item in map(json.loads, out.splitlines())}
    assert found["compare.lrmoe-topk20.reached"] == 0
    assert found["compare.lrmoe-topk20.steps"] == 2
    assert not any("_over_" in name for name in found), "no ratio without a baseline that arrived"
    assert read(folder)[0]["kind"] == "compare"
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": ["train.runs='/dev/null'"]}, "train.runs='/dev/null': cannot write"),
        ({"preset": "nope"}, "preset='nope'"),
        ({"systems": ["nope"]}, "systems='nope'"),
        ({"ep": 1}, r"compare\.ep=1"),
        ({"target_loss": -1.0}, r"compare\.target_loss=-1\.0"),
        ({"overrides": ["compare.nope=1"]}, r"compare\.nope: no such key"),
        ({"overrides": ["lrmoe.max_drop=2"]}, "max_drop=2"),
        ({"overrides": ["train.device=cuda"]}, r"train\.device='cuda'"),
    ],
)
def test_bad_usage_is_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(**options)


def lane(name: str, loss: float) -> Lane:
    made = Lane(get_system(name), LRMoEConfig(), targets=[1.0], smoothing_steps=1, max_steps=9)
    made.add(loss, 1, step_cost([[record(ms={"experts": 1.0}, sent={})]]))
    return made


def test_different_first_losses_stop_the_comparison() -> None:
    _check_same_start([lane("megatron", 5.5), lane("lrmoe", 5.5 * (1 + 1e-7))])
    with pytest.raises(LRMoEError, match=re.escape("first losses [5.5, 5.6]")):
        _check_same_start([lane("megatron", 5.5), lane("lrmoe", 5.6)])


def test_every_racer_leads_in_turn() -> None:
    assert [turns(["a", "b", "c"], i) for i in range(3)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
    ]
