"""Bytes that the layer sends between ranks: one row per (token, rank) over one row per pair.

Both wires run in real processes (gloo, one thread each) with the same plan and the same inputs: balanced routing (every
token chooses distinct experts uniformly), bf16. The bytes are those that the calls' records booked as sent, forward and
backward, of all ranks, all phases but `replicas`: weights of copies cross the same on both wires.

    python benchmarks/wire.py --json

Names: wire.E<E>.bytes_over_row_per_pair (every expert at home; theory for E=128, top-8, 8 ranks: a token's 8 pairs lie
on 5.35 ranks, 0.669), .token_choice.bytes_over_row_per_pair (two filled replica slots per rank, every source spreads a
copied expert's pairs evenly; the best any choice could reach is 0.630 + metadata), and
.drop0.5.backward_bytes_over_row_per_pair (half of the pairs left out of backward, no copies).
Targets: <= 0.68, <= 0.64; the third is reported. With `local_first` in place of an even spread, source ranks that hold
a copy keep all its pairs: the same bytes cross, but over fewer pairs, so .token_choice.local_first is higher.

Expected duration on 2 cores: 2 to 3 minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import command_line
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lrmoe import LRMoEConfig
from lrmoe.layer import MoELayer
from lrmoe.planning import LayerPlan, Problem
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.problem import IntArray
from lrmoe.planning.split import even, local_first
from lrmoe.telemetry import figure
from lrmoe.training.launch import run_workers

INFO = PolicyInfo(
    title="two copies",
    source="this benchmark",
    inputs="current counts",
    acts="never",
    moves="weights of the first experts of every rank",
    slots="shared",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The layer call."""

    ranks: int = 8
    experts: int = 128
    top_k: int = 8
    hidden: int = 512
    width: int = 32
    tokens: int = 1024


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that one rank sent to others."""

    forward: int
    backward: int
    replicas: int


def spread(problem: Problem) -> LayerPlan:
    """Each rank's first experts also on another rank; every source sends half of its pairs to each copy."""
    return copies(problem, lambda counts_R, _: even(counts_R, 2))


def keep_local(problem: Problem) -> LayerPlan:
    """The same copies; sources that hold one of them keep their pairs, the others send half to each."""

    def split(counts_R: IntArray, hosts_J: IntArray) -> IntArray:
        half = int(counts_R.sum()) // 2
        return local_first(counts_R, hosts_J, [int(counts_R.sum()) - half, half])

    return copies(problem, split)


def copies(problem: Problem, split: Callable[[IntArray, IntArray], IntArray]) -> LayerPlan:
    """A plan that fills every rank's slots: home rank r's expert i is copied to another rank by turns."""
    topology, ranks = problem.topology, problem.topology.ranks
    turn = np.arange(min(problem.slots, topology.experts_per_rank))
    shift = 1 + turn * (ranks // 2) % max(ranks - 1, 1)
    copied = (np.arange(ranks)[:, None] * topology.experts_per_rank + turn).reshape(-1)
    hosts = ((np.arange(ranks)[:, None] + shift) % ranks).reshape(-1)
    expert_J = np.concatenate((np.arange(topology.experts), copied))
    rank_J = np.concatenate((topology.home_E, hosts))
    order = np.lexsort((expert_J, rank_J))
    expert_J, rank_J = expert_J[order], rank_J[order]
    assign_RJ = np.ascontiguousarray(problem.counts_RE[:, expert_J])
    for expert in copied:
        pair = np.flatnonzero(expert_J == expert)
        assign_RJ[:, pair] = split(problem.counts_RE[:, expert], rank_J[pair])
    return LayerPlan(
        topology=topology,
        counts_RE=problem.counts_RE,
        instance_expert_J=expert_J,
        instance_rank_J=rank_J,
        assign_RJ=assign_RJ,
        quota_E=problem.counts_RE.sum(axis=0),
        backward_J=assign_RJ.sum(axis=0),
    )


def measure(sizes: dict[str, int], fields: dict[str, Any], seed: int) -> dict[str, int]:
    """One forward and backward of this process's rank: the fields of its Sent."""
    case, config = Case(**sizes), LRMoEConfig(**fields)
    rank, local = dist.get_rank(), case.experts // case.ranks
    gen = torch.Generator().manual_seed(seed * case.ranks + rank)
    ids = torch.rand(case.tokens, case.experts, generator=gen).argsort(dim=1)[:, : case.top_k]

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).mul_(0.1).to(torch.bfloat16).requires_grad_()

    layer = MoELayer(
        num_experts=case.experts,
        hidden_size=case.hidden,
        intermediate_size=case.width,
        config=config,
        group=dist.group.WORLD,
    )
    alpha = torch.rand(case.tokens, case.top_k, generator=gen).softmax(dim=1).requires_grad_()
    gate_up, down = leaf(local, 2 * case.width, case.hidden), leaf(local, case.hidden, case.width)
    out = layer(leaf(case.tokens, case.hidden), ids, alpha, gate_up, down, training=True)
    forward = _sent(layer)
    out.backward(torch.randn(out.shape, generator=gen).to(out.dtype))
    every = _sent(layer)
    replicas = every.pop("replicas", 0)
    forward.pop("replicas", 0)
    before = sum(forward.values())
    return asdict(Sent(forward=before, backward=sum(every.values()) - before, replicas=replicas))


