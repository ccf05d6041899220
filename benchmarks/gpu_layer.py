"""The layer at published models' sizes for `gpu_check.py`: against a float64 loop, and its time beside others'.

    drop<d>                     the layer, forward and backward, at a cap on the dropped share
    drop<d>.plain_ops           the same without Triton kernels, where they are used
    transformers_<name>         transformers' experts of that implementation, on the same inputs
    plain_loop                  a loop over experts, by autograd
    gemms                       the six grouped products alone, on rows that already lie by expert

Variants take turns; figures are medians, ratios those of medians.

Shape letters: T tokens, K experts per token, E experts, H hidden, I expert width, N rows (pairs).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from gpu_report import NAMES, Report, make_layer, run_layer
from gpu_timing import Call, elapsed_ms, medians, peak_bytes
from plain import Case, Shape, kept_pairs, make_case, run_plain
from torch import Tensor

from lrmoe import ops
from lrmoe.layer import MoELayer
from lrmoe.ops import triton as kernels

DROPS = (0.0, 0.2, 0.5)
MODELS: Mapping[str, Shape] = MappingProxyType(
    {
        "qwen3_30b_a3b": Shape(tokens=16384, hidden=2048, width=768, experts=128, top_k=8, repeats=20),
        "glm_4_5_air": Shape(tokens=16384, hidden=4096, width=1408, experts=128, top_k=8, repeats=10),
    }
)
TINY: Mapping[str, Shape] = MappingProxyType(
    {
        "qwen3_30b_a3b": Shape(tokens=96, hidden=64, width=24, experts=16, top_k=4, repeats=2),
        "glm_4_5_air": Shape(tokens=64, hidden=96, width=40, experts=16, top_k=4, repeats=1),
    }
)
# Forwards that copy weights for every pair, or this package's own under another name.
_NOT_PEERS = ("batched_mm", "lrmoe")


def check_layer(
    report: Report, name: str, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Nothing dropped, then the published rule with the same kept set, against the plain loop."""
    case, name = make_case(shape, dtype, device, seed), f"layer.{name}.{NAMES[dtype]}"
    exact, plain = run_plain(case, torch.float64), run_plain(case, dtype)
    for activations in ("stash", "recompute"):
        layer = make_layer(shape, max_drop=0.0, activations=activations)
        report.check(f"{name}.drop0.{activations}", run_layer(layer, case), exact, plain)
    for score in ("grad_norm", "lrm"):
        layer = make_layer(shape, max_drop=0.5, score=score)
        found = run_layer(layer, case)
        report.check(f"{name}.drop0.5.{score}.forward", found[:1], exact[:1], plain[:1])
    if dtype == torch.float32:  # in bf16 rounding may swap two pairs at the edge of the quota
        layer = make_layer(shape, max_drop=0.3, estimator="topk")
        actual = run_layer(layer, case)
        record = layer.last_record
        assert record is not None
        keep_TK = kept_pairs(case, record.quota_E)
        pruned = [run_plain(case, t, keep_TK) for t in (torch.float64, dtype)]
        report.check(f"{name}.drop0.3.topk", actual, *pruned)


def time_layer(report: Report, model: str, shape: Shape, device: torch.device, seed: int) -> None:
    """Times and memory at one model's sizes in bf16."""
    case = make_case(shape, torch.bfloat16, device, seed)
    layers = {f"drop{drop:g}": make_layer(shape, max_drop=drop) for drop in DROPS}
    calls: dict[str, Call] = {name: partial(run_layer, layer, case) for name, layer in layers.items()}
    if kernels.usable(case.hidden.detach()) is None:
        calls |= {f"{name}.plain_ops": partial(_without_kernels, call) for name, call in list(calls.items())}
    calls["gemms"] = partial(_multiply, _packed(case, shape))
    calls["plain_loop"] = partial(run_plain, case, torch.bfloat16)
    calls = dict(_that_run(report, model, calls, device)) | dict(_peers(report, case, shape))
    times = medians(calls, shape.repeats, device)
    for name, value in times.items():
        report.add(f"{model}.{name}.ms", value, "ms")
    _ratios(report, model, times, layers)
    if device.type == "cuda":
        flops = 18 * shape.tokens * shape.top_k * shape.hidden * shape.width
        for name in times.keys() & {"gemms", "drop0"}:
            report.add(f"{model}.{name}.tflops", flops / times[name] / 1e9, "TFLOP/s", better="higher")
        peaks = {name: peak_bytes(calls[name], device) for name in times}
        for name, value in peaks.items():
            report.add(f"{model}.{name}.peak_bytes", value, "bytes")
        if "transformers_grouped_mm" in peaks:
            for name in layers.keys() & peaks.keys():
                ratio = peaks[name] / peaks["transformers_grouped_mm"]
                report.add(f"{model}.{name}.memory_over_grouped_mm", ratio, "ratio")


