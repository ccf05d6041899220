"""The benchmarks as tests use them: imported, or run as a user runs them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    """A script as a module; from then on the scripts find each other."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Exit code of a script, its figures by name in the order printed, and the end of what it said beside."""

    code: int
    figures: dict[str, dict[str, Any]]
    said: str

    @property
    def values(self) -> dict[str, Any]:
        """The figures' values."""
        return {name: figure["value"] for name, figure in self.figures.items()}


def run(name: str, *arguments: str, limit_s: float) -> Ran:
    """Run a script with --json in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    by_name = {figure["name"]: figure for figure in figures}
    assert len(by_name) == len(figures), "a name twice"
    return Ran(code=done.returncode, figures=by_name, said=done.stderr[-2000:])
