"""The stash benchmark: its bytes are those that can be counted by hand, and a stash above the bound fails it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STASH = Path(__file__).resolve().parents[1] / "benchmarks" / "stash.py"
SMALL = ["--rounds", "1", "--tokens", "128", "--hidden", "64", "--width", "16", "--experts", "8"]


def bench(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    run = subprocess.run(
        [sys.executable, str(STASH), "--json", *SMALL, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    return run.returncode, {row["name"]: row for row in rows}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_stays_is_counted_by_hand(ranks: int) -> None:
    code, rows = bench("--ranks", str(ranks))
    assert len(rows) == 3 * 4
    pairs, row = 128 * 4 * ranks, 2 * 16 * 4
    for score in ("alpha", "alpha_phi", "random"):
        found = rows[f"stash.{score}.ep{ranks}.forward_over_backward"]
        late, early = (found["context"][place] for place in ("backward", "forward"))
        assert late == pairs * (row + 4 * (score == "alpha_phi"))
        assert early == (pairs - int(0.3 * pairs)) * row + 4 * pairs
        assert found["value"] == round(early / late, 4)
        assert rows[f"stash.{score}.ep{ranks}.saved_forward_over_backward"]["value"] < 1
    assert code == 1, "narrow rows: the pairs' weights weigh more than 2 % beside them"


@pytest.mark.long
def test_wide_rows_are_within_the_bound() -> None:
    assert bench("--ranks", "1", "--width", "64")[0] == 0
