"""Forward and backward of one MoE layer against transformers' own experts, side by side in one run: time and memory.

Shapes: hidden 512, expert width 192, 32 experts, top-8, 4096 tokens, lognormal popularity. Variants take turns within
each round; times are medians over rounds, ratios are medians of per-round ratios, on 2 threads and on 1. One thread is
timed by the process's CPU time, which other processes do not lengthen, more of them by the wall's clock.

    python benchmarks/layer.py --json

Names: layer.<dtype>.drop<d>.over_best_peer, layer.<dtype>.drop0.over_gemms (at most 1.35), .drop0.2.overhead_share
(0.04), .drop0.5.over_drop0 (its own time, 0.72), .masked_twin.over_drop0. They mean 2 threads; a suffix such as .t1
tells another number. Below 1 is better, or the share of the layer that pruning adds.

memory.<dtype>.drop<d>.over_grouped_mm: the most bytes that forward and backward hold at once beside what was there
before, gradients included and scratch given back before, over the same of transformers' grouped_mm; every tensor
storage is followed (`lrmoe.telemetry.tracking`). At drop 0.5 activations are computed again
(`activations="recompute"`); at most 0.9 at drop 0 and 0.6 there. Threads change nothing in it. The context has the same
ratio as the allocator saw it, with what operators hold inside themselves (bf16 products on CPU do).

Expected duration on 2 cores: 4 to 8 minutes; --dtype fp32 --threads 2 alone 1 to 2 minutes. Progress goes to standard
error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from layer_data import Data
from layer_variants import DTYPES, Case, bare_gemms, make_data, masked_twin, ours, peer
from rich.console import Console
from rich.table import Table
from rounds import Times, measure, ratios, spread

from lrmoe.layer import MoELayer, release_scratch
from lrmoe.ops import fuses
from lrmoe.telemetry import figure
from lrmoe.telemetry.tracking import StorageTracker, profiled_peak

DROPS = (0.0, 0.2, 0.5)
ACTIVATIONS = {0.0: "auto", 0.2: "auto", 0.5: "recompute"}  # of the memory figures
THREADS = (2, 1)
NAMED_THREADS = 2  # what a figure's name means without a suffix
ADDED_PHASES = ("score", "select", "reroute")
BLOCK_ROWS = 1024


def overhead_shares(
    layer: MoELayer, run: Callable[[], None], rounds: int, dtype: torch.dtype, threads: int
) -> list[float]:
    """By round, the share of the layer's time in phases that only pruning has and in the one copy made only for it.

    That copy gathers the kept rows of the stash, block by block, where no compiled pass reads them where they lie.
    """
    layer.telemetry.drain()
    shares = []
    for _ in range(rounds):
        run()
        record = layer.telemetry.drain()[0]
        phases = record.ms if threads == 1 else record.wall_ms
        added = sum(phases.get(phase, 0.0) for phase in ADDED_PHASES)
        copied = 0.0
        if not fuses(torch.device("cpu"), dtype):
            copied = stash_copy_ms(record.pairs, record.kept, layer, dtype, clock_of(threads))
        shares.append((added + copied) / sum(phases.values()))
    return shares


def clock_of(threads: int) -> Callable[[], float]:
    """What tells the time of so many threads."""
    return time.process_time if threads == 1 else time.perf_counter


def stash_copy_ms(
    pairs: int, kept: int, layer: MoELayer, dtype: torch.dtype, clock: Callable[[], float]
) -> float:
    """Milliseconds to gather `kept` of `pairs` stash rows as backward does then, a block at a time."""
    stash = torch.zeros(pairs, 2 * layer.shape.width, dtype=dtype)
    index = torch.randperm(pairs)[:kept].sort().values
    block = torch.empty(BLOCK_ROWS, stash.shape[1], dtype=stash.dtype)
    begin = clock()
    for part in index.split(BLOCK_ROWS):
        torch.index_select(stash, 0, part, out=block[: len(part)])
    return (clock() - begin) * 1e3


def bench_times(
    case: Case, name: str, rounds: int, seed: int, threads: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Times of all variants in one dtype, and the overhead shares at drop 0.2."""
    torch.set_num_threads(threads)
    data = make_data(case, DTYPES[name], seed)
    runs = {"eager": peer(case, data, "eager"), "grouped_mm": peer(case, data, "grouped_mm")}
    layers = {}
    for drop in DROPS:
        runs[f"drop{drop:g}"], layers[drop] = ours(case, data, drop)
    runs["masked_twin"] = masked_twin(case, data, 0.5)
    runs["gemms"] = bare_gemms(case, data)
    title = f"{name}, {threads} thread{'s' * (threads > 1)}"
    times = measure(runs, rounds, title, clock=clock_of(threads))
    return times, overhead_shares(layers[0.2], runs["drop0.2"], rounds, DTYPES[name], threads)


