"""Is it right and how fast is it on this machine? Ops, layer and known faults against a float64 loop, times, a replay.

    python benchmarks/gpu_check.py                    # CUDA if there, else tiny shapes on the CPU
    python benchmarks/gpu_check.py --json > out.jsonl
    python benchmarks/gpu_check.py --dry-run          # tiny shapes on the CPU, everywhere

Needs torch, numpy and this package; transformers, where it is installed, gives the peers to compare with. Exit code 1
when a check fails. A check's figure is its largest error over what is allowed: twice the error of the plain loop in the
same dtype plus 4 eps times the largest entry.

Shape letters: T tokens, K experts per token, E experts, H hidden, I expert width, N rows (pairs).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_cases import check_cases
from gpu_report import Report, make_layer, run_layer
from plain import Case, Shape, activation_loop, grouped_loop, kept_pairs, make_case, run_plain
from torch import Tensor

from lrmoe import LRMoEConfig, ops
from lrmoe.planning.memory import ExpertShape
from lrmoe.planning.problem import Topology
from lrmoe.simulate.published import EXPERTS, RANKS
from lrmoe.simulate.replay import Question, replay
from lrmoe.simulate.replay_calls import published_call
from lrmoe.simulate.replay_summary import summarise
from lrmoe.simulate.scenario import Allowance, Layer

DROPS = (0.0, 0.3, 0.5)
REPLAYED = ("megatron", "symi", "ultraep", "lrmoe")
NVLINK = 450e9  # bytes per second and direction of an H100 or H200
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


TINY = Shape(tokens=192, hidden=64, width=48, experts=8, top_k=2, repeats=3)
CHECK = Shape(tokens=2048, hidden=512, width=384, experts=32, top_k=8, repeats=1)
REAL = Shape(tokens=16384, hidden=2048, width=768, experts=32, top_k=8, repeats=15)


def check_ops(report: Report, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Grouped products over awkward counts, activation, row moves."""
    for label, counts in _counts(shape):
        _check_grouped(report, f"ops.{NAMES[dtype]}.{label}", shape, counts, dtype, device, seed)
    _check_activation(report, shape, dtype, device, seed)
    _check_rows(report, make_case(shape, dtype, device, seed), shape)


def _counts(shape: Shape) -> list[tuple[str, list[int]]]:
    mean = shape.tokens * shape.top_k // shape.experts
    return [
        ("uneven", [(mean * 3, 0, 1, mean - 1, 7, 0, mean, 9)[e % 8] for e in range(shape.experts)]),
        ("aligned", [8 * (e % 4) for e in range(shape.experts)]),
        ("empty", [0] * shape.experts),
    ]


