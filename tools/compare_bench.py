"""Hold fresh benchmark figures against the committed ones; `make bench` ends with it.

Usage: python tools/compare_bench.py runs/bench [--against benchmarks/results] [--json]

Files of JSON lines with the same name are compared, figure by figure. Seconds, bytes and amounts of work depend on the
machine or on what was asked for and are left out; ratios, shares and counts of what went wrong are compared. A figure
may be worse than the committed one by 10 %, or by twice the spread that either run recorded over its rounds where that
is more (`context.spread`, a share of the value; at most 25 %): runs differ by more than their rounds do. Planned loads
may be worse by 2 %, exponents of growth by 0.15, and what was 0 not at all.

Exit code 1: a figure is worse than allowed, or is missing from a file that has others. 2: nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = frozenset({"ms", "s", "B", "bytes"})
AMOUNTS = frozenset({"calls", "steps", "pairs of layouts"})  # of work done, where more is better
PLANNED = frozenset({"mean loads", "peak/mean"})  # no clock and no chance in it
PLAN_ROOM, LEAST, MOST = 0.02, 0.10, 0.25  # shares of the committed value
SPREADS = 2.0  # of a run's rounds, that another run may lie apart
EXPONENT_ROOM = 0.15  # a slope is no ratio: its own size says nothing of its noise
WORSE, BETTER, SAME, MISSING, NEW = "worse", "better", "as before", "missing", "new"
FAILED = frozenset({WORSE, MISSING})

Rows = Mapping[str, Mapping[str, Any]]  # figures by name


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One figure.

    Attributes:
        committed, value: old and new; None where there is none. allowed: the worst value that passes.
    """

    name: str
    committed: float | None
    value: float | None
    allowed: float | None
    verdict: str


def judge(old: Rows, new: Rows) -> list[Verdict]:
    """Every comparable figure of one file, the committed ones first."""
    found = []
    for name, row in old.items():
        if _compared(row):
            there = new.get(name, {}).get("value") is not None
            found.append(_one(name, row, new[name]) if there else _missing(name, row))
    for name, row in new.items():
        if _compared(row) and name not in old:
            found.append(Verdict(name=name, committed=None, value=row["value"], allowed=None, verdict=NEW))
    return found


def room_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    """By how much a figure may be worse, in its own unit."""
    if old["unit"] == "exponent":
        return EXPONENT_ROOM
    if old["unit"] in PLANNED:
        return PLAN_ROOM * abs(old["value"])
    spreads = [row["context"]["spread"] for row in (old, new) if "spread" in row.get("context", {})]
    share = min(max(LEAST, SPREADS * max(spreads, default=0.0)), MOST)
    return share * abs(old["value"])


def _one(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Verdict:
    room = room_of(old, new)
    sign = 1 if old["better"] == "lower" else -1
    worse_by = sign * (new["value"] - old["value"])
    within = worse_by <= room  # never for NaN: a figure that is no number any more is no better one
    verdict = WORSE if not within else BETTER if -worse_by > room else SAME
    return Verdict(
        name=name,
        committed=old["value"],
        value=new["value"],
        allowed=old["value"] + sign * room,
        verdict=verdict,
    )


def _missing(name: str, old: Mapping[str, Any]) -> Verdict:
    return Verdict(name=name, committed=old["value"], value=None, allowed=None, verdict=MISSING)


def _compared(row: Mapping[str, Any]) -> bool:
    if row["value"] is None:  # JSON has no word for what it was
        return False
    return row["unit"] not in MACHINE and not (row["unit"] in AMOUNTS and row["better"] == "higher")


def read(path: Path) -> Rows:
    """Figures of a file of JSON lines by name; of two lines of one name the later counts.

    Raises:
        ValueError: a line is no figure; says which.
    """
    rows = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            rows[row["name"]] = {
                "context": {},
                **{key: row[key] for key in ("value", "unit", "better")},
                **row,
            }
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not a figure ({error!r})") from error
    return rows


def compare(new: Path, old: Path) -> Iterator[Verdict]:
    """Every figure of the files that both folders have."""
    for path in sorted(new.glob("*.jsonl")):
        if (old / path.name).is_file():
            yield from judge(read(old / path.name), read(path))


def show(verdicts: list[Verdict]) -> None:
    """A table on stderr, what failed last."""
    table = Table(title="benchmarks against benchmarks/results")
    table.add_column("figure", overflow="fold")
    for column in ("committed", "now", "allowed", ""):
        table.add_column(column, no_wrap=True)
    styles = {WORSE: "bold red", MISSING: "bold red", BETTER: "green"}
    for one in sorted(verdicts, key=lambda one: one.verdict in FAILED):
        cells = (
            "-" if value is None else f"{value:.4g}" for value in (one.committed, one.value, one.allowed)
        )
        table.add_row(one.name, *cells, one.verdict, style=styles.get(one.verdict))
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Compare and print; JSON lines on stdout with --json."""
    parser = argparse.ArgumentParser(description="Hold fresh benchmark figures against the committed ones.")
    parser.add_argument("new", type=Path, help="folder of fresh files of JSON lines")
    parser.add_argument("--against", type=Path, default=RESULTS, help="folder of committed ones")
    parser.add_argument("--json", action="store_true", help="print every figure's verdict on stdout")
    args = parser.parse_args(argv)
    try:
        verdicts = list(compare(args.new, args.against))
    except ValueError as error:
        print(f"compare_bench: {error}", file=sys.stderr)
        return 2
    if not verdicts:
        print(f"compare_bench: nothing in {args.new} to hold against {args.against}", file=sys.stderr)
        return 2
    show(verdicts)
    for one in verdicts if args.json else ():
        print(json.dumps(asdict(one)))
    failed = sum(one.verdict in FAILED for one in verdicts)
    print(f"{len(verdicts)} figures, {failed} worse than allowed or missing", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
