"""Many steps of MoE layers under drifting skew: is memory flat, and does nothing leak?

The layer is used directly, on four gloo ranks: two layers, a router that learns, SGD; 1 to 3 micro-batches a step of 0
to 160 tokens, other numbers on every rank; popular experts that drift once around all experts in 60 steps; half of the
pairs left out of backward, replicas, the exact gradient of a layer beside the pruned one every 20 steps, an evaluation
every 10.

    python benchmarks/soak.py --json

Names: soak.steps (done), soak.rss_growth (resident memory of a rank, median over the last drift over that after the
warm-up, minus 1; the worst rank), soak.ledger_growth (of the booked bytes of each step's largest call: mean over the
drift and all ranks), soak.open_files_growth, soak.threads_growth and soak.processes_growth (the most at the end minus
the most after the warm-up, worst rank). Targets: at most 0.02 each for memory, 0 for the others.

Expected duration on 2 cores: 1 to 2 minutes for 300 steps, 5 to 10 for 2000.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command_line
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lrmoe import LRMoEConfig
from lrmoe.layer import MoELayer, StepClock
from lrmoe.telemetry import Telemetry, figure
from lrmoe.training.launch import run_workers

RANKS, LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 2, 16, 2, 64, 48
DRIFT = 60  # steps in which the popular experts go around once, and batch sizes have met every place of it
WARM_UP = 2 * DRIFT  # steps
TOKENS = (96, 0, 160, 17, 128, 64, 5, 80, 1, 144)  # of a micro-batch, taken in turns
LIMIT = 0.02  # growth of memory
CONFIG: dict[str, Any] = {
    "max_drop": 0.5, "warmup_steps": 5, "replica_slots": 2, "check_every": 20, "max_added_variance": 0.5,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One rank after one step.

    Attributes:
        rss: resident bytes. ledger: booked bytes of the largest call of the step.
        open_files, threads, processes: of this process; processes are its children.
    """

    rss: int
    ledger: int
    open_files: int
    threads: int
    processes: int


class Block:
    """A router and an MoE layer."""

    def __init__(
        self, layer: int, clock: StepClock, telemetry: Telemetry, generator: torch.Generator
    ) -> None:
        group = dist.group.WORLD if dist.is_initialized() else None
        ranks = 1 if group is None else dist.get_world_size()

        def weight(*shape: int) -> Tensor:
            return (0.1 * torch.randn(*shape, generator=generator)).requires_grad_()

        self.router = weight(EXPERTS, HIDDEN)
        self.gate_up, self.down = weight(EXPERTS, 2 * WIDTH, HIDDEN), weight(EXPERTS, HIDDEN, WIDTH)
        rank, local = (0 if group is None else dist.get_rank()), EXPERTS // ranks
        mine = slice(rank * local, (rank + 1) * local)
        self.gate_up, self.down = (
            w.detach()[mine].clone().requires_grad_() for w in (self.gate_up, self.down)
        )
        self._layer = MoELayer(
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            config=LRMoEConfig(**CONFIG),
            group=group,
            layer=layer,
            clock=clock,
            telemetry=telemetry,
        )

    def __call__(self, x_TH: Tensor, bias_E: Tensor, *, training: bool) -> Tensor:
        """Residual MoE layer on (T, H)."""
        chances, ids = (x_TH @ self.router.T + bias_E).softmax(dim=-1).topk(TOP_K, dim=-1)
        return x_TH + self._layer(x_TH, ids, chances, self.gate_up, self.down, training=training)

    @property
    def weights(self) -> list[Tensor]:
        return [self.router, self.gate_up, self.down]


def popularity(step: int) -> Tensor:
    """(E,) logits' bias: one hump of popular experts, which wanders."""
    phase = torch.arange(EXPERTS) / EXPERTS - step / DRIFT
    return 3.0 * torch.cos(2 * math.pi * phase)


