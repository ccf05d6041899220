"""Grouped products against one plain product per segment, in three forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lrmoe.ops import grouped_mm, grouped_mm_input, grouped_mm_weight
from tests.reference import assert_within

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
COUNTS = [[], [0], [0, 0, 0], [1], [1, 7, 9, 0, 15], [0, 3, 0, 2, 0], [3, 5], [162, 0, 77, 46, 0, 83]]
FORMS = ["forward", "input", "weight"]


def segments(counts: list[int]) -> list[slice]:
    ends = [sum(counts[: s + 1]) for s in range(len(counts))]
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def operands(
    counts: list[int], a: int, b: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (N,A), gradients (N,B), weights (S,B,A)."""
    gen = torch.Generator().manual_seed(seed)
    shapes = (sum(counts), a), (sum(counts), b), (len(counts), b, a)
    rows, grad, weight = (torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in shapes)
    return rows, grad, weight


def plain(form: str, rows: Tensor, grad: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    if form == "weight":
        found = torch.zeros_like(weight)
        for s, cut in enumerate(segments(counts)):
            found[s] = grad[cut].t() @ rows[cut]
        return found
    parts = [
        rows[cut] @ weight[s].t() if form == "forward" else grad[cut] @ weight[s]
        for s, cut in enumerate(segments(counts))
    ]
    wide = weight.shape[1] if form == "forward" else weight.shape[2]
    return torch.cat([*parts, rows.new_empty(0, wide)])


def ours(form: str, rows: Tensor, grad: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    if form == "forward":
        return grouped_mm(rows, weight, counts)
    if form == "input":
        return grouped_mm_input(grad, weight, counts)
    return grouped_mm_weight(grad, rows, counts, out=torch.full_like(weight, float("nan")))


def check(form: str, rows: Tensor, grad: Tensor, weight: Tensor, counts: list[int]) -> None:
    found = ours(form, rows, grad, weight, counts)
    exact = plain(form, rows.double(), grad.double(), weight.double(), counts)
    assert found.dtype == rows.dtype
    assert_within(found, exact, plain(form, rows, grad, weight, counts), form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_equals_a_product_per_segment(form: str, counts: list[int], dtype: torch.dtype) -> None:
    check(form, *operands(counts, 24, 40, dtype), counts)


@pytest.mark.parametrize("width", [1, 20, 24, 33])
@pytest.mark.parametrize("form", FORMS)
def test_widths_that_are_no_multiple_of_anything(form: str, width: int) -> None:
    counts = [1, 7, 9, 0, 15]
    check(form, *operands(counts, width, 2 * width + 1, torch.bfloat16), counts)


@pytest.mark.parametrize("form", FORMS)
def test_operands_with_strides(form: str) -> None:
    counts = [3, 0, 5]
    rows, grad, weight = operands(counts, 12, 10, torch.float32)
    rows_view = torch.cat([rows, rows], dim=1)[:, :12]
    grad_view = grad.t().contiguous().t()
    weight_view = weight.transpose(1, 2).contiguous().transpose(1, 2)
    check(form, rows_view, grad_view, weight_view, counts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_written_in_place_and_empty_segments_are_zeroed(dtype: torch.dtype) -> None:
    counts = [0, 4, 0]
    rows, grad, weight = operands(counts, 6, 8, dtype)
    out = torch.full_like(weight, float("nan"))
    assert grouped_mm_weight(grad, rows, counts, out=out) is out
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    buffer = torch.full((6, 8), float("nan"), dtype=dtype)
    assert grouped_mm(rows, weight, counts, out=buffer[1:5]).data_ptr() == buffer[1:5].data_ptr()
    assert bool(buffer[[0, 5]].isnan().all())
    assert not bool(buffer[1:5].isnan().any())


@pytest.mark.parametrize("form", FORMS)
def test_twenty_runs_agree_bitwise(form: str) -> None:
    counts = [5, 0, 130, 1]
    given = operands(counts, 64, 48, torch.bfloat16)
    first = ours(form, *given, counts)
    assert all(torch.equal(first, ours(form, *given, counts)) for _ in range(19))
