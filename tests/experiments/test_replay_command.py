"""The replay command: figures, folder, page, traces, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrmoe.errors import ConfigError
from lrmoe.experiments.replay_command import figures, run_replay
from lrmoe.experiments.replay_question import check_memory, make_question, needed_bytes
from lrmoe.report.commands import report
from lrmoe.report.load import load_run
from lrmoe.telemetry.traces import Trace, write_trace

SMALL: dict[str, Any] = {
    "ranks": 4, "experts": 16, "top_k": 2, "tokens": 64, "hidden": 16, "device": "cpu", "repeats": 1,
    "systems": ["megatron", "ultraep", "lrmoe"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[dict[str, dict[str, Any]], str]:
    assert run_replay(**{**SMALL, **options}, as_json=True) == 0
    out, err = capsys.readouterr()
    return {line["name"]: line for line in map(json.loads, out.splitlines())}, err


def test_figures_folder_and_page(capsys: pytest.CaptureFixture[str]) -> None:
    lines, err = run(capsys, generator="hot_rank", name="one")
    assert all(line.keys() == {"name", "value", "unit", "better", "context"} for line in lines.values())
    for name in ("backward_subtotal_reduction", "backward_speedup"):
        assert lines[f"replay.{name}"]["value"] == lines[f"replay.lrmoe.{name}"]["value"]
        assert lines[f"replay.{name}"]["better"] == "higher"
        assert f"replay.ultraep.{name}" in lines
        assert f"replay.megatron.{name}" not in lines
    assert lines["replay.kept_share"]["value"] == pytest.approx(0.8, abs=0.01)
    assert lines["replay.drop0.5.kept_share"]["value"] == pytest.approx(0.5, abs=0.01)
    ours, half = (lines[f"replay.{name}backward_ms"]["context"] for name in ("", "drop0.5."))
    assert (ours["max_drop"], half["max_drop"]) == (0.2, 0.5)
    assert {"measured", "modelled", "link", "link_bytes_per_s", "clock"} <= ours.keys()
    assert ours["activations"] == "recompute"
    assert "sends the kept pairs' inputs again" in ours["activations_mean"]
    assert not any("unpacked" in name for name in lines)
    assert ours["phases"]["measured"]["experts_backward"] > 0
    assert ours["phases"]["modelled"]["exchange"] > 0
    assert "Time of one layer call" in err
    assert "lrmoe, drop 0.5" in err
    folder = Path("runs/one")
    assert {path.name for path in folder.iterdir()} == {"summary.json", "report.html"}
    loaded = load_run(folder)
    assert loaded.kind == "replay"
    assert [line["name"] for line in figures(loaded.summary)] == list(lines)
    text = (folder / "report.html").read_text()
    assert "lrmoe, drop 0.5" in text
    assert "Modelled: exchange of rows" in text


def test_a_stash_needs_more_memory_and_sends_less(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for activations in ("recompute", "stash"):
        lines, _ = run(capsys, generator="hot_rank", activations=activations, link="1e9")
        assert lines["replay.backward_ms"]["context"]["activations"] == activations
        found[activations] = {
            name: lines[f"replay.megatron.{name}"]["value"]
            for name in ("backward_subtotal", "backward_exchange_ms")
        }
    assert found["stash"]["backward_subtotal"] > found["recompute"]["backward_subtotal"]
    assert found["stash"]["backward_exchange_ms"] < found["recompute"]["backward_exchange_ms"]
    with pytest.raises(ConfigError, match="activations='some'"):
        make_question(**{**SMALL, "activations": "some"})


def test_an_earlier_replay_is_replaced_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys)
    run(capsys)
    Path("runs/replay/summary.json").write_text('{"kind": "simulate"}')
    with pytest.raises(ConfigError, match="holds a run of `lrmoe simulate`"):
        run_replay(**SMALL)


def test_two_replays_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys)
    report(runs=[Path("runs/replay"), Path("runs/replay")], out=Path("two.html"))
    page = Path("two.html").read_text()
    assert "replay (first) and replay (second) have" in page
    assert page.count(">Time of one layer call</caption>") == 2


def test_a_trace_gives_counts_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    counts = np.random.default_rng(0).integers(0, 20, (3, 4, 8))
    zeros = np.zeros(3, dtype=np.int64)
    about = {"hidden": 64, "width": 24, "top_k": 2}
    trace = Trace(counts_CRE=counts, step_C=np.arange(3), micro_batch_C=zeros, layer_C=zeros, about=about)
    write_trace(Path("trace.parquet"), trace)
    lines, _ = run(
        capsys, trace=Path("trace.parquet"), ranks=None, experts=None, tokens=None, top_k=None, hidden=None
    )
    context = lines["replay.backward_ms"]["context"]
    assert (context["call"], context["history"]) == ("layer 0, call 2", 2)
    assert (context["hidden"], context["expert_width"], context["top_k"]) == (8, 24, 2)
    assert context["pairs"] == counts[2].sum()
    with pytest.raises(ConfigError, match="tokens=64"):
        make_question(systems=("megatron",), trace=Path("trace.parquet"), tokens=64)


def test_defaults_are_the_judged_case() -> None:
    asked = make_question(systems=("megatron", "lrmoe"), device="cpu")
    assert (asked.topology.ranks, asked.topology.experts, asked.layer.top_k) == (8, 128, 8)
    assert (asked.layer.shape.hidden, asked.layer.shape.width, asked.dtype) == (256, 768, "bf16")
    assert asked.calls.counts[-1].sum() == 8 * 262144
    assert (asked.allowance.max_drop, asked.allowance.slots) == (0.2, 2)
    assert asked.link_bytes_per_s is None
    air = make_question(systems=("megatron",), device="cpu", model="GLM-4.5-Air", tokens=64)
    assert (air.layer.shape.hidden, air.layer.shape.width) == (512, 1408)


def test_links() -> None:
    def speed(link: str | None) -> float | None:
        return make_question(
            systems=("megatron",), device="cpu", tokens=64, link=link
        ).link_bytes_per_s  # fmt: skip

    assert speed("third") is None
    assert speed("25e9") == 25e9
    assert speed("h100") == 450e9
    assert speed("l40s") == 32e9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": "h101"}, "link='h101'.*h100"),
        ({"link": "0"}, "link='0': must be positive"),
        ({"dtype": "fp8"}, "dtype='fp8'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"seed": -1}, "seed=-1"),
        ({"tokens": 0}, "tokens=0"),
        ({"layer": 1}, "layer=1.*trace"),
        ({"ranks": 3}, "ranks=3"),
        ({"max_drop": 1.0}, "max_drop=1.0"),
        ({"estimator": "best"}, "estimator='best'"),
        ({"systems": ["lrmoe"]}, "needs megatron"),
        ({"model": "gtp"}, "model='gtp'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_replay(**{**SMALL, **options})
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_cuda_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        make_question(systems=("megatron",), device="cuda")


def test_too_large_is_refused_before_it_starts() -> None:
    asked = make_question(systems=("megatron",), device="cpu", hidden=2**20)
    assert needed_bytes(asked) > 2**40
    with pytest.raises(ConfigError, match=r"GiB.*smaller --hidden"):
        check_memory(asked)


def test_a_gpu_needs_scratch_for_all_rows_of_a_rank() -> None:
    asked = make_question(systems=("megatron",), device="cpu")
    there = dataclasses.replace(asked, device=torch.device("cuda"))
    assert needed_bytes(there) > needed_bytes(asked)
