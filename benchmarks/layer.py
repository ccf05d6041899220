"""Forward and backward of one MoE layer against transformers' own experts, side by side in one run.

Shapes: hidden 512, expert width 192, 32 experts, top-8, 4096 tokens, lognormal popularity. Variants take turns within
each round; figures are medians over rounds, ratios are medians of per-round ratios.

    python benchmarks/layer.py --json

Names: layer.<dtype>.drop<d>.over_best_peer, layer.<dtype>.drop0.over_gemms, layer.<dtype>.drop0.2.overhead_share,
layer.<dtype>.masked_twin.over_drop0 (2 threads). Below 1 is better, or the share of the layer that pruning adds.

Expected duration on 2 cores: 6 to 15 minutes, nearly all of it in bf16; --dtype fp32 alone 1 to 3 minutes. Progress
goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from lrmoe.config import LRMoEConfig
from lrmoe.layer import MoELayer
from lrmoe.telemetry import figure

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DROPS = (0.0, 0.2, 0.5)
ADDED_PHASES = ("score", "select", "reroute")
BLOCK_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of the benchmarked layer."""

    hidden: int = 512
    width: int = 192
    experts: int = 32
    top_k: int = 8
    tokens: int = 4096
    sigma: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """One layer's input, routing, weights and upstream gradient."""

    x: Tensor
    ids: Tensor
    alpha: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tensors that get gradients."""
        return self.x, self.alpha, self.gate_up, self.down

    def clear(self) -> None:
        """Forget gradients."""
        for tensor in self.leaves:
            tensor.grad = None


def make_data(case: Case, dtype: torch.dtype, seed: int) -> Data:
    """Random tensors; experts drawn without repetition from a lognormal popularity (Gumbel top-k)."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    popularity = case.sigma * normal(case.experts)
    gumbel = -torch.log(-torch.log(torch.rand(case.tokens, case.experts, generator=draw)))
    logits, ids = (popularity + gumbel).topk(case.top_k, dim=1)
    gate_up = normal(case.experts, 2 * case.width, case.hidden) / case.hidden**0.5
    down = normal(case.experts, case.hidden, case.width) / case.width**0.5
    leaves = (normal(case.tokens, case.hidden), logits.softmax(dim=1), gate_up, down)
    x, alpha, gate_up, down = (t.to(dtype).requires_grad_() for t in leaves)
    grad = normal(case.tokens, case.hidden).to(dtype)
    return Data(x=x, ids=ids, alpha=alpha, gate_up=gate_up, down=down, grad=grad)


def peer(case: Case, data: Data, implementation: str) -> Callable[[], None]:
    """transformers' Qwen3-MoE experts with one of its own implementations."""
    config = Qwen3MoeConfig(
        hidden_size=case.hidden, moe_intermediate_size=case.width, num_experts=case.experts, hidden_act="silu"
    )
    config._experts_implementation = implementation
    experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = torch.nn.Parameter(data.gate_up), torch.nn.Parameter(data.down)

    def run() -> None:
        data.clear()
        experts.gate_up_proj.grad = experts.down_proj.grad = None
        experts(data.x, data.ids, data.alpha).backward(data.grad)

    return run


def ours(case: Case, data: Data, drop: float) -> tuple[Callable[[], None], MoELayer]:
    """This package's layer at a drop."""
    layer = MoELayer(
        num_experts=case.experts,
        hidden_size=case.hidden,
        intermediate_size=case.width,
        config=LRMoEConfig(max_drop=drop, warmup_steps=0),
    )

    def run() -> None:
        data.clear()
        layer(data.x, data.ids, data.alpha, data.gate_up, data.down, training=True).backward(data.grad)
        layer.clock.advance()

    return run, layer


def masked_twin(case: Case, data: Data, drop: float) -> Callable[[], None]:
    """Pruning without compaction: weights of dropped pairs are zeroed, every row is still computed backward."""
    layer = MoELayer(
        num_experts=case.experts,
        hidden_size=case.hidden,
        intermediate_size=case.width,
        config=LRMoEConfig(max_drop=0, warmup_steps=0),
    )
    keep = torch.rand(data.alpha.shape, generator=torch.Generator().manual_seed(1)) >= drop

    def run() -> None:
        data.clear()
        masked = data.alpha * keep
        layer(data.x, data.ids, masked, data.gate_up, data.down, training=True).backward(data.grad)
        layer.clock.advance()

    return run


def bare_gemms(case: Case, data: Data) -> Callable[[], None]:
    """The six products of every expert at the same counts, into buffers made before: no layer can be faster."""
    counts = torch.bincount(data.ids.reshape(-1), minlength=case.experts).tolist()
    gate_up, down = data.gate_up.detach(), data.down.detach()
    most = max(counts)

    def buffer(*shape: int) -> Tensor:
        return torch.randn(shape).to(gate_up.dtype)

    x, h, phi = buffer(most, case.hidden), buffer(most, 2 * case.width), buffer(most, case.width)
    y, d_gate_up, d_down = buffer(most, case.hidden), torch.empty_like(gate_up), torch.empty_like(down)

    def run() -> None:
        for e, n in enumerate(counts):
            torch.mm(x[:n], gate_up[e].t(), out=h[:n])
            torch.mm(phi[:n], down[e].t(), out=y[:n])
            torch.mm(x[:n], down[e], out=phi[:n])
            torch.mm(x[:n].t(), phi[:n], out=d_down[e])
            torch.mm(h[:n].t(), x[:n], out=d_gate_up[e])
            torch.mm(h[:n], gate_up[e], out=y[:n])

    return run