def _sent(layer: MoELayer) -> dict[str, int]:
    record = layer.last_record
    assert record is not None, "a training call leaves a record"
    return dict(record.bytes)


def both_wires(case: Case, fields: dict[str, Any], seed: int) -> dict[str, Sent]:
    """Bytes of all ranks together, with lean wires and with one row per pair."""
    found = {}
    for name, lean in (("lean", True), ("row_per_pair", False)):
        arguments = (asdict(case), {"warmup_steps": 0, "lean_wire": lean, **fields}, seed)
        ranks = run_workers("wire:measure", case.ranks, arguments, time_limit_s=300)
        found[name] = Sent(**{field: sum(sent[field] for sent in ranks) for field in ranks[0]})
    return found


def layouts() -> dict[str, dict[str, Any]]:
    """Configuration of each figure, by its name's middle part."""
    here = Path(__file__).resolve()
    exact = {"max_drop": 0.0, "replica_slots": 2}
    return {
        "": {"policy": "megatron", "max_drop": 0.0},
        "token_choice.": {"policy": f"{here}:spread", **exact},
        "token_choice.local_first.": {"policy": f"{here}:keep_local", **exact},
        "drop0.5.": {"policy": "lrmoe", "max_drop": 0.5, "replica_slots": 0},
    }


def bench(case: Case, name: str, fields: dict[str, Any], seed: int) -> dict[str, Any]:
    """The figure of one layout."""
    sent = both_wires(case, fields, seed)
    only_backward = fields["max_drop"] > 0
    lean, pairs = (wire.backward if only_backward else wire.forward + wire.backward for wire in sent.values())
    quantity = "backward_bytes_over_row_per_pair" if only_backward else "bytes_over_row_per_pair"
    return figure(
        f"wire.E{case.experts}.{name}{quantity}",
        round(lean / pairs, 4),
        "ratio",
        "lower",
        bytes_per_token={
            wire: {field: round(size / case.tokens / case.ranks, 1) for field, size in asdict(found).items()}
            for wire, found in sent.items()
        },
        case=asdict(case),
        seed=seed,
    )


def show(rows: list[dict[str, Any]]) -> None:
    """A table on stderr: the ratio, and bytes per token that it is made of."""
    table = Table(
        "ratio", "lean:\nforward", "\nbackward", "per pair:\nforward", "\nbackward", title="bytes per token"
    )
    table.add_column("figure", overflow="fold")
    for row in rows:
        sizes = [row["context"]["bytes_per_token"][wire] for wire in ("lean", "row_per_pair")]
        cells = [f"{size[way]:.0f}" for size in sizes for way in ("forward", "backward")]
        table.add_row(f"{row['value']:.4f}", *cells, row["name"])
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    command_line.add_sizes(parser, Case())
    args = parser.parse_args(argv)
    case = Case(**command_line.sizes_of(args, Case()))
    rows = [bench(case, name, fields, args.seed) for name, fields in layouts().items()]
    show(rows)
    if args.json:
        for row in rows:
            print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
