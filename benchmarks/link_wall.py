"""Wall clock of MoE layer calls over a link of limited speed: two ranks, each in a network namespace of its own.

The stage's calls (recorded routing at hidden = width = 128, docs/results.md) run on two ranks that share the recorded
batch, joined by a token bucket. Its rate is found first: the one at which the exchange of a call with balanced counts
takes half as long as its compute, a third of the call. Nothing is modelled: the figure is what a clock on the wall saw
from the first phase of a call to the last, the slower rank counting. With two ranks counts are far less uneven than
with eight, so systems lie closer together than on the critical path at EP 8.

    sudo python benchmarks/link_wall.py --run runs/headline --json

Needs root, iproute2 and a run of `make headline` or `make headline-quick` to read; without the first two it says so and
prints nothing. Names: link_wall.<system>.wall_over_symi, .wall_over_ultraep and .wall_ms (a layer call, mean).

Expected duration on 2 cores: 2 to 4 minutes.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
from host_pair import (
    RANKS,
    ROOT,
    Host,
    host_pair,
    leave,
    limit,
    rank_of_pair,
    rank_options,
    run_pair,
    why_not,
)
from rich.console import Console
from rich.table import Table

from lrmoe.experiments.headline.question import FULL, Headline
from lrmoe.experiments.stage import lines as stage_lines
from lrmoe.experiments.stage.inputs import StageSize
from lrmoe.experiments.stage.lines import Call
from lrmoe.experiments.stage.rank import execute
from lrmoe.experiments.stage.run import Block, Step
from lrmoe.experiments.trajectories.trajectory import DONE
from lrmoe.report.data import BASELINE
from lrmoe.telemetry.figures import figure

SYSTEMS = ("megatron", "symi", "ultraep", "lrmoe", "lrmoe-sampled50")
BALANCED = f"balanced:{BASELINE}"


def work(rank: int, address: str, call: Path) -> None:
    """One rank: execute the steps of a file of arguments."""
    with rank_of_pair(rank, address, call) as arguments:
        execute(arguments["steps"], arguments["size"], arguments["out"])


def run(hosts: Sequence[Host], folder: Path, steps: Sequence[Step], name: str) -> list[Call]:
    """Execute steps, a rank on each host."""
    out = folder / f"{name}.jsonl"
    arguments = {"steps": list(steps), "size": StageSize(ranks=RANKS), "out": out}
    run_pair(hosts, Path(__file__), folder, name, arguments)
    return stage_lines.read(out)


def block_of(folder: Path, model: str, seed: int, last: int) -> Block:
    """The finished trajectories of a headline's run, in absolute paths: ranks have a directory of their own."""
    headline = Headline(folder=folder.resolve())
    folders = {name: headline.trajectory(model, 0.0, seed, name) for name in SYSTEMS}
    finished = {name: path for name, path in folders.items() if (path / DONE).exists()}
    return Block(model=model, aux=0.0, seed=seed, folders=finished, last_step=dict.fromkeys(finished, last))


def measure(block: Block, numbers: Sequence[int]) -> tuple[list[Call], float]:
    """Calls of some steps over the limited link, and its speed in bytes per second."""
    systems = tuple(block.folders)
    steps = [Step(block=block, number=n, systems=systems, balanced=n in numbers[:2]) for n in numbers]
    only_fixed = dataclasses.replace(
        block, folders={BASELINE: block.folders[BASELINE]}, last_step={BASELINE: max(numbers)}
    )
    first = [dataclasses.replace(step, block=only_fixed, systems=(BASELINE,)) for step in steps[:2]]
    with tempfile.TemporaryDirectory() as name, host_pair(Path(name)) as hosts:
        print("link_wall: finding the rate", file=sys.stderr, flush=True)
        speed = stage_lines.link_of(run(hosts, Path(name), first, "rate"), BALANCED)[
            block.model, block.activations
        ]
        limit(hosts, speed)
        print(f"link_wall: {speed * 8 / 1e6:.0f} Mbit/s each way", file=sys.stderr, flush=True)
        return run(hosts, Path(name), steps, "wall"), speed


def figures(calls: Sequence[Call], speed: float, **context: Any) -> list[dict[str, Any]]:
    """Mean wall time of a call by system, over SYMI's and UltraEP's."""
    wall = {
        name: statistics.fmean(call.wall_ms for call in calls if call.system == name)
        for name in dict.fromkeys(call.system for call in calls)
    }
    compute = statistics.fmean(call.cpu_ms / RANKS for call in calls if call.system == BALANCED)
    about = {
        **context,
        "ranks": RANKS,
        "link_bytes_per_s": round(speed),
        "exchange_share_of_balanced_call": round(1 - compute / wall[BALANCED], 4),
        "calls": sum(call.system == "symi" for call in calls),
    }
    found = []
    for name in (name for name in SYSTEMS if name in wall):
        for other in ("symi", "ultraep"):
            if name != other and other in wall:
                value = round(wall[name] / wall[other], 4)
                found.append(figure(f"link_wall.{name}.wall_over_{other}", value, "ratio", "lower", **about))
        found.append(figure(f"link_wall.{name}.wall_ms", round(wall[name], 2), "ms", "lower", **about))
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table on stderr."""
    table = Table("system", "ms a layer call", "over symi", title="wall clock over a limited link")
    values = {row["name"]: row["value"] for row in rows}
    for name in (name for name in SYSTEMS if f"link_wall.{name}.wall_ms" in values):
        over = values.get(f"link_wall.{name}.wall_over_symi", 1.0)
        table.add_row(name, f"{values[f'link_wall.{name}.wall_ms']:.1f}", f"{over:.3f}")
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--run", type=Path, default=ROOT / "runs" / "headline", help="folder with trajectories"
    )
    parser.add_argument("--model", default=FULL.models[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100, 150, 200], help="recorded steps")
    rank_options(parser)
    args = parser.parse_args(argv)
    if args.call is not None:
        work(args.rank, args.address, args.call)
        return 0
    reason = why_not()
    if reason is not None:
        print(f"link_wall: skipped, it {reason}", file=sys.stderr)
        return 0
    block = block_of(args.run, args.model, args.seed, max(args.steps))
    if not {"symi", "ultraep"} <= block.folders.keys():
        print(
            f"link_wall: no finished trajectories in {args.run}: run `make headline` first", file=sys.stderr
        )
        return 2
    calls, speed = measure(block, args.steps)
    rows = figures(calls, speed, seed=args.seed, model=args.model, steps=args.steps)
    show(rows)
    for row in rows:
        print(json.dumps(row) if args.json else f"{row['name']:45} {row['value']:.3f}")
    return 0


if __name__ == "__main__":
    leave(main())
