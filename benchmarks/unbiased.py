"""Whether a pruned gradient errs less and less when batches are averaged: the test of bias in training conditions.

A small model on 2 ranks (gloo, experts spread over both), gradient accumulation and activation checkpointing on, is
trained exactly for some steps; then its weights stand still. Of each of 32 batches the gradient of all parameters is
taken in full and pruned. Against the mean full gradient the mean pruned one errs by `.mean32`; `.one` is the mean error
of a single batch's pruned gradient against its own full one; `.ratio` is the first over the second. Independent errors
average out: `.ratio` then falls with the number of batches. What is always left out stays.

    python benchmarks/unbiased.py --json

Names: unbiased.<estimator>.drop<d>.one, .mean32, .ratio, relative errors of the whole gradient. For `sampled` the mean
must err less than one batch (exit code 1 otherwise); `topk` is reported.

Expected duration on 2 cores: 1 to 3 minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import command_line
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from lrmoe.telemetry import figure
from lrmoe.training.config import TrainConfig
from lrmoe.training.launch import run_workers
from lrmoe.training.loop import Trainer

RANKS = 2
CASES = [(estimator, drop) for estimator in ("sampled", "topk") for drop in (0.3, 0.5)]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors of a rule: of one batch's gradient (mean over batches), and of the mean gradient."""

    estimator: str
    drop: float
    one: float
    mean: float


def config_of(preset: str, seed: int, **lrmoe: Any) -> TrainConfig:
    """The run whose gradients are taken."""
    return TrainConfig.from_dict(
        {
            "model": {"preset": preset},
            "data": {"seq_len": 128, "limit": 4_000_000},
            "train": {
                "runs": tempfile.gettempdir(),
                "device": "cpu",
                "seed": seed,
                "batch_size": 4,
                "accumulate": 2,
                "activation_checkpointing": "non_reentrant",
                "trace": False,
            },
            "optim": {"lr": 3e-3, "warmup_steps": 5},
            "lrmoe": {"warmup_steps": 0, "seed": seed, **lrmoe},
        }
    )


def worker(preset: str, seed: int, warm_steps: int, batches: int) -> list[Errors]:
    """Every rule's errors, the same on all ranks."""
    group = dist.group.WORLD
    full = Trainer(config_of(preset, seed, max_drop=0.0), group)
    for _ in range(warm_steps):
        full.step()
    rules = [
        Trainer(config_of(preset, seed, max_drop=drop, estimator=estimator), group, corpus=full.corpus)
        for estimator, drop in CASES
    ]
    for rule in rules:
        rule.model.load_state_dict(full.model.state_dict())
    sums, one = [Tensor() for _ in range(len(rules) + 1)], [0.0] * len(rules)
    for number in range(batches):
        exact = gradient(full, warm_steps + number)
        sums[0] = exact if number == 0 else sums[0].add_(exact)
        for i, rule in enumerate(rules):
            found = gradient(rule, warm_steps + number)
            one[i] += relative(rule, found, exact) / batches
            sums[i + 1] = found if number == 0 else sums[i + 1].add_(found)
    return [
        Errors(estimator=estimator, drop=drop, one=one[i], mean=relative(rules[i], sums[i + 1], sums[0]))
        for i, (estimator, drop) in enumerate(CASES)
    ]


def gradient(trainer: Trainer, step: int) -> Tensor:
    """Gradient of a step's batch, fp64, of all parameters this rank holds; the weights stay as they are."""
    train, seq_len, total = trainer.config.train, trainer.config.data.seq_len, torch.zeros(())
    trainer.model.train()
    for number in range(train.accumulate):
        tokens = trainer.corpus.train_batch(
            seed=train.seed,
            step=step,
            micro_batch=number,
            rank=trainer.rank,
            world_size=trainer.world_size,
            size=train.batch_size,
            seq_len=seq_len,
        )
        logits = trainer.model(input_ids=tokens[:, :-1], use_cache=False).logits.flatten(0, 1)
        loss = functional.cross_entropy(logits.float(), tokens[:, 1:].flatten()) / train.accumulate
        loss.backward()
        total += loss.detach()
    trainer.parameters.reduce(total, 0.0)
    found = torch.cat([_of(entry.master).flatten() for entry in trainer.parameters.entries])
    trainer.parameters.zero_grad()
    trainer.handle.step()
    trainer.handle.telemetry.drain()
    return found


def _of(master: Tensor) -> Tensor:
    return torch.zeros_like(master, dtype=torch.float64) if master.grad is None else master.grad.double()


def relative(trainer: Trainer, found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over that of the exact gradient, dense parameters counted once."""
    sizes = [(entry.span is None, entry.master.numel()) for entry in trainer.parameters.entries]
    squares = torch.zeros(2, dtype=torch.float64)
    parts = zip(sizes, *(t.split([n for _, n in sizes]) for t in (found - exact, exact)), strict=True)
    for (dense, _), difference, whole in parts:
        if not dense or trainer.rank == 0:
            squares += torch.stack((difference.dot(difference), whole.dot(whole)))
    dist.all_reduce(squares)
    return float((squares[0] / squares[1]).sqrt())


def figures(errors: Sequence[Errors], batches: int, context: dict[str, Any]) -> list[dict[str, Any]]:
    """One figure per rule and quantity."""
    rows = []
    for e in errors:
        values = {"one": e.one, f"mean{batches}": e.mean, "ratio": e.mean / e.one}
        rows += [
            figure(f"unbiased.{e.estimator}.drop{e.drop:g}.{name}", value, "ratio", "lower", **context)
            for name, value in values.items()
        ]
    return rows


def show(errors: Sequence[Errors], batches: int) -> None:
    """The table, on stderr."""
    table = Table(title=f"relative error of pruned gradients: one batch, and the mean of {batches}")
    for name in ("estimator", "drop", "one batch", "mean", "mean / one"):
        table.add_column(name, justify="right")
    for e in errors:
        table.add_row(e.estimator, f"{e.drop:g}", f"{e.one:.4f}", f"{e.mean:.4f}", f"{e.mean / e.one:.2f}")
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", default="qwen3-moe-micro", help="model shape")
    parser.add_argument(
        "--warm-steps", type=int, default=100, help="exact steps before the weights stand still"
    )
    parser.add_argument("--batches", type=int, default=32)
    args = parser.parse_args(argv)
    arguments = (args.preset, args.seed, args.warm_steps, args.batches)
    errors: list[Errors] = run_workers("unbiased:worker", RANKS, arguments, time_limit_s=900)[0]
    show(errors, args.batches)
    context = {"preset": args.preset, "seed": args.seed, "ranks": RANKS, "warm_steps": args.warm_steps}
    for row in figures(errors, args.batches, context):
        print(json.dumps(row) if args.json else f"{row['name']:36} {row['value']:.4f}")
    return 0 if all(e.mean < e.one for e in errors if e.estimator == "sampled") else 1


if __name__ == "__main__":
    sys.exit(main())