def _that_run(
    report: Report, model: str, calls: Mapping[str, Call], device: torch.device
) -> Iterator[tuple[str, Call]]:
    """The calls that raise nothing; the others have failed."""
    for name, call in calls.items():
        try:
            elapsed_ms(call, device)
        except Exception as error:  # whatever a kernel that nobody has run yet may raise
            traceback.print_exc()
            report.fail(
                f"{model}.{name} ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]})"
            )
            continue
        yield name, call


def _ratios(report: Report, model: str, times: Mapping[str, float], layers: Mapping[str, MoELayer]) -> None:
    for name, layer in layers.items():
        record = layer.last_record
        if name not in times or record is None:
            continue
        report.add(f"{model}.{name}.kept_share", record.rows_backward_local / record.pairs, "share")
        others = {"over_grouped_mm": "transformers_grouped_mm"}
        others |= {"over_gemms": "gemms"} if name == "drop0" else {"over_drop0": "drop0"}
        for label, other in others.items():
            if other in times:
                report.add(f"{model}.{name}.{label}", times[name] / times[other], "ratio")


def _without_kernels(call: Call) -> object:
    with kernels.off():
        return call()


def _packed(case: Case, shape: Shape) -> tuple[list[Tensor], list[int]]:
    """Rows, their gradients, weights and what stands for projections by expert, and the counts."""
    counts = torch.bincount(case.ids.flatten(), minlength=shape.experts).tolist()
    token_N = torch.argsort(case.ids.flatten(), stable=True) // shape.top_k
    x, g = case.hidden.detach()[token_N], case.grad[token_N]
    h = torch.randn_like(x[:, :1].expand(-1, 2 * shape.width))  # zeros would be multiplied faster
    return [x, g, h, h[:, : shape.width].contiguous(), case.gate_up.detach(), case.down.detach()], counts


def _multiply(packed: tuple[list[Tensor], list[int]]) -> None:
    """The products of forward and backward, by the functions that the layer calls; each gives what it made."""
    (x, g, h, phi, gate_up, down), counts = packed
    ops.grouped_mm(x, gate_up, counts)
    ops.grouped_mm(phi, down, counts)
    ops.grouped_mm_input(g, down, counts)
    ops.grouped_mm_weight(g, phi, counts)
    ops.grouped_mm_weight(h, x, counts)
    ops.grouped_mm_input(h, gate_up, counts)


def _peers(report: Report, case: Case, shape: Shape) -> Iterator[tuple[str, Call]]:
    """Transformers' experts, of every implementation that runs here; others are said to be left out."""
    try:
        from transformers import Qwen3MoeConfig
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError as error:
        report.left_out(f"transformers' experts: {error}")
        return
    sizes = {"hidden_size": shape.hidden, "moe_intermediate_size": shape.width, "num_experts": shape.experts}
    for kind in ("eager", *sorted(set(ALL_EXPERTS_FUNCTIONS.valid_keys()) - set(_NOT_PEERS))):
        with torch.device(case.hidden.device):
            module = Qwen3MoeExperts(Qwen3MoeConfig(**sizes, experts_implementation=kind))
        module.gate_up_proj.data, module.down_proj.data = case.gate_up.detach(), case.down.detach()
        call = partial(
            _run_peer, module, case, [case.hidden, case.weights, module.gate_up_proj, module.down_proj]
        )
        try:
            call()
        except (
            Exception
        ) as error:  # kernels that are not installed, or have no backward: each has errors of its own
            report.left_out(
                f"transformers' {kind}: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
            )
            continue
        yield f"transformers_{kind}", call


def _run_peer(module: Any, case: Case, leaves: list[Tensor]) -> object:
    return torch.autograd.grad(module(case.hidden, case.ids, case.weights), leaves, case.grad)
