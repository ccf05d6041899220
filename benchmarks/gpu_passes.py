"""Times of the passes over rows between the grouped products, for `gpu_check.py`, and what each moves a second.

    ops      by `lrmoe.ops`: Triton kernels where they are used
    torch    the same without them, where they are

Shape letters: T tokens, K experts per token, H hidden, I expert width, N rows (pairs).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpu_report import Report
from gpu_timing import Call, medians
from plain import Shape
from torch import Tensor

from lrmoe import ops
from lrmoe.ops import triton as kernels

REPEATS = 10
SIZE = 2  # bytes of an element in bf16


def time_passes(report: Report, model: str, shape: Shape, device: torch.device, seed: int) -> None:
    """Packing, activation both ways, weighted sum, norms of the gradient; bytes read and written, each once."""
    given = _passes(shape, device, seed)
    calls: dict[str, Call] = {f"{name}.ops": call for name, (call, _) in given.items()}
    if kernels.usable(torch.zeros(1, device=device)) is None:
        calls |= {f"{name}.torch": partial(_without_kernels, call) for name, (call, _) in given.items()}
    for name, value in medians(calls, REPEATS, device).items():
        report.add(f"{model}.pass.{name}.ms", value, "ms")
        moved = given[name.rpartition(".")[0]][1]
        report.add(f"{model}.pass.{name}.rate", moved / value / 1e6, "GB/s", better="higher")


def _passes(shape: Shape, device: torch.device, seed: int) -> dict[str, tuple[Call, float]]:
    """Name -> (the pass, bytes that it has to move)."""
    gen = torch.Generator(device=device).manual_seed(seed)
    rows, hidden, width = shape.tokens * shape.top_k, shape.hidden, shape.width

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen, device=device).to(torch.bfloat16)

    x_TH, y_NH, h_N2I, dphi_NI = (
        normal(shape.tokens, hidden),
        normal(rows, hidden),
        normal(rows, 2 * width),
        normal(rows, width),
    )
    weight_N = torch.rand(rows, generator=gen, device=device)
    order_N = torch.randperm(rows, generator=gen, device=device)
    ends_T = torch.arange(1, shape.tokens + 1, device=device) * shape.top_k
    token_N, phi_NI, norm_N = order_N // shape.top_k, torch.empty_like(dphi_NI), torch.empty_like(weight_N)
    dh_N2I, out_NH = torch.empty_like(h_N2I), torch.empty_like(y_NH)
    run: dict[str, tuple[Callable[[], object], float]] = {
        "pack": (lambda: ops.gather_rows(x_TH, token_N, out=out_NH), 2 * rows * hidden),
        "activation": (
            lambda: ops.gated_activation(h_N2I, "silu", out=phi_NI, norm_N=norm_N),
            3 * rows * width,
        ),
        "activation_backward": (
            lambda: ops.gated_activation_backward(dphi_NI, h_N2I, weight_N, "silu", out=dh_N2I),
            6 * rows * width,
        ),
        "combine": (
            lambda: ops.combine(y_NH, order_N, ends_T, weight_N),
            rows * hidden + shape.tokens * hidden,
        ),
        "norms": (lambda: ops.row_norms(x_TH), shape.tokens * hidden),
    }
    return {name: (call, SIZE * elements) for name, (call, elements) in run.items()}


def _without_kernels(call: Call) -> object:
    with kernels.off():
        return call()