def time_figures(
    name: str, times: Times, overheads: Sequence[float], threads: int, context: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The named ratios of one dtype and number of threads."""
    rows = {
        f"layer.{name}.drop{drop:g}.over_best_peer": ratios(times, f"drop{drop:g}", "eager", "grouped_mm")
        for drop in DROPS
    }
    rows[f"layer.{name}.drop0.over_gemms"] = ratios(times, "drop0", "gemms")
    rows[f"layer.{name}.drop0.2.overhead_share"] = list(overheads)
    rows[f"layer.{name}.drop0.5.over_drop0"] = ratios(times, "drop0.5", "drop0")
    rows[f"layer.{name}.masked_twin.over_drop0"] = ratios(times, "masked_twin", "drop0")
    medians = {variant: round(statistics.median(values), 2) for variant, values in times.items()}
    suffix = "" if threads == NAMED_THREADS else f".t{threads}"
    return [
        figure(
            key + suffix, round(statistics.median(values), 4), "ratio", "lower",
            spread=round(spread(values), 4), median_ms=medians, **context,
        )
        for key, values in rows.items()
    ]  # fmt: skip


def peak_bytes(run: Callable[[], None], data: Data) -> dict[str, int]:
    """Most bytes of one forward and backward: by followed storages, and by the allocator as the profiler saw it."""
    run()  # what is made once and stays is there
    found = {}
    for witness, watch in (("tracked", _tracked), ("profiled", profiled_peak)):
        data.clear()
        release_scratch()
        found[witness] = watch(run)
    return found


def _tracked(run: Callable[[], None]) -> int:
    tracker = StorageTracker()
    with tracker:
        run()
    return tracker.peak


def memory_figures(case: Case, name: str, seed: int, context: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Peak memory of the layer over that of transformers' grouped_mm, at every drop."""
    data = make_data(case, DTYPES[name], seed)
    other = peak_bytes(peer(case, data, "grouped_mm"), data)
    rows = []
    for drop in DROPS:
        mine = peak_bytes(ours(case, data, drop, ACTIVATIONS[drop])[0], data)
        rows.append(
            figure(
                f"memory.{name}.drop{drop:g}.over_grouped_mm", round(mine["tracked"] / other["tracked"], 4),
                "ratio", "lower", bytes=mine["tracked"], grouped_mm_bytes=other["tracked"],
                by_profiler=round(mine["profiled"] / other["profiled"], 4), activations=ACTIVATIONS[drop], **context,
            )
        )  # fmt: skip
    return rows


def show(results: Mapping[str, Times]) -> None:
    """Median milliseconds of every variant, on stderr."""
    table = Table(title="forward + backward, median ms")
    table.add_column("variant")
    for title in results:
        table.add_column(title, justify="right")
    for variant in next(iter(results.values())):
        table.add_row(variant, *(f"{statistics.median(times[variant]):.1f}" for times in results.values()))
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON lines on stdout")
    parser.add_argument("--threads", type=int, action="append", help="may be given again; default: 2 and 1")
    parser.add_argument("--rounds", type=int, default=15, help="0: memory alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=tuple(DTYPES), action="append", help="default: all")
    args = parser.parse_args(argv)
    case, results, rows = Case(), {}, []
    for name in args.dtype or DTYPES:
        rows += memory_figures(case, name, args.seed, {"seed": args.seed, "case": vars(case)})
        for threads in (args.threads or THREADS) if args.rounds else ():
            times, overheads = bench_times(case, name, args.rounds, args.seed, threads)
            results[f"{name}, {threads}"] = times
            clock = "CPU time" if threads == 1 else "wall"
            context = {"seed": args.seed, "rounds": args.rounds, "clock": clock, "case": vars(case)}
            rows += time_figures(name, times, overheads, threads, context)
    if results:
        show(results)
    for row in rows:
        print(json.dumps(row) if args.json else f"{row['name']:45} {row['value']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
