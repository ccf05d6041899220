"""The source distribution holds what its own commands need."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_page_and_file_of_the_top_folder_is_included() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        included = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all((ROOT / name.removeprefix("/")).exists() for name in included)
    kinds = ("*.md", "*.py", "*.txt", "*.cff", "Makefile", "LICENSE")
    found = {f"/{path.name}" for kind in kinds for path in ROOT.glob(kind)}
    assert found <= set(included), "left out"
