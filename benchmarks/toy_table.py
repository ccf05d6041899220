"""Peaks of the compared systems on toy counts, beside those of an earlier, independent implementation of their rules.

Counts: 128 experts, top-8, 32768 tokens a rank, popularity (1 + i)^-z permuted, per source times gamma(20, 1/20) noise.
History-based systems get the current counts as their history, which flatters them. S = 2 extra slots; SYMI has E / R
slots in all. Peak = most loaded rank over the mean; beside it the foreign instances and the share of pairs that stay
on their source rank. Says nothing about speed.

    python benchmarks/toy_table.py --json

FasterMoE's cost formula is read with one byte per element here, as its letters stand (elements over bandwidth); the
policy's default counts bytes. At R=32 a node has 8 ranks, and UltraEP's domain is all of them.
Names: toy.R<R>z<z>.<system>.peak. Exit code 1 where a peak is off by more than .05.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import command_line
import numpy as np
from rich.console import Console
from rich.table import Table

from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.policies import (
    EPLB,
    LLEP,
    FasterMoE,
    FlexMoE,
    Laer,
    Policy,
    SmartMoE,
    Symi,
    TopoEP,
    UltraEP,
)
from lrmoe.planning.problem import History, IntArray
from lrmoe.telemetry import figure

EXPERTS, TOP_K, TOKENS = 128, 8, 32768
SLOTS = 2
TOLERANCE = 0.05
SEED = 1
CASES = ((8, 0.8), (8, 1.2), (32, 0.8))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system.

    Attributes:
        policy: makes it, from the number of ranks.
        peaks: the earlier implementation's, one a case.
        replicas: its foreign instances, one a case, where it gave them.
    """

    policy: Callable[[int], Policy]
    peaks: tuple[float, float, float]
    replicas: tuple[int, int, int] | None = None


ROWS: dict[str, Row] = {
    "megatron": Row(
        policy=lambda ranks: get_policy("megatron"), peaks=(2.285, 4.050, 4.455), replicas=(0, 0, 0)
    ),
    "fastermoe": Row(
        policy=lambda ranks: FasterMoE(flops=400e12, bandwidth=50e9, element_bytes=1),
        peaks=(1.454, 1.482, 1.810),
        replicas=(14, 14, 93),
    ),
    "symi": Row(policy=lambda ranks: Symi(slots_per_rank=EXPERTS // ranks), peaks=(2.285, 4.050, 4.455)),
    "smartmoe": Row(policy=lambda ranks: SmartMoE(interval=1), peaks=(1.223, 2.451, 3.929)),
    "eplb": Row(policy=lambda ranks: EPLB(), peaks=(1.001, 1.000, 1.006)),
    "laer": Row(policy=lambda ranks: Laer(), peaks=(1.001, 1.000, 1.034)),
    "flexmoe": Row(policy=lambda ranks: FlexMoE(variant="pack"), peaks=(1.013, 1.243, 1.155)),
    "llep": Row(policy=lambda ranks: LLEP(), peaks=(1.000, 1.000, 1.000), replicas=(9, 8, 31)),
    "topoep": Row(policy=lambda ranks: TopoEP(), peaks=(1.059, 1.000, 1.033), replicas=(6, 8, 26)),
    "ultraep": Row(
        policy=lambda ranks: UltraEP(confine=False), peaks=(1.033, 1.010, 1.010), replicas=(6, 7, 27)
    ),
}


def toy_counts(ranks: int, z: float) -> IntArray:
    """Pairs of each source for each expert, int64 (R, E)."""
    rng = np.random.default_rng(SEED)
    popularity = rng.permutation((1.0 + np.arange(EXPERTS)) ** -z)
    rows = []
    for _ in range(ranks):
        own = popularity * rng.gamma(20, 1 / 20, EXPERTS)
        rows.append(rng.multinomial(TOKENS * TOP_K, own / own.sum()))
    return np.array(rows, dtype=np.int64)


def toy_problem(ranks: int, z: float) -> Problem:
    """One call whose history is the call itself."""
    counts_RE = toy_counts(ranks, z)
    topology = Topology(ranks=ranks, experts=EXPERTS, ranks_per_node=8)
    return Problem(
        counts_RE=counts_RE,
        topology=topology,
        slots=SLOTS,
        history=History(counts=(counts_RE,), step=1),
    )


def peak(plan: LayerPlan) -> float:
    """Most loaded rank over the mean."""
    return float(plan.forward_load_R.max() * plan.topology.ranks / plan.pairs)


def local_share(plan: LayerPlan) -> float:
    """Share of pairs that run on their source rank."""
    return float(
        plan.assign_RJ[plan.instance_rank_J, np.arange(plan.instance_rank_J.size)].sum() / plan.pairs
    )


def main(argv: list[str] | None = None) -> int:
    """Plan, compare, print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    args = parser.parse_args(argv)
    table = Table(title="peak (foreign instances; local share) | earlier implementation")
    table.add_column("system")
    cells: dict[str, list[str]] = {name: [] for name in ROWS}
    figures, worst = [], 0.0
    for case, (ranks, z) in enumerate(CASES):
        table.add_column(f"R={ranks} z={z}", justify="right")
        problem = toy_problem(ranks, z)
        for name, row in ROWS.items():
            plan = row.policy(ranks)(problem)
            plan.check(problem)
            found, expected = peak(plan), row.peaks[case]
            worst = max(worst, abs(found - expected))
            count = int(plan.replicas_R.sum())
            cells[name].append(f"{found:.3f} ({count}; {local_share(plan):.2f}) | {expected:.3f}")
            figures.append(
                figure(
                    f"toy.R{ranks}z{z}.{name}.peak",
                    round(found, 4),
                    "mean loads",
                    "lower",
                    seed=SEED,
                    slots=SLOTS,
                    earlier=expected,
                    foreign_instances=count,
                )
            )
    for name, texts in cells.items():
        table.add_row(name, *texts)
    Console(stderr=args.json, width=120).print(table)
    if args.json:
        for one in figures:
            print(json.dumps(one))
    print(f"largest difference: {worst:.4f} (allowed {TOLERANCE})", file=sys.stderr)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
