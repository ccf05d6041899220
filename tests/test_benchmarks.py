"""The layer benchmark: says how long it takes, and what it is doing while it does."""

from __future__ import annotations

import json
import re
from types import ModuleType

import pytest
import torch

from tests import benchmark


@pytest.fixture(scope="module")
def layer() -> ModuleType:
    return benchmark.load("layer")


def test_progress_names_dtype_rounds_and_variants_on_stderr(
    layer: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = {"eager": 0, "drop0": 0}

    def run(name: str) -> None:
        calls[name] += 1

    times = layer.measure({name: lambda name=name: run(name) for name in calls}, 8, "bf16")
    assert {name: len(values) for name, values in times.items()} == {"eager": 8, "drop0": 8}
    assert calls == {"eager": 10, "drop0": 10}
    said = capsys.readouterr()
    assert said.out == "", "figures alone go to standard output"
    expected = ["warm-up, eager", "warm-up, drop0", *(f"round {n} of 8" for n in (1, 3, 5, 7))]
    assert said.err.splitlines() == [f"bf16: {line}" for line in expected]


def test_help_says_how_long_it_takes(layer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        layer.main(["--help"])
    assert re.search(r"Expected duration on 2 cores: \d+ to \d+ minutes", capsys.readouterr().out)


def test_names_tell_the_threads_where_they_are_not_two(
    layer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = layer.Case(hidden=32, width=16, experts=4, top_k=2, tokens=256)
    monkeypatch.setattr(layer, "Case", lambda: small)
    monkeypatch.setattr(layer, "profiled_peak", lambda _: 1)  # takes seconds, and has a test of its own
    before = torch.get_num_threads()
    try:
        arguments = ["--json", "--rounds", "2", "--dtype", "fp32", "--threads", "2", "--threads", "1"]
        assert layer.main(arguments) == 0
    finally:
        torch.set_num_threads(before)
    found = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    times = [f"drop{drop}.over_best_peer" for drop in ("0", "0.2", "0.5")]
    times += ["drop0.over_gemms", "drop0.2.overhead_share", "drop0.5.over_drop0", "masked_twin.over_drop0"]
    names = [f"memory.fp32.drop{drop}.over_grouped_mm" for drop in ("0", "0.2", "0.5")]
    names += [f"layer.fp32.{name}{suffix}" for suffix in ("", ".t1") for name in times]
    assert list(found) == names
    for name in names:
        context = found[name]["context"]
        if name.startswith("layer"):
            assert context["hardware"]["threads"] == (1 if name.endswith(".t1") else 2)
            assert context["spread"] >= 0
        else:
            assert found[name]["value"] == round(context["bytes"] / context["grouped_mm_bytes"], 4)
            assert context["activations"] == ("recompute" if "0.5" in name else "auto")


def test_peak_memory_is_the_most_that_a_call_holds_beside_what_was_there(layer: ModuleType) -> None:
    case = layer.Case(hidden=32, width=16, experts=4, top_k=2, tokens=256)
    data = layer.make_data(case, torch.float32, 0)

    def run() -> None:
        held = torch.zeros(1000)
        (held + data.x.sum()).mul_(2)
        del held
        torch.zeros(1500)

    found = layer.peak_bytes(run, data)
    assert found["tracked"] == 8004, "two vectors of a thousand and the sum"
    assert 8000 <= found["profiled"] <= 10_000


def test_the_spread_is_the_distance_of_the_quartiles_over_the_median(layer: ModuleType) -> None:
    assert layer.spread([1.0]) == 0
    assert layer.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    times = {"ours": [2.0, 9.0, 4.0], "slow": [4.0, 9.0, 9.0], "fast": [1.0, 3.0, 8.0]}
    assert layer.ratios(times, "ours", "slow", "fast") == [2, 3, 0.5]


@pytest.mark.long
def test_the_op_benchmark_names_every_op_in_both_dtypes() -> None:
    ran = benchmark.run("ops", "--rounds", "1", "--threads", "1", limit_s=110)
    assert ran.code == 0, ran.said
    ops = "grouped_mm grouped_mm_input grouped_mm_weight gated_activation gated_activation_backward gather_rows combine"
    assert list(ran.figures) == [
        f"ops.{op}.{dtype}.over_plain" for dtype in ("fp32", "bf16") for op in ops.split()
    ]
