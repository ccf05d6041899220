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

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the hosts are those of the tests, which are no package that is installed

from tests.distributed.hosts import DEVICE, Host, two_hosts, why_not  # noqa: E402  # after the path is set

SYSTEMS = ("megatron", "symi", "ultraep", "lrmoe", "lrmoe-sampled50")
BALANCED = f"balanced:{BASELINE}"
RANKS, PORT = 2, 29500
LIMIT_S = 200.0
FREE = "40gbit"  # while the rate is not known yet: no limit in practice


def work(rank: int, address: str, call: Path) -> None:
    """One rank: execute the steps of a file of arguments."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=RANKS)
    arguments: dict[str, Any] = torch.load(
        call, weights_only=False
    )  # written by the parent, of its own types
    execute(arguments["steps"], arguments["size"], arguments["out"])
    dist.barrier()
    dist.destroy_process_group()


def run(hosts: Sequence[Host], folder: Path, steps: Sequence[Step], name: str) -> list[Call]:
    """Execute steps, a rank on each host.

    Raises:
        RuntimeError: a rank failed, or time ran out.
    """
    call, out = folder / f"{name}.pt", folder / f"{name}.jsonl"
    torch.save({"steps": list(steps), "size": StageSize(ranks=RANKS), "out": out}, call)
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--call",
        str(call),
        "--address",
        hosts[0].address,
    ]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
    logs = [folder / f"{name}-{rank}.log" for rank in range(RANKS)]
    started = [
        host.start([*command, "--rank", str(rank)], logs[rank], environment)
        for rank, host in enumerate(hosts)
    ]
    codes = _finish(started)
    if any(code != 0 for code in codes):
        tails = "\n".join(log.read_text(errors="replace")[-2000:] for log in logs)
        raise RuntimeError(f"the ranks ended with {codes}:\n{tails}")
    return stage_lines.read(out)


def _finish(started: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes once all have ended or one has failed; None for one that still ran then."""
    deadline = time.monotonic() + LIMIT_S
    codes = [process.poll() for process in started]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.1)
        codes = [process.poll() for process in started]
    for process in started:
        process.kill()
        process.wait()
    return codes


def widen(hosts: Sequence[Host]) -> None:
    """Large packets, as fast networks have: with small ones the kernel's work for them takes cores from the ranks."""
    for host in hosts:
        subprocess.run(host.command("ip", "link", "set", DEVICE, "mtu", "65000"), check=True, timeout=10)


def limit(hosts: Sequence[Host], bytes_per_s: float) -> None:
    """Set the rate of the link each way."""
    rate = ["rate", f"{round(bytes_per_s * 8)}bit", "burst", "1mb", "latency", "50ms"]
    for host in hosts:
        subprocess.run(
            host.command("tc", "qdisc", "change", "dev", DEVICE, "root", "tbf", *rate), check=True, timeout=10
        )


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
    with tempfile.TemporaryDirectory() as name, two_hosts(Path(name), rate=FREE) as hosts:
        widen(hosts)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON lines on stdout")
    parser.add_argument(
        "--run", type=Path, default=ROOT / "runs" / "headline", help="folder with trajectories"
    )
    parser.add_argument("--model", default=FULL.models[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100, 150, 200], help="recorded steps")
    for name, kind in (("--call", Path), ("--address", str), ("--rank", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.call is not None:
        work(args.rank, args.address, args.call)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        reason = why_not(Path(folder))
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
    code = main()
    sys.stdout.flush()
    os._exit(code) if "--call" in sys.argv else sys.exit(code)  # a rank has nothing to clean up
