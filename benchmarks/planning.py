"""Time and quality of plans on one core: median and worst over seeds, thread CPU time.

Counts: generator `lognormal` with its defaults, top-8, two slots a rank, drop 0.2 ("always"), no history. A plan is
placement, quotas, backward routing and the split of every source (not of this rank alone) into a LayerPlan, from a
checked Problem; each seed's time is the median of a few fresh calls.

    python benchmarks/planning.py --json

Names: planning.R<R>E<E>.ms, .peak (forward), .backward_peak_drop0.2, and for R=8, E=128 .forward_ms (placement and
split). The value is the median over seeds, `context.worst` the worst. Targets: R8E128 forward_ms < 0.3, ms < 1.0;
R256E512 ms < 12; R1024E1024 ms < 60; peak <= 1.005; backward_peak_drop0.2 <= 0.805.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import command_line
from rich.console import Console
from rich.table import Table

from lrmoe.planning import Problem, Topology, get_policy
from lrmoe.planning.placement import place
from lrmoe.planning.problem import IntArray
from lrmoe.planning.split import split_instances
from lrmoe.simulate.generators import generate
from lrmoe.telemetry import figure

CASES = ((8, 128), (64, 256), (256, 512), (1024, 1024))
DROP = 0.2


def question(counts_RE: IntArray) -> Problem:
    """The problem of one call; made anew for every timed call, because it remembers its sums."""
    ranks, experts = counts_RE.shape
    return Problem(
        counts_RE=counts_RE, topology=Topology(ranks=ranks, experts=experts), slots=2, max_drop=DROP
    )


def forward(problem: Problem) -> None:
    """Placement and split: what a forward needs of the planner."""
    found = place(problem)
    split_instances(problem.counts_RE, found.expert_J, found.rank_J, found.pairs_J, problem.topology.node_R)


def cpu_ms(call: Callable[[Problem], object], counts_RE: IntArray, repeats: int) -> float:
    """Median thread CPU time of a call, in ms."""
    times = []
    for _ in range(repeats):
        problem = question(counts_RE)
        start = time.thread_time_ns()
        call(problem)
        times.append((time.thread_time_ns() - start) / 1e6)
    return statistics.median(times)


def bench(ranks: int, experts: int, seeds: int) -> dict[str, list[float]]:
    """Quantities of one size, one value per seed."""
    plan, repeats = get_policy("lrmoe"), 9 if ranks <= 64 else 3
    found: dict[str, list[float]] = {"ms": [], "peak": [], f"backward_peak_drop{DROP}": []}
    if (ranks, experts) == CASES[0]:
        found["forward_ms"] = []
    for seed in range(seeds):
        counts_RE = generate(
            "lognormal", ranks=ranks, experts=experts, top_k=8, tokens=32768, seed=seed, sampling="counts"
        )[0]
        answer = plan(question(counts_RE))
        answer.check(question(counts_RE))
        mean = answer.pairs / ranks
        found["ms"].append(cpu_ms(plan, counts_RE, repeats))
        found["peak"].append(float(answer.forward_load_R.max()) / mean)
        found[f"backward_peak_drop{DROP}"].append(float(answer.backward_load_R.max()) / mean)
        if "forward_ms" in found:
            found["forward_ms"].append(cpu_ms(forward, counts_RE, repeats))
    return found


def figures(case: str, found: dict[str, list[float]], seeds: int) -> list[dict[str, Any]]:
    """One figure per quantity: median over seeds, the worst beside it."""
    return [
        figure(
            f"planning.{case}.{name}",
            statistics.median(values),
            "ms" if name.endswith("ms") else "mean loads",
            "lower",
            worst=max(values),
            seeds=seeds,
            slots=2,
            drop=DROP,
        )
        for name, values in found.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """A table on stderr."""
    table = Table("figure", "median", "worst", "unit")
    for row in rows:
        table.add_row(row["name"], f"{row['value']:.4f}", f"{row['context']['worst']:.4f}", row["unit"])
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--ranks", type=int, action="append", help="only these sizes; default: all")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for ranks, experts in CASES:
        if args.ranks is None or ranks in args.ranks:
            rows += figures(f"R{ranks}E{experts}", bench(ranks, experts, args.seeds), args.seeds)
    show(rows)
    if args.json:
        for row in rows:
            print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
