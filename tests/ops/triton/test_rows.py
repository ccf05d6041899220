"""Kernels that move, sum and measure rows, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lrmoe.ops.triton.rows import abs_sums, combine, gather_rows, place_rows, row_norms
from tests.ops.triton.inputs import DEVICE, DTYPES, Poisoned, assert_close, normal, numbers

WIDTHS = [1, 5, 48, 1100]


def shuffled(rows: int, seed: int = 1) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def plain_combine(rows: Tensor, index: Tensor, ends: Tensor, weight: Tensor | None) -> Tensor:
    out, begin = torch.zeros(ends.shape[0], rows.shape[1], dtype=torch.float64, device=DEVICE), 0
    for token, end in enumerate(ends.tolist()):
        for m in range(begin, end):
            out[token] += rows[index[m]].double() * (1.0 if weight is None else weight[m].double())
        begin = end
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 9])
def test_gather_writes_each_row_and_nothing_beside(rows: int, dtype: torch.dtype) -> None:
    source, index = normal(9, 48, dtype=dtype), shuffled(9)[:rows]
    target = Poisoned(rows, 48, dtype)
    assert gather_rows(source, index, out=target.inside) is target.inside
    assert torch.equal(target.inside, source[index])
    assert target.untouched()


@pytest.mark.parametrize("width", WIDTHS)
def test_gather_takes_any_width_stride_and_repeat(width: int) -> None:
    source, upright = normal(6, 2 * width), normal(width, 6)
    index = numbers([5, 0, 0, 3, 5])
    for view in (source[:, ::2], source[:, 1 : width + 1], upright.t(), source[:1].expand(6, -1)):
        assert torch.equal(gather_rows(view, index), view[index])
    assert gather_rows(source[:, :0], index).shape == (5, 0)


def test_gather_takes_narrow_and_strided_indices() -> None:
    source, index = normal(6, 8), numbers([5, 0, 4, 1, 3, 2])
    assert torch.equal(gather_rows(source, index.int()), source[index])
    assert torch.equal(gather_rows(source, index[::2]), source[index[::2]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_scales_rows_in_fp32(dtype: torch.dtype) -> None:
    source, index, scale = normal(6, 33, dtype=dtype), numbers([5, 0, 0, 3]), normal(4, seed=2)
    found = gather_rows(source, index, scale_N=scale)
    assert found.dtype == dtype
    assert_close(found, source[index].double() * scale.double()[:, None])


def test_rows_far_into_a_large_buffer_are_found() -> None:
    """Past 2^31 elements, where a 32-bit offset would wrap; all but three rows' pages stay untouched."""
    stride, row = 2**31 - 2**20, torch.arange(64, dtype=torch.int8, device=DEVICE)
    view = torch.empty(2 * stride + 64, dtype=torch.int8, device=DEVICE).as_strided((3, 64), (stride, 1))
    place_rows(view, numbers([2, 1]), torch.stack([row, row.flip(0)]))
    assert torch.equal(view[2], row)
    assert torch.equal(gather_rows(view, numbers([1, 2])), torch.stack([row.flip(0), row]))


@pytest.mark.parametrize("width", WIDTHS)
def test_place_is_the_inverse_of_gather(width: int) -> None:
    source, order = normal(9, width), shuffled(9)
    target = Poisoned(9, width)
    assert place_rows(target.inside, order, gather_rows(source, order)) is target.inside
    assert torch.equal(target.inside, source)
    assert target.untouched()


def test_place_leaves_other_rows_alone() -> None:
    target = torch.full((5, 8), 7.0, device=DEVICE)
    place_rows(target, numbers([3]), normal(1, 8))
    assert torch.equal(target[[0, 1, 2, 4]], torch.full((4, 8), 7.0, device=DEVICE))
    assert torch.equal(place_rows(target, numbers([]), normal(0, 8)), target)


@pytest.mark.parametrize("weights", ["none", "same", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_sums_each_tokens_rows(dtype: torch.dtype, weights: str) -> None:
    rows, each = normal(12, 40, dtype=dtype), torch.tensor([0, 3, 1, 0, 0, 4, 2, 0], device=DEVICE)
    index = torch.randint(0, 12, (10,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    weight = {"none": None, "same": normal(10, seed=4, dtype=dtype), "fp32": normal(10, seed=4)}[weights]
    found = combine(rows, index, each.cumsum(0), weight)
    assert found.dtype == dtype
    assert_close(found, plain_combine(rows, index, each.cumsum(0), weight), weights)
    assert torch.equal(found[[0, 3, 4, 7]], torch.zeros(4, 40, dtype=dtype, device=DEVICE))


def test_combine_of_nothing() -> None:
    assert combine(normal(3, 8), numbers([]), numbers([])).shape == (0, 8)
    assert torch.equal(combine(normal(0, 8), numbers([]), numbers([0, 0])), torch.zeros(2, 8, device=DEVICE))


def test_combine_takes_wide_and_strided_rows_and_accumulates_in_fp32() -> None:
    rows = normal(4, 2200)[:, ::2]
    found = combine(rows, numbers([2, 0, 3]), numbers([2, 3]))
    assert_close(found, plain_combine(rows, numbers([2, 0, 3]), numbers([2, 3]), None))
    many = torch.cat([torch.full((1, 8), 256.0), torch.ones(64, 8)]).bfloat16().to(DEVICE)
    assert combine(many, torch.arange(65, device=DEVICE), numbers([65]))[0].tolist() == [320.0] * 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_and_sums(width: int, dtype: torch.dtype) -> None:
    rows = normal(7, width, dtype=dtype)
    for found, exact in (
        (row_norms(rows), rows.double().norm(dim=1)),
        (abs_sums(rows), rows.double().abs().sum(dim=1)),
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_norms_of_strided_large_and_missing_rows() -> None:
    rows = normal(6, 8)
    torch.testing.assert_close(row_norms(rows[:, ::2]), rows[:, ::2].norm(dim=1))
    torch.testing.assert_close(abs_sums(rows[:1].expand(4, 8)), rows[:1].abs().sum(dim=1).expand(4))
    assert row_norms(rows[:0]).shape == abs_sums(rows[:0]).shape == (0,)
    large = torch.full((1, 64), 6e4, dtype=torch.float16, device=DEVICE)
    assert row_norms(large).tolist() == pytest.approx([6e4 * 8], rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    rows = normal(3, 20)
    rows[1, 7] = bad
    assert row_norms(rows).isfinite().tolist() == abs_sums(rows).isfinite().tolist() == [True, False, True]
    found = combine(rows, numbers([0, 2, 1]), numbers([2, 3]))
    assert found.isfinite().sum(dim=1).tolist() == [20, 19]
    assert torch.equal(gather_rows(rows, numbers([1, 0])).isfinite().sum(dim=1).cpu(), torch.tensor([19, 20]))


def test_a_row_is_the_same_whatever_lies_beside_it() -> None:
    rows = normal(70, 100)
    assert torch.equal(row_norms(rows)[37:38], row_norms(rows[37:38]))
    assert torch.equal(abs_sums(rows)[69:], abs_sums(rows[69:]))
