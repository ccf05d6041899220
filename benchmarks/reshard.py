"""Whether a checkpoint goes on in any other layout where the unbroken run goes.

A small model is trained for two steps in float64, nothing dropped, copies of experts placed (policy "laer"), at every
number of expert-parallel ranks and in both storages, and saved. Every checkpoint goes on at every number of ranks and
in both storages. An evaluation and one more step there are compared with those of the run that was not interrupted:
both losses, all weights and both moments of the optimizer. At 4 and 8 ranks shards of an expert are of uneven size.

    python benchmarks/reshard.py --json

Names: reshard.cases, how many pairs of layouts were compared; reshard.worst_relative_difference, the largest difference
of a number over the largest number of its tensor: <= 1e-10; reshard.bitwise_same_layout, the share of pairs of the
same layout without any difference: 1 (exit code 1 otherwise, for both).

Expected duration on 2 cores: 2 to 5 minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command_line
from rich.console import Console
from rich.table import Table

from lrmoe.telemetry import figure
from lrmoe.training.launch import run_workers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the runs are those of the tests, which are no package that is installed

from tests.training.resharding import Difference, Layout, Went, compare  # noqa: E402  # after the path is set

RANKS = (1, 2, 4, 8)
STORAGES = ("owned", "sharded")
WORST = 1e-10
LIMIT_S = 600


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pair of layouts, and how far what went on is from what was not interrupted."""

    before: Layout
    after: Layout
    difference: Difference


def work(name: str, ranks: int, *args: Any) -> list[Any]:
    """A worker of tests.training.resharding on fresh processes."""
    return run_workers(f"tests.training.resharding:{name}", ranks, args, time_limit_s=LIMIT_S)


def matrix(folder: Path, sizes: Sequence[int]) -> Iterator[Case]:
    """All pairs of layouts, as they are done."""
    through: dict[Layout, list[Went]] = {}
    for ranks in sizes:
        by_rank = work("save_in", ranks, folder, ranks, STORAGES)
        through |= {(ranks, storage): [one[storage] for one in by_rank] for storage in STORAGES}
        say(f"saved at {ranks} ranks")
    saved = tuple(through)
    for ranks in sizes:
        by_rank = work("load_in", ranks, folder, saved, ranks, STORAGES)
        for before, storage in by_rank[0]:
            went = [one[before, storage] for one in by_rank]
            yield Case(before=before, after=(ranks, storage), difference=compare(through[before], went))
        say(f"went on at {ranks} ranks")


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def figures(cases: Sequence[Case], context: dict[str, Any]) -> list[dict[str, Any]]:
    """The three figures."""
    same = [case.difference.bitwise for case in cases if case.before == case.after]
    worst = max(case.difference.worst for case in cases)
    return [
        figure("reshard.cases", len(cases), "pairs of layouts", "higher", **context),
        figure("reshard.worst_relative_difference", worst, "ratio", "lower", **context),
        figure("reshard.bitwise_same_layout", sum(same) / len(same), "share", "higher", **context),
    ]


def show(cases: Sequence[Case]) -> None:
    """The worst difference of every pair, on stderr: saved in the row's layout, gone on in the column's."""
    layouts = list(dict.fromkeys(case.before for case in cases))
    found = {(case.before, case.after): case.difference for case in cases}
    table = Table(title="largest relative difference; 0 is bitwise the same")
    table.add_column("saved in", no_wrap=True)
    for ranks, storage in layouts:
        table.add_column(f"{storage} {ranks}", justify="right")
    for before in layouts:
        shown = [
            "0" if found[before, after].bitwise else f"{found[before, after].worst:.0e}" for after in layouts
        ]
        table.add_row(f"{before[1]} {before[0]}", *shown)
    Console(stderr=True, width=120).print(table)


def passed(cases: Sequence[Case]) -> bool:
    """Whether every pair is close enough, and those of the same layout are the same."""
    return all(
        case.difference.worst <= WORST and (case.difference.bitwise or case.before != case.after)
        for case in cases
    )


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=list(RANKS),
        choices=RANKS,
        help="numbers of ranks (default: all)",
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="lrmoe-reshard-") as name:
        cases = list(matrix(Path(name), args.ranks))
    show(cases)
    for row in figures(cases, {"ranks": args.ranks}):
        print(json.dumps(row) if args.json else f"{row['name']:36} {row['value']:.4g}")
    return 0 if passed(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