class Rounds:
    """Progress of one dtype on stderr: on a terminal a bar over rounds x variants, else a line every few rounds."""

    def __init__(self, dtype: str, rounds: int, variants: int) -> None:
        console = Console(stderr=True)
        self._dtype, self._rounds = dtype, rounds
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
        self._bar = Progress(
            *columns,
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=rounds * variants)

    def __enter__(self) -> Rounds:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, what: str, quiet: bool = False) -> None:
        """What begins now; `quiet` leaves out the line where there is no terminal. Never called inside a timing."""
        self._bar.update(self._task, description=f"{self._dtype}: {what}", refresh=True)
        if not self._console.is_terminal and not quiet:
            self._console.print(f"{self._dtype}: {what}", highlight=False, soft_wrap=True)

    def start(self, done: int) -> None:
        """Round number `done` begins."""
        self.say(f"round {done + 1} of {self._rounds}", quiet=done % -(-self._rounds // 4) != 0)

    def advance(self) -> None:
        """One variant of the round is done; drawn between timings, by this thread alone."""
        self._bar.update(self._task, advance=1, refresh=True)


def measure(runs: Mapping[str, Callable[[], object]], rounds: int, dtype: str) -> dict[str, list[float]]:
    """Milliseconds of every variant in every round, variants taking turns; progress on stderr."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    with Rounds(dtype, rounds, len(runs)) as progress:
        for name, run in runs.items():
            progress.say(f"warm-up, {name}")
            run()
            run()
        for done in range(rounds):
            progress.start(done)
            for name, run in runs.items():
                begin = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - begin) * 1e3)
                progress.advance()
    return times


def ratio(times: dict[str, list[float]], name: str, *others: str) -> float:
    """Median over rounds of `name` over the faster of `others` (by their medians)."""
    best = min(others, key=lambda other: statistics.median(times[other]))
    return statistics.median(a / b for a, b in zip(times[name], times[best], strict=True))


def overhead_share(layer: MoELayer, run: Callable[[], None], rounds: int, dtype: torch.dtype) -> float:
    """Share of the layer's time in phases that only pruning has, and in the one copy made only for it.

    That copy gathers the kept rows of the stash, block by block; without pruning they are read in place.
    """
    layer.telemetry.drain()
    shares = []
    for _ in range(rounds):
        run()
        record = layer.telemetry.drain()[0]
        added = sum(record.wall_ms.get(phase, 0.0) for phase in ADDED_PHASES)
        shares.append((added + stash_copy_ms(record.pairs, record.kept, layer, dtype)) / record.wall_total_ms)
    return statistics.median(shares)


def stash_copy_ms(pairs: int, kept: int, layer: MoELayer, dtype: torch.dtype) -> float:
    """Milliseconds to gather `kept` of `pairs` stash rows as backward does, a block at a time."""
    stash = torch.zeros(pairs, 2 * layer.shape.width, dtype=dtype)
    index = torch.randperm(pairs)[:kept].sort().values
    block = torch.empty(BLOCK_ROWS, stash.shape[1], dtype=stash.dtype)
    begin = time.perf_counter()
    for part in index.split(BLOCK_ROWS):
        torch.index_select(stash, 0, part, out=block[: len(part)])
    return (time.perf_counter() - begin) * 1e3


def bench_dtype(case: Case, name: str, rounds: int, seed: int) -> tuple[dict[str, list[float]], float]:
    """Times of all variants in one dtype, and the overhead share at drop 0.2."""
    data = make_data(case, DTYPES[name], seed)
    runs = {"eager": peer(case, data, "eager"), "grouped_mm": peer(case, data, "grouped_mm")}
    layers = {}
    for drop in DROPS:
        runs[f"drop{drop:g}"], layers[drop] = ours(case, data, drop)
    runs["masked_twin"] = masked_twin(case, data, 0.5)
    runs["gemms"] = bare_gemms(case, data)
    times = measure(runs, rounds, name)
    return times, overhead_share(layers[0.2], runs["drop0.2"], rounds, DTYPES[name])


def figures(
    name: str, times: dict[str, list[float]], overhead: float, context: dict[str, object]
) -> list[dict[str, object]]:
    """The named ratios of one dtype."""
    rows = [
        (f"layer.{name}.drop{drop:g}.over_best_peer", ratio(times, f"drop{drop:g}", "eager", "grouped_mm"))
        for drop in DROPS
    ]
    rows.append((f"layer.{name}.drop0.over_gemms", ratio(times, "drop0", "gemms")))
    rows.append((f"layer.{name}.drop0.2.overhead_share", overhead))
    rows.append((f"layer.{name}.masked_twin.over_drop0", ratio(times, "masked_twin", "drop0")))
    medians = {variant: round(statistics.median(values), 2) for variant, values in times.items()}
    return [
        figure(key, round(value, 4), "ratio", "lower", median_ms=medians, **context) for key, value in rows
    ]


def show(results: dict[str, dict[str, list[float]]]) -> None:
    """Median milliseconds of every variant, on stderr."""
    table = Table(title="forward + backward, median ms")
    table.add_column("variant")
    for name in results:
        table.add_column(name, justify="right")
    for variant in next(iter(results.values())):
        table.add_row(variant, *(f"{statistics.median(times[variant]):.1f}" for times in results.values()))
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON lines on stdout")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=tuple(DTYPES), action="append", help="default: all")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    case, results, rows = Case(), {}, []
    for name in args.dtype or DTYPES:
        results[name], overhead = bench_dtype(case, name, args.rounds, args.seed)
        rows += figures(
            name, results[name], overhead, {"seed": args.seed, "rounds": args.rounds, "case": vars(case)}
        )
    show(results)
    for row in rows:
        print(json.dumps(row) if args.json else f"{row['name']:45} {row['value']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
