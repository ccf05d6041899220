"""Whether `max_added_variance` holds its promise while the data drift.

One layer, 400 training calls. Over them the popular experts change, popularity gets more uneven, the spread of gradient
norms grows sixfold and falls again, and which experts' tokens have large gradients changes too. The variance that
sampling adds is measured in every call from the scores themselves, over that of the gradient (all ranks together).
Three limits, one rank and four (gloo); `drop="always"` with `max_drop=0.95`, so that the limit
alone binds.

    python benchmarks/fidelity.py --json

Names: fidelity.limit<l>.ep<n>.worst_over_limit, the largest mean over 50 consecutive calls over the limit: <= 1.1 (exit
code 1 otherwise); .kept_share, the mean over calls of what the limit left to backward.

Expected duration on 2 cores: 1 to 3 minutes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import command_line
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lrmoe import LRMoEConfig
from lrmoe.layer import MoELayer
from lrmoe.telemetry import figure
from lrmoe.training.launch import run_workers

LIMITS = (0.05, 0.2, 0.5)
RANKS = (1, 4)
WINDOW = 50
PROMISE = 1.1
EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 16, 2, 32, 16, 1024


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the calls under one limit measured.

    Attributes:
        added: per call, variance added over the gradient's own. shares: per call, kept pairs of all.
    """

    limit: float
    ranks: int
    added: list[float]
    shares: list[float]

    @property
    def worst(self) -> float:
        """Largest mean over WINDOW consecutive calls, over the limit."""
        sums = [sum(self.added[i : i + WINDOW]) for i in range(max(len(self.added) - WINDOW, 0) + 1)]
        return max(sums) / min(WINDOW, len(self.added)) / self.limit

    @property
    def kept_share(self) -> float:
        """Mean over calls."""
        return sum(self.shares) / len(self.shares)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Inputs of one call: (T, H), (T, K), (T, K), and the gradient at the output (T, H)."""

    x: Tensor
    ids: Tensor
    alpha: Tensor
    grad: Tensor


def batch(call: int, calls: int, seed: int) -> Batch:
    """The call's data at its place in the drift."""
    drawn, place = torch.Generator().manual_seed(seed * 100_003 + call), call / max(calls - 1, 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn)

    turn = 2 * math.pi * torch.arange(EXPERTS) / EXPERTS
    popular_E = (0.3 + 1.7 * place) * torch.cos(turn + 2 * math.pi * place)
    top = torch.topk(normal(TOKENS, EXPERTS) + popular_E, TOP_K)
    spread = 0.25 + 1.25 * math.sin(math.pi * place) ** 2
    loud_E = torch.cos(3 * turn - 4 * math.pi * place)
    scale_T = torch.exp(spread * normal(TOKENS) + loud_E[top.indices[:, 0]])
    return Batch(
        x=normal(TOKENS, HIDDEN),
        ids=top.indices,
        alpha=top.values.softmax(dim=-1),
        grad=normal(TOKENS, HIDDEN) * scale_T[:, None],
    )


def worker(limit: float, calls: int, seed: int) -> list[tuple[float, float, float]]:
    """This rank's (variance added, energy, kept share) of every call."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, ranks = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
    config = LRMoEConfig(max_drop=0.95, max_added_variance=limit, warmup_steps=0, seed=seed)
    layer = MoELayer(
        num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=WIDTH, config=config, group=group
    )
    drawn = torch.Generator().manual_seed(seed)
    shapes = {"gate_up": (EXPERTS, 2 * WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    home = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    weights = [
        (torch.randn(*shape, generator=drawn) / shape[-1] ** 0.5)[home].requires_grad_()
        for shape in shapes.values()
    ]
    part = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    for call in range(calls):
        data = batch(call, calls, seed)
        x, alpha = data.x[part].requires_grad_(), data.alpha[part].requires_grad_()
        layer(x, data.ids[part], alpha, *weights, training=True).backward(data.grad[part])
        layer.clock.advance()
    return [(r.variance_added, r.energy, r.kept_share) for r in layer.telemetry.drain()]


def measured(limit: float, ranks: int, calls: int, seed: int) -> Kept:
    """All ranks' calls under one limit."""
    arguments = (limit, calls, seed)
    by_rank = (
        [worker(*arguments)]
        if ranks == 1
        else run_workers("fidelity:worker", ranks, arguments, time_limit_s=600)
    )
    found = list(zip(*by_rank, strict=True))
    return Kept(
        limit=limit,
        ranks=ranks,
        added=[_ratio(sum(c[0] for c in call), sum(c[1] for c in call)) for call in found],
        shares=[call[0][2] for call in found],
    )


def _ratio(added: float, energy: float) -> float:
    """0 in a call that left nothing out: it is not scored."""
    return added / energy if energy else 0.0


def figures(cases: Sequence[Kept], context: dict[str, Any]) -> list[dict[str, Any]]:
    """Two figures per limit and number of ranks."""
    rows = []
    for case in cases:
        name = f"fidelity.limit{case.limit:g}.ep{case.ranks}"
        rows += [
            figure(f"{name}.worst_over_limit", case.worst, "ratio", "lower", **context),
            figure(f"{name}.kept_share", case.kept_share, "share", "higher", **context),
        ]
    return rows


def show(cases: Sequence[Kept]) -> None:
    """The table, on stderr."""
    table = Table(title=f"added variance while data drift, means over {WINDOW} calls")
    for name in ("limit", "ranks", "worst mean / limit", "mean / limit", "kept share", "least", "most"):
        table.add_column(name, justify="right")
    for case in cases:
        mean = sum(case.added) / len(case.added) / case.limit
        shares = (case.kept_share, min(case.shares), max(case.shares))
        table.add_row(
            f"{case.limit:g}",
            f"{case.ranks}",
            f"{case.worst:.3f}",
            f"{mean:.3f}",
            *(f"{s:.2f}" for s in shares),
        )
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=400)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    cases = [measured(limit, ranks, args.calls, args.seed) for ranks in RANKS for limit in LIMITS]
    show(cases)
    for row in figures(cases, {"calls": args.calls, "seed": args.seed}):
        print(json.dumps(row) if args.json else f"{row['name']:44} {row['value']:.4f}")
    return 0 if all(case.worst <= PROMISE for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
