"""One rendered comparison for all tests of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrmoe.report.data import Run
from lrmoe.report.load import load_run
from tests.report.synthetic import compare_run


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(compare_run(tmp_path_factory.mktemp("runs") / "demo"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compare_run(tmp_path_factory.mktemp("runs") / "demo")
