"""Every kernel compiles for the GPUs it is written for, keeps its numbers in registers, and moves 16 bytes at a time.

The interpreter takes what the compiler refuses, and says nothing of either.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]
MOST_REGISTERS = 168  # of 128 threads: three programs on a processor at least


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cache = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton.compiling"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_without_spills(compiled: list[dict[str, Any]]) -> None:
    assert {one["kernel"] for one in compiled} == {"_move", "_combine", "_reduce", "_forward", "_backward"}
    for one in compiled:
        assert one["spilled"] == 0, one
        assert one["registers"] <= MOST_REGISTERS, one


def test_aligned_rows_move_16_bytes_a_thread(compiled: list[dict[str, Any]]) -> None:
    aligned = [one for one in compiled if not one["case"].startswith("odd")]
    assert len(aligned) == 16
    for one in aligned:
        assert one["load"] == 16, one
        assert one["store"] == (4 if one["kernel"] == "_reduce" else 16), one


def test_another_number_of_rows_is_no_other_variant(compiled: list[dict[str, Any]]) -> None:
    """Counts differ from call to call: training would stop to compile."""
    variant = {one["case"]: one["variant"] for one in compiled}
    assert variant["odd, one row"] == variant["odd, misaligned"] != variant["gather"]


def test_odd_rows_have_variants_of_their_own(compiled: list[dict[str, Any]]) -> None:
    cases = {one["case"]: one for one in compiled}
    assert cases["odd, far"]["load"] == 16
    assert cases["odd, misaligned"]["load"] == 8  # the row numbers
    assert cases["odd, one column"]["load"] == cases["odd, one column"]["store"] == 2
