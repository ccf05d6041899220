"""Checks of single operations for `gpu_check.py`: of `lrmoe.ops`, and of whatever has the same functions.

Inputs are fresh, outputs are full of NaN before, truth is the same in float64.

Shape letters: T tokens, K experts per token, E experts, H hidden, I expert width, N rows (pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from gpu_report import NAMES, Report
from plain import Shape, activation_loop, grouped_loop
from torch import Tensor

from lrmoe import ops

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
    }
)


def check_ops(report: Report, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """All of `lrmoe.ops` in one dtype, as the layer calls them."""
    name = NAMES[dtype]
    for label, counts in segment_counts(shape):
        check_grouped(report, f"ops.{name}.{label}", ops, shape, counts, dtype, device, seed)
    check_activation(report, f"ops.{name}", ops, shape, dtype, device, seed)
    check_rows(report, f"ops.{name}", ops, shape, dtype, device, seed)


def segment_counts(shape: Shape) -> list[tuple[str, list[int]]]:
    """Rows of each expert: awkward numbers, multiples of 8, none."""
    mean = shape.tokens * shape.top_k // shape.experts
    return [
        ("uneven", [(mean * 3, 0, 1, mean - 1, 7, 0, mean, 9)[e % 8] for e in range(shape.experts)]),
        ("aligned", [8 * (e % 4) for e in range(shape.experts)]),
        ("empty", [0] * shape.experts),
    ]


def check_grouped(
    report: Report,
    name: str,
    has: Any,
    shape: Shape,
    counts: list[int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> None:
    """`has.grouped_mm`, its input gradient and its weight gradient, written and added to."""
    gen = torch.Generator(device=device).manual_seed(seed)
    normal = partial(torch.randn, generator=gen, device=device)
    rows, grad = normal(sum(counts), shape.hidden).to(dtype), normal(sum(counts), shape.width).to(dtype)
    weight = normal(shape.experts, shape.width, shape.hidden).to(dtype)
    before = normal(weight.shape)
    actual = (
        has.grouped_mm(rows, weight, counts, out=poisoned(grad)),
        has.grouped_mm_input(grad, weight, counts, out=poisoned(rows)),
        has.grouped_mm_weight(grad, rows, counts, out=poisoned(weight)),
        has.grouped_mm_weight(grad, rows, counts, out=before.clone(), add=True),
    )
    exact, plain = (
        grouped_loop(rows.to(t), grad.to(t), weight.to(t), counts) for t in (torch.float64, dtype)
    )
    added = before.double() + exact[2]
    labels = ("forward", "input_grad", "weight_grad", "weight_grad_added")
    truths = zip((*exact, added), (*plain, before + plain[2].float()), strict=True)
    for label, found, truth in zip(labels, actual, truths, strict=True):
        report.check(f"{name}.{label}", [found], *([t] for t in truth))


def poisoned(like: Tensor) -> Tensor:
    """A buffer of the same kind in which everything that is not written shows."""
    return torch.full_like(like, float("nan"))


def check_activation(
    report: Report, name: str, has: Any, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """`has.gated_activation` and its backward, of every kind."""
    gen = torch.Generator(device=device).manual_seed(seed)
    h_N2I = 4 * torch.randn(shape.tokens, 2 * shape.width, generator=gen, device=device).to(dtype)
    dphi_NI = torch.randn(shape.tokens, shape.width, generator=gen, device=device).to(dtype)
    scale_N = torch.rand(shape.tokens, generator=gen, device=device)
    for kind, function in FUNCTIONS.items():
        phi = has.gated_activation(h_N2I, kind, out=poisoned(dphi_NI))
        back = has.gated_activation_backward(dphi_NI.clone(), h_N2I, scale_N, kind, out=poisoned(h_N2I))
        exact, plain = (
            activation_loop(h_N2I.to(t), dphi_NI.to(t), scale_N.to(t), function)
            for t in (torch.float64, dtype)
        )
        report.check(f"{name}.{kind}", (phi, *back), exact, plain)


def check_rows(
    report: Report, name: str, has: Any, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Pack, place, combine with weights of either dtype and without, norms: of plain and of strided rows."""
    gen = torch.Generator(device=device).manual_seed(seed)
    wide = torch.randn(shape.tokens, 2 * shape.hidden, generator=gen, device=device).to(dtype)
    weights_TK = torch.rand(shape.tokens, shape.top_k, generator=gen, device=device)
    for label, rows in (("", wide[:, : shape.hidden].contiguous()), (".strided", wide[:, ::2])):
        _check_moves(report, f"{name}{label}", has, rows, weights_TK)
    _check_norms(report, name, has, wide)


def _check_moves(report: Report, name: str, has: Any, rows_TH: Tensor, weights_TK: Tensor) -> None:
    """Every token's sum of its own row: the sum of its weights, times the row."""
    tokens, top_k = weights_TK.shape
    order_N = torch.randperm(tokens * top_k, device=rows_TH.device)
    packed = has.gather_rows(
        rows_TH, order_N // top_k, out=poisoned(rows_TH.new_empty(len(order_N), rows_TH.shape[1]))
    )
    back = has.place_rows(poisoned(packed), order_N, packed)
    wrong = int((packed != rows_TH[order_N // top_k]).sum()) + int((back[order_N] != packed).sum())
    report.at_most(f"{name}.misplaced", wrong, 0, "entries")
    ends_T = torch.arange(1, tokens + 1, device=rows_TH.device) * top_k
    index_N = torch.argsort(order_N)
    weights: dict[str, Tensor | None] = {
        "combine": weights_TK.to(rows_TH.dtype),
        "combine_fp32_weights": weights_TK,
        "sum": None,
    }
    for label, weight in weights.items():
        actual = has.combine(packed, index_N, ends_T, None if weight is None else weight.reshape(-1))
        factor = torch.ones_like(weights_TK) if weight is None else weight
        exact = rows_TH.double() * factor.double().sum(dim=1, keepdim=True)
        parts = [rows_TH * factor[:, k, None].to(rows_TH.dtype) for k in range(top_k)]
        report.check(f"{name}.{label}", [actual], [exact], [torch.stack(parts).sum(dim=0)])


def _check_norms(report: Report, name: str, has: Any, rows: Tensor) -> None:
    for label, order, given in (("row_norms", 2, rows), ("abs_sums", 1, rows[:, 1::3])):
        exact, plain = (
            torch.linalg.vector_norm(given.to(t), order, dim=1) for t in (torch.float64, torch.float32)
        )
        report.check(f"{name}.{label}", [getattr(has, label)(given)], [exact], [plain])
