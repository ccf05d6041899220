"""The check for a borrowed GPU machine: runs here on tiny shapes, and notices a wrong operation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
