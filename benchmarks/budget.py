"""Byte budgets held against an independent witness: no call may need more than its budget, or than was predicted.

Real processes (gloo, one thread each) run forward and backward of one layer under 8 budgets x 6 skews x 3 activation
modes x 2 drops. The budgets go from the smallest that the planner accepts (one byte less must be refused, on all ranks)
to more than the call wants. A dispatch mode (`lrmoe.telemetry.tracking`) follows every tensor storage that the call
creates; its peak and the parameters are what a rank needed. On every rank of every case

    needed <= budget      needed <= predicted <= 1.02 * needed

Once the same call runs under torch's profiler, which sees the CPU allocator and operators' own scratch.

    python benchmarks/budget.py --json

Names: budget.cases (calls that ran), budget.exceeded (needed above budget or prediction, or a smallest budget less one
byte that was not refused: 0), budget.prediction_error_max (largest (predicted - needed) / needed: <= 0.02),
budget.profiler_over_tracked (peak of the profiler over that of the tracker). The exit code is 1 where a bound breaks.

Expected duration on 2 cores: 3 to 6 minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import command_line
import torch
import torch.distributed as dist
from layer_data import Data
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lrmoe import LRMoEConfig
from lrmoe.errors import InfeasibleError
from lrmoe.layer import MoELayer, release_scratch
from lrmoe.telemetry import figure
from lrmoe.telemetry.tracking import StorageTracker, profiled_peak
from lrmoe.training.launch import run_workers

SKEWS = ("balanced", "lognormal", "hot-expert", "hot-rank", "uneven-sources", "idle-ranks")
ACTIVATIONS = ("auto", "stash", "recompute")
DROPS: dict[str, dict[str, Any]] = {
    "exact": {"max_drop": 0.0},
    "overload": {"max_drop": 0.3, "drop": "overload"},
}
BUDGETS = 8
MOST = 2**60
TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class Case:
    """The layer call."""

    ranks: int = 4
    experts: int = 16
    top_k: int = 4
    hidden: int = 256
    width: int = 128
    tokens: int = 384
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Needed:
    """One call on one rank: its budget, what it was predicted to need and what it needed, in bytes; how it ran."""

    budget: int
    predicted: int
    needed: int
    recomputed: bool
    chunks: int
    kept_share: float

    @property
    def error(self) -> float:
        """Prediction over what was needed, less one."""
        return self.predicted / self.needed - 1

    @property
    def exceeded(self) -> bool:
        """Whether it needed more than its budget, or than predicted."""
        return self.needed > min(self.budget, self.predicted)


def tokens_of(case: Case, skew: str, rank: int) -> int:
    """Tokens of a rank: equal, or none on the first and twice as many on the last."""
    if skew in ("uneven-sources", "idle-ranks"):
        return {0: 0, case.ranks - 1: 2 * case.tokens}.get(rank, case.tokens)
    return case.tokens


def draw_ids(case: Case, skew: str, tokens: int, draw: torch.Generator) -> Tensor:
    """Distinct experts of each token, int64 (T, K); "no expert" where a skew leaves slots empty."""
    gumbel = -torch.log(-torch.log(torch.rand(tokens, case.experts, generator=draw)))
    taste = 1.5 * torch.randn(case.experts, generator=torch.Generator().manual_seed(5))
    if skew == "balanced":
        taste = torch.zeros(case.experts)
    if skew == "hot-rank":
        taste[: case.experts // case.ranks] += 50.0
    if skew == "idle-ranks":
        taste[case.experts // 2 :] -= 50.0
    ids = (taste + gumbel).topk(case.top_k, dim=1).indices
    if skew == "hot-expert":
        ids = torch.full_like(ids, case.experts)
        ids[:, 0] = 1
    return ids


def make_data(case: Case, skew: str, rank: int, seed: int) -> Data:
    """Random tensors of one rank."""
    draw = torch.Generator().manual_seed(seed * case.ranks + rank)
    dtype: torch.dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).mul_(0.1).to(dtype)

    tokens, local = tokens_of(case, skew, rank), case.experts // case.ranks
    alpha = torch.rand(tokens, case.top_k, generator=draw).softmax(dim=1)
    return Data(
        x=normal(tokens, case.hidden).requires_grad_(),
        ids=draw_ids(case, skew, tokens, draw),
        alpha=(alpha.double() if dtype == torch.float64 else alpha).requires_grad_(),
        gate_up=normal(local, 2 * case.width, case.hidden).requires_grad_(),
        down=normal(local, case.hidden, case.width).requires_grad_(),
        grad=normal(tokens, case.hidden),
    )


def make_layer(case: Case, fields: dict[str, Any], budget: int) -> MoELayer:
    """A layer under a budget, with two replica slots a rank where there are several."""
    config = LRMoEConfig(
        warmup_steps=0,
        lean_wire=False,
        replica_slots=2,
        layer_budget=budget,
        **fields,
    )
    return MoELayer(
        num_experts=case.experts,
        hidden_size=case.hidden,
        intermediate_size=case.width,
        config=config,
        group=dist.group.WORLD if case.ranks > 1 else None,
    )


def call(layer: MoELayer, data: Data) -> None:
    """Forward and backward."""
    data.clear()
    layer(data.x, data.ids, data.alpha, data.gate_up, data.down, training=True).backward(data.grad)
    layer.clock.advance()


def run(case: Case, data: Data, fields: dict[str, Any], budget: int) -> Needed:
    """One call under the tracker.

    Raises:
        InfeasibleError: the budget was refused.
    """
    layer, tracker = make_layer(case, fields, budget), StorageTracker()
    release_scratch()
    with tracker:
        call(layer, data)
    record = layer.last_record
    assert record is not None, "a training call leaves a record"
    return Needed(
        budget=budget,
        predicted=record.peak_predicted,
        needed=tracker.peak + data.parameter_bytes,
        recomputed=record.recomputed,
        chunks=record.chunks,
        kept_share=record.kept_share,
    )


def smallest(case: Case, data: Data, fields: dict[str, Any]) -> int:
    """The smallest budget that the planner accepts, from its refusal of a single byte."""
    try:
        run(case, data, fields, 1)
    except InfeasibleError as error:
        if error.smallest is not None:
            return error.smallest
        raise
    raise AssertionError("a budget of one byte was accepted")


def refused(case: Case, data: Data, fields: dict[str, Any], budget: int) -> bool:
    """Whether a budget is refused."""
    try:
        run(case, data, fields, budget)
    except InfeasibleError:
        return True
    return False


def budgets(least: int, most: int, count: int) -> list[int]:
    """From the smallest budget to more than the call wants, in equal ratios."""
    ratio = max(1.05 * most / least, 1.0)
    return [least, *(int(least * ratio ** (step / (count - 1))) for step in range(1, count))]


def wanted(case: Case, data: Data, fields: dict[str, Any]) -> int:
    """What the call takes without a limit, on the rank that takes most."""
    most = torch.tensor([run(case, data, fields, MOST).predicted])
    if case.ranks > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def sweep(sizes: dict[str, Any], skew: str, fields: dict[str, Any], count: int, seed: int) -> dict[str, Any]:
    """All budgets of one skew and mode on this process's rank: {"calls": fields of Needed, "refused": bool}."""
    case = Case(**sizes)
    data = make_data(case, skew, dist.get_rank() if case.ranks > 1 else 0, seed)
    least = smallest(case, data, fields)
    calls = [run(case, data, fields, budget) for budget in budgets(least, wanted(case, data, fields), count)]
    return {"calls": [asdict(one) for one in calls], "refused": refused(case, data, fields, least - 1)}


