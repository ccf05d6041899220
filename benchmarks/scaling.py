"""How the layer's time grows with tokens, experts and experts per token: nothing may grow faster than its input.

One of the three is varied, the others stay (4096 tokens, 32 experts, top-4; hidden 64, width 32, fp32, drop 0.3, one
rank). Sizes take turns in every round; a phase's time is thread CPU time on one thread, the median over rounds. An
exponent is the slope of log time over log size by least squares.

Judged is the upper half of the sizes, where fixed costs do not hide growth: there the median slope between neighbouring
sizes is at most 1.1 for the layer and for every phase that takes more than 2 % of it at the largest size (0.1 for noise
and for caches that no longer hold everything). The median, because a step is no growth: buffers above 32 MiB, for one,
are mapped anew by the C library in every call, which costs page faults from there on.

    python benchmarks/scaling.py --json

Names: scaling.<tokens|experts|top_k>.exponent (the whole layer, all sizes), with those of every phase and the times
in its context; .steepest_phase, of those judged. With more experts the rows stay the same, so what grows is work per
expert.

Exit code 1: something grows faster. Expected duration on 2 cores: 1 to 3 minutes.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import command_line
import torch
from layer_variants import Case, make_data, ours
from rich.console import Console
from rich.table import Table
from rounds import spread

from lrmoe.layer import MoELayer
from lrmoe.telemetry import PHASES, figure

SIZES: Mapping[str, tuple[int, ...]] = {
    "tokens": (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "experts": (8, 16, 32, 64, 128, 256),
    "top_k": (1, 2, 4, 8, 16),
}
BASE = Case(hidden=64, width=32, experts=32, top_k=4, tokens=4096)
DROP = 0.3
BOUND = 1.1
COUNTS = 0.02  # least share of the layer at the largest size of a phase that is judged
TOTAL, OUTSIDE = "layer", "outside phases"

PhaseTimes = Mapping[str, Sequence[float]]  # milliseconds by phase, one for each size


def measure(
    name: str, sizes: Sequence[int], rounds: int, seed: int
) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Median thread milliseconds of every phase, of what lies outside them and of the whole call, by size.

    Returns:
        these, and the whole call's of every round.
    """
    made = [
        ours(case, make_data(case, torch.float32, seed), DROP)
        for case in (replace(BASE, **{name: size}) for size in sizes)
    ]
    found: list[list[dict[str, float]]] = [[] for _ in sizes]
    for done in range(rounds + 2):  # the first two warm up
        for place, (run, layer) in enumerate(made):
            times = _call_ms(run, layer)
            if done > 1:
                found[place].append(times)
    names = (TOTAL, *PHASES, OUTSIDE)
    medians = {
        name: [statistics.median(ms.get(name, 0.0) for ms in calls) for calls in found] for name in names
    }
    by_round = [[ms[TOTAL] for ms in calls] for calls in zip(*found, strict=True)]
    return {name: times for name, times in medians.items() if any(times)}, by_round


def _call_ms(run: Callable[[], None], layer: MoELayer) -> dict[str, float]:
    """One call, forward and backward."""
    begin = time.thread_time()
    run()
    total = (time.thread_time() - begin) * 1e3
    phases = layer.telemetry.drain()[0].ms
    return {TOTAL: total, **phases, OUTSIDE: total - sum(phases.values())}


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Slope of log time over log size, by least squares.

    Raises:
        ValueError: fewer than two sizes, or a time that is not positive.
    """
    if len(sizes) < 2 or min(times) <= 0:
        raise ValueError(f"sizes={list(sizes)}, times={list(times)}: two sizes or more, times above 0")
    x, y = [math.log(size) for size in sizes], [math.log(time) for time in times]
    return statistics.linear_regression(x, y).slope


def upper(values: Sequence[Any]) -> Sequence[Any]:
    """The upper half, the middle one included; at least two."""
    return values[min(len(values) // 2, len(values) - 2) :]


def exponents(sizes: Sequence[int], times: PhaseTimes) -> dict[str, float]:
    """By phase; those that have no time at some size are left out."""
    return {name: exponent(sizes, values) for name, values in times.items() if min(values) > 0}


def steepness(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Median slope of log time over log size between neighbours in the upper half of the sizes."""
    places = list(zip(upper(sizes), upper(times), strict=True))
    return statistics.median(exponent(*zip(*both, strict=True)) for both in pairwise(places))


def judged(sizes: Sequence[int], times: PhaseTimes) -> dict[str, float]:
    """Steepness of the layer and of the phases whose time counts."""
    least = COUNTS * times[TOTAL][-1]
    return {
        name: steepness(sizes, values)
        for name, values in times.items()
        if values[-1] >= least and min(values) > 0
    }


def figures_of(
    name: str,
    sizes: Sequence[int],
    times: PhaseTimes,
    by_round: Sequence[Sequence[float]],
    context: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The exponent of the layer's time, with all that it was made of, and the steepest phase of those judged."""
    steep = judged(sizes, times)
    steepest = max(steep, key=lambda phase: steep[phase])
    about = {
        "spread": round(spread([exponent(sizes, layer) for layer in by_round]), 4),
        "sizes": list(sizes),
        "exponents": _rounded(exponents(sizes, times)),
        "steepness": _rounded({n: steepness(sizes, v) for n, v in times.items() if min(v) > 0}),
        "above_linear": _rounded({phase: value for phase, value in steep.items() if value > BOUND}),
        "ms": {phase: [round(value, 4) for value in values] for phase, values in times.items()},
    }
    whole = round(exponent(sizes, times[TOTAL]), 3)
    return [
        figure(f"scaling.{name}.exponent", whole, "exponent", "lower", **about, **context),
        figure(
            f"scaling.{name}.steepest_phase", round(steep[steepest], 3), "exponent", "lower",
            phase=steepest, share=round(times[steepest][-1] / times[TOTAL][-1], 3), **context,
        ),
    ]  # fmt: skip


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def show(row: Mapping[str, Any]) -> None:
    """Milliseconds by phase and size, and the exponents, on stderr."""
    context = row["context"]
    table = Table(title=f"ms of one layer call by {row['name'].split('.')[1]}")
    table.add_column("phase")
    for column in (*context["sizes"], "exponent", "steepness"):
        table.add_column(str(column), justify="right")
    for phase, times in context["ms"].items():
        slopes = (context[half].get(phase) for half in ("exponents", "steepness"))
        cells = [f"{ms:.3g}" for ms in times] + ["-" if s is None else f"{s:.2f}" for s in slopes]
        table.add_row(phase, *cells, style="bold red" if phase in context["above_linear"] else None)
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vary", choices=tuple(SIZES), action="append", help="default: all")
    parser.add_argument("--most", type=int, help="no size above this")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    context = {"base": asdict(BASE), "drop": DROP, "rounds": args.rounds, "seed": args.seed, "bound": BOUND}
    rows = []
    for name in args.vary or SIZES:
        sizes = [size for size in SIZES[name] if args.most is None or size <= args.most]
        rows += figures_of(name, sizes, *measure(name, sizes, args.rounds, args.seed), context)
        show(rows[-2])
    for row in rows:
        print(json.dumps(row) if args.json else f"{row['name']:45} {row['value']:.3f}")
    return int(any(row["context"].get("above_linear") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
