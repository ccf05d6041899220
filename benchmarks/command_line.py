"""Options that the benchmarks share: --json, and one for every size of a case."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def parser(about: str | None) -> argparse.ArgumentParser:
    """A parser that shows a script's docstring as it stands, with --json."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print figures as JSON lines on stdout")
    return made


def add_sizes(made: argparse.ArgumentParser, case: DataclassInstance) -> None:
    """An option for every field of a case, by its name, with its value as the default."""
    for name, value in asdict(case).items():
        made.add_argument(f"--{name.replace('_', '-')}", type=_kind(value), default=value)


def sizes_of(args: argparse.Namespace, case: DataclassInstance) -> dict[str, Any]:
    """What was given for the fields of a case."""
    return {name: getattr(args, name) for name in asdict(case)}


def _kind(value: object) -> Callable[[str], Any]:
    return type(value)
