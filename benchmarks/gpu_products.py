"""Times of the grouped products by each way to compute them, for `gpu_check.py`: what `ops.triton.rule` guesses at.

    torch             F.grouped_mm where it is exact, else a loop over segments
    torch_new         the same into memory of its own, where torch saves a copy
    triton            the kernel of this package
    packed_torch      rows gathered first, then as torch
    triton_gathered   the kernel that reads rows by index

Shape letters: T tokens, K experts per token, E experts, H hidden, I expert width, N rows (pairs).
"""

from __future__ import annotations

import importlib
from functools import partial

import torch
from gpu_report import Report
from gpu_timing import Call, medians
from plain import Case, Shape, make_case
from torch import Tensor

from lrmoe import ops
from lrmoe.ops import triton as kernels

REPEATS = 10


def time_products(report: Report, model: str, shape: Shape, device: torch.device, seed: int) -> None:
    """First projection, its input gradient and its weight gradient in bf16; only where kernels are used."""
    case = make_case(shape, torch.bfloat16, device, seed)
    trouble = kernels.usable(case.hidden.detach())
    if trouble is not None:
        report.left_out(f"times of grouped products at {model}: {trouble}")
        return
    for name, value in medians(_calls(case, shape), REPEATS, device).items():
        report.add(f"{model}.product.{name}.ms", value, "ms")


def _calls(case: Case, shape: Shape) -> dict[str, Call]:
    grouped = importlib.import_module("lrmoe.ops.triton.grouped")
    counts = torch.bincount(case.ids.flatten(), minlength=shape.experts).tolist()
    token_N = torch.argsort(case.ids.flatten(), stable=True) // shape.top_k
    source, weight = case.hidden.detach(), case.gate_up.detach()
    rows, up = source[token_N], weight.transpose(1, 2)
    h, dx, dw = rows.new_empty((len(rows), 2 * shape.width)), torch.empty_like(rows), torch.empty_like(weight)
    h.normal_()
    return {
        "forward.torch": partial(_plainly, ops.grouped_mm, rows, weight, counts, h),
        "forward.torch_new": partial(_plainly, ops.grouped_mm, rows, weight, counts, None),
        "forward.triton": partial(grouped.grouped_mm, rows, up, counts, out=h),
        "forward.packed_torch": partial(_packed, source, token_N, rows, weight, counts, h),
        "forward.triton_gathered": partial(grouped.grouped_mm, source, up, counts, out=h, index_N=token_N),
        "input_grad.torch": partial(_plainly, ops.grouped_mm_input, h, weight, counts, dx),
        "input_grad.triton": partial(grouped.grouped_mm, h, weight, counts, out=dx),
        "weight_grad.torch": partial(_plainly, ops.grouped_mm_weight, h, rows, counts, dw),
        "weight_grad.torch_new": partial(_plainly, ops.grouped_mm_weight, h, rows, counts, None),
        "weight_grad.triton": partial(grouped.grouped_mm_weight, h, rows, counts, out=dw),
    }


def _plainly(product: Call, left: Tensor, right: Tensor, counts: list[int], out: Tensor | None) -> None:
    with kernels.off():
        product(left, right, counts, out=out)


def _packed(
    source: Tensor, token_N: Tensor, rows: Tensor, weight: Tensor, counts: list[int], out: Tensor
) -> None:
    ops.gather_rows(source, token_N, out=rows)
    _plainly(ops.grouped_mm, rows, weight, counts, out)