def sweep_all(sizes: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Every skew, mode and drop on this process's rank; progress on stderr of the first."""
    found = []
    for skew in SKEWS:
        for activations in ACTIVATIONS:
            for name, drop in DROPS.items():
                fields = {"activations": activations, **drop}
                found.append({"skew": skew, "activations": activations, "drop": name})
                found[-1] |= sweep(sizes, skew, fields, BUDGETS, seed)
        if dist.get_rank() == 0:
            sys.stderr.write(f"{skew}: done\n")
    return found


def profiled(sizes: dict[str, Any], seed: int) -> float:
    """Peak of torch's profiler over the tracker's, of one recomputed call in the middle of its budgets."""
    case, fields = Case(**sizes), {"max_drop": 0.0}
    data = make_data(case, "lognormal", dist.get_rank(), seed)
    budget = budgets(smallest(case, data, fields), wanted(case, data, fields), 3)[1]
    tracked = run(case, data, fields, budget).needed
    data.clear()
    layer = make_layer(case, fields, budget)
    return (profiled_peak(lambda: call(layer, data)) + data.parameter_bytes) / tracked


def merged(ranks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The ranks' answers, settings one by one: "calls" holds, for each budget, every rank's Needed."""
    found = []
    for settings in zip(*ranks, strict=True):
        calls = zip(*([Needed(**one) for one in rank["calls"]] for rank in settings), strict=True)
        found.append(
            {
                **settings[0],
                "calls": [list(one) for one in calls],
                "refused": all(rank["refused"] for rank in settings),
            }
        )
    return found


def figures(
    settings: Sequence[dict[str, Any]], ratio: float, context: dict[str, Any]
) -> list[dict[str, Any]]:
    """The named figures."""
    calls = [ranks for setting in settings for ranks in setting["calls"]]
    exceeded = sum(any(one.exceeded for one in ranks) for ranks in calls)
    exceeded += sum(not setting["refused"] for setting in settings)
    error = max(one.error for ranks in calls for one in ranks)
    return [
        figure("budget.cases", len(calls), "calls", "higher", **context),
        figure("budget.exceeded", exceeded, "calls", "lower", **context),
        figure("budget.prediction_error_max", round(error, 5), "share", "lower", **context),
        figure("budget.profiler_over_tracked", round(ratio, 5), "ratio", "lower", **context),
    ]


def show(settings: Sequence[dict[str, Any]]) -> None:
    """A table on stderr: how each setting kept to its smallest and its middle budget."""
    table = Table(
        "skew", "activations", "drop", "smallest", "chunks", "middle", "chunks", "kept", "error max"
    )
    for setting in settings:
        calls = setting["calls"]
        low, middle = calls[0][0], calls[len(calls) // 2][0]
        error = max(one.error for ranks in calls for one in ranks)
        table.add_row(
            *(setting[name] for name in ("skew", "activations", "drop")),
            f"{low.budget / 2**20:.2f} MiB",
            str(low.chunks),
            f"{middle.budget / 2**20:.2f} MiB",
            str(middle.chunks),
            f"{middle.kept_share:.2f}",
            f"{error:.4f}",
        )
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    command_line.add_sizes(parser, Case())
    args = parser.parse_args(argv)
    sizes = command_line.sizes_of(args, Case())
    settings = merged(run_workers("budget:sweep_all", args.ranks, (sizes, args.seed), time_limit_s=1800))
    ratio = max(run_workers("budget:profiled", args.ranks, (sizes, args.seed), time_limit_s=300))
    rows = figures(settings, ratio, {"case": sizes, "seed": args.seed})
    show(settings)
    for row in rows:
        print(json.dumps(row) if args.json else f"{row['name']:34} {row['value']}")
    values = {row["name"]: row["value"] for row in rows}
    held = values["budget.exceeded"] == 0 and values["budget.prediction_error_max"] <= TOLERANCE
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
