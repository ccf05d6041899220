"""Kernels that choose rows and multiply segments compile for Hopper, without spills and for its tensor cores."""

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
FEW = ["bfloat16 300 x 2048, gathered", "bfloat16 300 x 2048, weight gathered"]
MANY = ["gathered, 16 segments", "weight gathered, 16 segments"]
QUICK = ["top 100", "sampled 100", *FEW, *MANY]


def compiled(names: list[str], cache: Path) -> dict[str, dict[str, Any]]:
    """By case, what the compiler tells."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton.compiling_products", *names],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {one["case"]: one for one in found}


def check(cases: dict[str, dict[str, Any]]) -> None:
    for name, one in cases.items():
        if "x 33" not in name:  # rows that start at any byte cost registers
            assert one["spilled"] == 0, one
        if "x 2048" in name:
            resident = 1 if one["threads"] == 256 else 3  # as `Tiles.resident` says
            assert one["registers"] * one["threads"] * resident <= 65536, one
            assert "10" in one["copies"], f"no copies of 16 bytes (0x10) into shared memory: {one}"
        if "float16 300 x 2048" in name:
            assert one["tensor_cores"], one
        if name.startswith("inclusion"):
            assert not one["fused_fp64"], (
                "a product and a sum rounded once could round otherwise than on a CPU"
            )


def test_kernels_compile(tmp_path: Path) -> None:
    cases = compiled(QUICK, tmp_path)
    assert list(cases) == QUICK
    check(cases)
    for few, many in zip(
        FEW, MANY, strict=True
    ):  # routing changes from call to call: training would stop to compile
        assert cases[few]["variant"] == cases[many]["variant"]


@pytest.mark.long
@pytest.mark.timeout(420)
def test_every_variant_compiles(tmp_path: Path) -> None:
    cases = compiled([], tmp_path)
    assert len(cases) == 6 + 6 * 5 + 2
    assert {one["kernel"] for one in cases.values()} == {"keep_top", "keep_sampled", "_rows", "_weights"}
    check(cases)