def _check_grouped(
    report: Report,
    name: str,
    shape: Shape,
    counts: list[int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> None:
    gen = torch.Generator(device=device).manual_seed(seed)
    rows = torch.randn(sum(counts), shape.hidden, generator=gen, device=device).to(dtype)
    grad = torch.randn(sum(counts), shape.width, generator=gen, device=device).to(dtype)
    weight = torch.randn(shape.experts, shape.width, shape.hidden, generator=gen, device=device).to(dtype)
    dirty = torch.full_like(weight, float("nan"))  # an empty segment must overwrite what was there
    actual = (
        ops.grouped_mm(rows, weight, counts),
        ops.grouped_mm_input(grad, weight, counts),
        ops.grouped_mm_weight(grad, rows, counts, out=dirty),
    )
    exact = grouped_loop(rows.double(), grad.double(), weight.double(), counts)
    plain = grouped_loop(rows, grad, weight, counts)
    for label, *triple in zip(("forward", "input_grad", "weight_grad"), actual, exact, plain, strict=True):
        report.check(f"{name}.{label}", *([tensor] for tensor in triple))


def _check_activation(
    report: Report, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    gen = torch.Generator(device=device).manual_seed(seed)
    h_N2I = 4 * torch.randn(shape.tokens, 2 * shape.width, generator=gen, device=device).to(dtype)
    dphi_NI = torch.randn(shape.tokens, shape.width, generator=gen, device=device).to(dtype)
    scale_N = torch.rand(shape.tokens, generator=gen, device=device)
    for kind, function in FUNCTIONS.items():
        phi = ops.gated_activation(h_N2I, kind)
        actual = phi, *ops.gated_activation_backward(dphi_NI.clone(), h_N2I, scale_N, kind)
        exact, plain = (
            activation_loop(h_N2I.to(t), dphi_NI.to(t), scale_N.to(t), function)
            for t in (torch.float64, dtype)
        )
        report.check(f"ops.{NAMES[dtype]}.{kind}", actual, exact, plain)


def _check_rows(report: Report, case: Case, shape: Shape) -> None:
    """Pack then combine with the routing weights: every token's sum of its own row, so sum(weights) * row."""
    hidden, weights = case.hidden.detach(), case.weights.detach().float()
    order = torch.randperm(shape.tokens * shape.top_k, device=hidden.device)
    packed = ops.gather_rows(hidden, order // shape.top_k)
    ends = torch.arange(1, shape.tokens + 1, device=hidden.device) * shape.top_k
    for label, weight in (("combine", weights.to(hidden.dtype)), ("combine_fp32_weights", weights)):
        actual = ops.combine(packed, torch.argsort(order), ends, weight.reshape(-1))
        exact = hidden.double() * weight.double().sum(dim=1, keepdim=True)
        plain = sum(hidden * weight[:, k, None].to(hidden.dtype) for k in range(shape.top_k))
        assert isinstance(plain, Tensor)
        report.check(f"ops.{NAMES[hidden.dtype]}.{label}", [actual], [exact], [plain])
    norms = [t.norm(dim=1) for t in (hidden.double(), hidden.float())]
    report.check(f"ops.{NAMES[hidden.dtype]}.row_norms", [ops.row_norms(hidden)], norms[:1], norms[1:])


def check_layer(report: Report, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Nothing dropped, then the published rule with the same kept set, against the plain loop."""
    case = make_case(shape, dtype, device, seed)
    exact, plain = run_plain(case, torch.float64), run_plain(case, dtype)
    for activations in ("stash", "recompute"):
        layer = make_layer(shape, max_drop=0.0, activations=activations)
        report.check(f"layer.{NAMES[dtype]}.drop0.{activations}", run_layer(layer, case), exact, plain)
    if dtype == torch.float32:  # in bf16 rounding may swap two pairs at the edge of the quota
        layer = make_layer(shape, max_drop=0.3, estimator="topk")
        actual = run_layer(layer, case)
        record = layer.last_record
        assert record is not None
        keep_TK = kept_pairs(case, record.quota_E)
        pruned = [run_plain(case, t, keep_TK) for t in (torch.float64, dtype)]
        report.check(f"layer.{NAMES[dtype]}.drop0.3.topk", actual, *pruned)


def time_layer(report: Report, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Forward and backward at each drop, interleaved with transformers' own experts; medians."""
    case = make_case(shape, dtype, device, seed)
    layers = {f"drop{drop:g}": make_layer(shape, max_drop=drop) for drop in DROPS}
    calls: dict[str, Callable[[], object]] = {
        name: partial(run_layer, layer, case) for name, layer in layers.items()
    }
    calls.update(_peers(case, shape))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(shape.repeats + 2):
        for name, call in calls.items():
            elapsed = _elapsed_ms(call, device)
            if repeat >= 2:  # the first two warm up
                times[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        report.add(f"layer.{NAMES[dtype]}.{name}.ms", value, "ms")
    for name in layers.keys() - {"drop0"}:
        report.add(f"layer.{NAMES[dtype]}.{name}.over_drop0", medians[name] / medians["drop0"], "ratio")
    for name, layer in layers.items():
        record = layer.last_record
        assert record is not None
        report.add(
            f"layer.{NAMES[dtype]}.{name}.kept_share", record.rows_backward_local / record.pairs, "share"
        )
    if device.type == "cuda":
        for name in layers:
            report.add(f"layer.{NAMES[dtype]}.{name}.peak_bytes", _peak_bytes(calls[name], device), "bytes")


def time_replay(report: Report, device: torch.device, seed: int) -> None:
    """The published comparison's call replayed, at Qwen3-30B-A3B's own sizes on CUDA; few systems and runs."""
    cuda = device.type == "cuda"
    asked = Question(
        systems=REPLAYED,
        calls=published_call() if cuda else published_call(tokens=64),
        topology=Topology(ranks=RANKS, experts=EXPERTS),
        layer=Layer(shape=ExpertShape(hidden=2048 if cuda else 64, width=768, element_bytes=2)),
        allowance=Allowance(max_drop=0.2),
        config=LRMoEConfig(max_drop=0.2, seed=seed),
        device=device,
        repeats=2 if cuda else 1,
        link_bytes_per_s=NVLINK,
    )
    systems = summarise(asked, replay(asked))["systems"]
    for name, found in systems.items():
        for quantity in ("forward_ms", "backward_ms", "forward_compute_ms", "backward_compute_ms"):
            report.add(f"replay.{name}.{quantity}", found[quantity], "ms")
        for quantity in ("forward_subtotal", "backward_subtotal", "forward_memory", "backward_memory"):
            report.add(f"replay.{name}.{quantity}", found[quantity], "bytes")
    for name in systems.keys() - {"megatron"}:
        for quantity in ("backward_ms", "backward_compute_ms", "backward_subtotal"):
            ratio = systems[name][quantity] / systems["megatron"][quantity]
            report.add(f"replay.{name}.{quantity}_over_megatron", ratio, "ratio")


def _peers(case: Case, shape: Shape) -> Iterator[tuple[str, Callable[[], object]]]:
    """Transformers' experts on the same inputs, where the package is installed."""
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    for kind in ("eager", "grouped_mm"):
        sizes = {
            "hidden_size": shape.hidden,
            "moe_intermediate_size": shape.width,
            "num_experts": shape.experts,
        }
        config = Qwen3MoeConfig(**sizes, experts_implementation=kind)
        module = Qwen3MoeExperts(config).to(case.hidden.device, case.hidden.dtype)
        module.gate_up_proj.data, module.down_proj.data = case.gate_up.detach(), case.down.detach()
        leaves = [case.hidden, case.weights, module.gate_up_proj, module.down_proj]
        yield f"transformers_{kind}", partial(_run_peer, module, case, leaves)


def _run_peer(module: Any, case: Case, leaves: list[Tensor]) -> object:
    return torch.autograd.grad(module(case.hidden, case.ids, case.weights), leaves, case.grad)


def _elapsed_ms(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def table(figures: list[dict[str, Any]]) -> str:
    """The worst check of each area and dtype, then everything else; plain text, for a machine with little but torch."""
    worst: dict[str, float] = {}
    rows = []
    for item in figures:
        name, value = item["name"].removeprefix("gpu_check."), item["value"]
        if name.endswith(".error_over_limit"):
            area = ".".join(name.split(".")[:2])
            worst[area] = max(worst.get(area, 0.0), value)
        else:
            rows.append((name, value, item["unit"]))
    rows = [(f"{area}: worst error / allowed", value, "ratio") for area, value in worst.items()] + rows
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"{name:<{width}}  {value:>12.4g} {unit}" for name, value, unit in rows)


def main() -> int:
    """Run the checks, then the times; print the table last."""
    parser = argparse.ArgumentParser(description="Correctness and layer times on this machine.")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU even where CUDA is")
    parser.add_argument(
        "--json", action="store_true", help="print JSON lines to standard output, the table to stderr"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON lines to this file")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the inputs; fresh ones each run without it"
    )
    options = parser.parse_args()
    cuda = torch.cuda.is_available() and not options.dry_run
    device = torch.device("cuda" if cuda else "cpu")
    seed = options.seed if options.seed is not None else time.time_ns() % 2**31
    report = Report(seed=seed, device=device)
    for dtype in NAMES:
        check_ops(report, CHECK if cuda else TINY, dtype, device, seed)
        check_layer(report, CHECK if cuda else TINY, dtype, device, seed)
    check_cases(report, device, seed)
    for dtype in NAMES:
        time_layer(report, REAL if cuda else TINY, dtype, device, seed)
    time_replay(report, device, seed)
    lines = "".join(json.dumps(item) + "\n" for item in report.figures)
    if options.out:
        options.out.write_text(lines, encoding="utf-8")
    if options.json:
        sys.stdout.write(lines)
    print(table(report.figures), file=sys.stderr if options.json else sys.stdout)
    verdict = f"FAILED: {', '.join(report.failed)}" if report.failed else "all checks passed"
    print(f"{device.type}, seed {seed}: {verdict}", file=sys.stderr if options.json else sys.stdout)
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