def soak(steps: int, seed: int) -> list[Sample]:
    """Worker: a sample after every step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    shared, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1 + rank)
    clock, telemetry = StepClock(), Telemetry()
    blocks = [Block(layer, clock, telemetry, shared) for layer in range(LAYERS)]
    optimizer = torch.optim.SGD([weight for block in blocks for weight in block.weights], lr=1e-3)
    samples = []
    for step in range(steps):
        for number in range(1 + step % 3):
            tokens = TOKENS[(step + 3 * number + rank) % len(TOKENS)]
            _call(blocks, torch.randn(tokens, HIDDEN, generator=own), step, training=True)
        if step % 10 == 9:
            _call(blocks, torch.randn(TOKENS[rank], HIDDEN, generator=own), step, training=False)
        optimizer.step()
        optimizer.zero_grad()
        clock.advance()
        samples.append(_sample(telemetry))
        if rank == 0 and (step + 1) % 100 == 0:
            sys.stderr.write(f"step {step + 1} of {steps}: {samples[-1].rss / 2**20:.1f} MiB\n")
    return samples


def _call(blocks: list[Block], x_TH: Tensor, step: int, *, training: bool) -> None:
    bias_E = popularity(step)
    with torch.set_grad_enabled(training):
        for block in blocks:
            x_TH = block(x_TH, bias_E, training=training)
    if training:
        (x_TH.square().sum() / 1000).backward()


def _sample(telemetry: Telemetry) -> Sample:
    process = Path("/proc/self")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    children = (process / "task" / str(os.getpid()) / "children").read_text().split()
    return Sample(
        rss=int(status["VmRSS"].split()[0]) * 1024,
        ledger=max(record.buffer_peak_bytes for record in telemetry.drain()),
        open_files=len(list((process / "fd").iterdir())),
        threads=int(status["Threads"]),
        processes=len(children),
    )


def windows(samples: list[Sample], name: str) -> tuple[float, float]:
    """One rank's figure over the drift after the warm-up, and over the last."""
    middle = {"rss": statistics.median, "ledger": statistics.mean}.get(name, max)
    parts = samples[WARM_UP : WARM_UP + DRIFT], samples[-DRIFT:]
    first, last = (float(middle([getattr(sample, name) for sample in part])) for part in parts)
    return first, last


def bench(steps: int, ranks: int, seed: int) -> list[dict[str, Any]]:
    """All figures."""
    by_rank: list[list[Sample]] = run_workers(
        "soak:soak", ranks, (steps, seed), time_limit_s=60 + 2.0 * steps
    )
    context = {"ranks": ranks, "seed": seed, "warm_up": WARM_UP, "window": DRIFT, "config": CONFIG}
    rows = [figure("soak.steps", steps, "steps", "higher", **context)]
    for item in dataclasses.fields(Sample):
        found = [windows(samples, item.name) for samples in by_rank]
        if (
            item.name == "ledger"
        ):  # where the drawn tokens go is chance on one rank, on all together it averages out
            found = [(sum(first for first, _ in found), sum(last for _, last in found))]
        memory = item.name in ("rss", "ledger")
        worst = max(last / first - 1 if memory else last - first for first, last in found)
        unit, name = "share" if memory else "count", f"soak.{item.name}_growth"
        rows.append(figure(name, round(worst, 4), unit, "lower", windows=found, **context))
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("figure", "value", "limit", title="growth between the warm-up and the end")
    for row in rows:
        table.add_row(
            row["name"], f"{row['value']:g}", "" if row["name"] == "soak.steps" else f"{limit(row):g}"
        )
    Console(stderr=True).print(table)


def limit(row: dict[str, Any]) -> float:
    return LIMIT if row["unit"] == "share" else 0.0


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json. Exit code 1 where a target is missed."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=RANKS, help="1, 2, 4, 8 or 16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.steps < WARM_UP + 2 * DRIFT:
        parser.error(f"--steps {args.steps}: must be at least {WARM_UP + 2 * DRIFT}: warm-up and two drifts")
    rows = bench(args.steps, args.ranks, args.seed)
    show(rows)
    if args.json:
        for row in rows:
            print(json.dumps(row))
    return int(any(row["value"] > limit(row) for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
