"""The check for a borrowed GPU machine: runs here on tiny shapes, and notices a wrong operation."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=BENCHMARKS, capture_output=True, text=True, timeout=100, check=False
    )


def test_dry_run_passes_and_prints_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    done = _run("gpu_check.py", "--dry-run", "--json", "--seed", "3", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stderr.rstrip().endswith("all checks passed")
    assert out.read_text() == done.stdout
    figures = {item["name"]: item for item in map(json.loads, done.stdout.splitlines())}
    for item in figures.values():
        assert item.keys() == {"name", "value", "unit", "better", "context"}
    assert figures["gpu_check.layer.fp32.drop0.kept_share"]["value"] == 1
    assert abs(figures["gpu_check.layer.bf16.drop0.5.kept_share"]["value"] - 0.5) < 0.01
    assert figures["gpu_check.replay.lrmoe.backward_compute_ms_over_megatron"]["value"] > 0
    assert figures["gpu_check.layer.fp32.drop0.3.topk.error_over_limit"]["value"] <= 1
    cases = {name.split(".")[2] for name in figures if name.startswith("gpu_check.cases.")}
    assert cases == {"u02", "u07", "u09", "u10", "u12", "u26", "u27", "u33"}


@pytest.fixture
def cases() -> Iterator[ModuleType]:
    sys.path.append(str(BENCHMARKS))  # its scripts find each other there
    yield importlib.import_module("gpu_cases")
    sys.path.remove(str(BENCHMARKS))


def failed(cases: ModuleType, case: str) -> list[str]:
    report = importlib.import_module("gpu_report").Report(seed=0, device=torch.device("cpu"))
    cases.CASES[case](report, torch.device("cpu"), 0)
    found: list[str] = report.failed
    return found


@pytest.mark.parametrize("case", ["U02", "U09", "U10", "U12", "U33"])
def test_a_case_fails_where_results_differ(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    right = cases.run_layer
    monkeypatch.setattr(cases, "run_layer", lambda *args: [t + torch.rand_like(t) for t in right(*args)])
    assert failed(cases, case)


def test_a_case_fails_where_rows_are_misplaced_or_memory_grows(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, kept = cases.run_layer, []
    with monkeypatch.context() as patch:
        patch.setattr(cases.ops, "gather_rows", lambda source, index: source.clone())
        assert failed(cases, "U07")
    monkeypatch.setattr(cases, "run_layer", lambda *args: kept.append(right(*args)))
    assert failed(cases, "U26") == ["cases.u26.growth"]
    monkeypatch.setattr(
        cases, "run_layer", lambda layer, case: torch.empty(100_000 if not case.ids.any() else 1)
    )
    assert failed(cases, "U27") == ["cases.u27.hot_over_even"]


def test_a_wrong_gradient_fails_the_check() -> None:
    broken = """
import sys
import gpu_check
right = gpu_check.ops.grouped_mm_input
gpu_check.ops.grouped_mm_input = lambda grad, weight, counts: right(grad, weight, counts).roll(1, 0)
sys.argv = ["gpu_check.py", "--dry-run", "--seed", "3"]
sys.exit(gpu_check.main())
"""
    done = _run("-c", broken)
    assert done.returncode == 1, done.stderr
    assert "FAILED: ops.fp32.uneven.input_grad" in done.stdout.splitlines()[-1]
