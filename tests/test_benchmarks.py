"""The layer benchmark: says how long it takes, and what it is doing while it does."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def layer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_layer", BENCHMARKS / "layer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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


@pytest.mark.long
def test_the_op_benchmark_names_every_op_in_both_dtypes() -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "ops.py"), "--json", "--rounds", "1", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    names = [json.loads(line)["name"] for line in run.stdout.splitlines()]
    ops = "grouped_mm grouped_mm_input grouped_mm_weight gated_activation gated_activation_backward gather_rows combine"
    assert names == [f"ops.{op}.{dtype}.over_plain" for dtype in ("fp32", "bf16") for op in ops.split()]
