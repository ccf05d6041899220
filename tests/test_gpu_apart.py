"""Parts of the GPU check in other processes: what crashes, hangs or loses the device costs itself only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from tests import benchmark

# Stands for a process of the check: its parts' names say what they do.
PARTS = """
import json, os, sys, time
def say(kind, what):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps([kind, what]) + "\\n")
for name in sys.argv[2:]:
    if name == "never":
        sys.exit(1)
    say("begin", name)
    if name == "crash":
        os.abort()
    if name == "hang":
        time.sleep(60)
    say("figure", {"name": name})
    say("end", name)
    if name == "lost":
        os._exit(3)
"""


@pytest.fixture
def apart() -> ModuleType:
    return benchmark.load("gpu_apart")


def journal(apart: ModuleType, path: Path, names: Sequence[str], until: float = 60.0) -> dict[str, list[Any]]:
    """What is in the journal after some parts, by kind."""

    def command(left: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", PARTS, str(path), *left]

    apart.run_apart(names, command, path, lambda _: 1.0, time.time() + until)
    found: dict[str, list[Any]] = {}
    for line in path.read_text().splitlines():
        kind, what = json.loads(line)
        found.setdefault(kind, []).append(what["name"] if kind == "figure" else what)
    return found


def test_a_crash_and_a_lost_device_cost_a_process_and_nothing_else(apart: ModuleType, tmp_path: Path) -> None:
    found = journal(apart, tmp_path / "journal", ["a", "crash", "b", "lost", "c"])
    assert found["figure"] == ["a", "b", "lost", "c"]
    assert found["failed"] == ["crash (its process ended with code -6)"]
    assert found["begin"] == ["a", "crash", "b", "lost", "c"], "none twice"


def test_a_part_that_hangs_is_ended(apart: ModuleType, tmp_path: Path) -> None:
    begin = time.monotonic()
    found = journal(apart, tmp_path / "journal", ["hang", "a"])
    assert found["failed"] == ["hang (nothing for 1 s)"]
    assert found["figure"] == ["a"]
    assert time.monotonic() - begin < 30


def test_nothing_runs_beyond_the_time(
    apart: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "GRACE_S", 0.1)
    found = journal(apart, tmp_path / "journal", ["hang", "a"], until=0.5)
    assert found["failed"] == ["hang (the time was up)"]
    assert "figure" not in found


def test_a_process_that_never_begins_is_not_started_for_ever(apart: ModuleType, tmp_path: Path) -> None:
    found = journal(apart, tmp_path / "journal", ["never", "a"])
    assert found == {"failed": ["start (its process ended with code 1)"], "end": ["start"]}


def test_a_report_takes_over_what_a_journal_says_but_no_line_that_was_cut_off(
    apart: ModuleType, tmp_path: Path
) -> None:
    reports, path = benchmark.load("gpu_report"), tmp_path / "journal"
    first = reports.Report(seed=1, device=torch.device("cpu"), journal=path)
    first.at_most("cases.one", 2, 1, "entries")
    first.left_out("nothing is there")
    lines = path.read_text().splitlines(keepends=True)
    second = reports.Report(seed=1, device=torch.device("cpu"))
    second.recall([*lines, lines[0][:40]])
    assert (second.figures, second.failed, second.missing) == (first.figures, first.failed, first.missing)
    assert first.failed == ["cases.one"]


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Exit code of the command and what it printed."""
    check: Any = benchmark.load("gpu_check")
    with mock.patch.object(sys, "argv", ["gpu_check.py", *options]):
        code = check.main()
    return code, capsys.readouterr().out


def test_the_command_runs_its_parts_apart_and_reads_a_journal_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.jsonl"
    asked = ("--dry-run", "--apart", "--only", "cases.u02,cases.u27", "--out", str(out))
    code, printed = run(capsys, *asked)
    assert code == 0
    assert printed.rstrip().endswith("all checks passed")
    names = [json.loads(line)["name"] for line in out.read_text().splitlines()]
    assert "gpu_check.cases.u27.hot_over_even" in names
    assert "gpu_check.seconds.cases.u02" in names
    with out.with_suffix(".journal").open("a") as file:
        file.write('["failed", "cases.u02 (cut off)"]\n')
    code, again = run(capsys, "--read", str(out.with_suffix(".journal")))
    assert code == 1
    assert "FAILED: cases.u02 (cut off)" in again
    assert again.splitlines()[:3] == printed.splitlines()[:3], "the same table"
