"""The memory benchmark: a rank gains little more than it keeps, and a file that stays mapped would show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "load_memory.py"
SMALL = ["--experts", "16", "--layers", "2", "--vocabulary", "512", "--file-mb", "20", "--ranks", "2"]
EXPERTS = 16 * 2 * 3 * 512 * 512 * 4  # bytes


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_rank_gains_its_share_and_less_than_a_file() -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", *SMALL, "--paths", "train", "export"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in map(json.loads, run.stdout.splitlines())}
    assert len(rows) == 3
    found = rows["load.train.peak_over_share_plus_shard"]["context"]
    assert EXPERTS / 2 < found["share_bytes"] < found["gained_bytes"]
    assert found["gained_bytes"] < found["share_bytes"] + found["shard_bytes"] < EXPERTS
    assert 0.5 < rows["load.train.private_over_share_plus_shard"]["value"] < 1
    assert rows["load.export.peak_over_shard"]["value"] < 1
