"""Every known fault of MoE libraries has its test here, named after it, and those that need a GPU have their check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import benchmark

FOLDER = Path(__file__).parent
CASES = [f"U{number:02}" for number in range(1, 36)]
ON_DEVICE = ("U02", "U06", "U07", "U09", "U10", "U12", "U26", "U27", "U33")


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_its_tests(case: str) -> None:
    """A file of its name, whose first line names it, with tests in it."""
    files = sorted(FOLDER.glob(f"test_{case.lower()}_*.py"))
    assert files, f"no test of {case}"
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert re.match(rf"{case}[:,] ", ast.get_docstring(tree) or "")
        tests = [
            n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")
        ]
        assert tests


def test_no_file_is_of_a_case_that_is_not() -> None:
    named = {
        m[1].upper() for path in FOLDER.glob("test_u*.py") if (m := re.match(r"test_(u\d+)_", path.name))
    }
    assert named <= set(CASES)


def test_cases_that_need_a_device_are_checked_there() -> None:
    assert tuple(benchmark.load("gpu_cases").CASES) == ON_DEVICE
