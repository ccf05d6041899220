"""Grouped products of the kernels against one product per segment in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lrmoe.ops.triton.grouped import grouped_mm, grouped_mm_weight, row_tiles
from lrmoe.ops.triton.rule import Tiles
from tests.ops.triton.inputs import DEVICE, DTYPES, Poisoned, assert_close, normal, numbers

SMALL = Tiles(rows=16, columns=16, depth=16, warps=4, stages=1)
COUNTS = [1, 7, 9, 0, 23]
BY = [pytest.param(SMALL, id="several tiles"), pytest.param(None, id="default tiles")]


def segments(counts: list[int]) -> list[slice]:
    ends = [sum(counts[: s + 1]) for s in range(len(counts))]
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def plain_rows(rows: Tensor, weight_SAB: Tensor, counts: list[int]) -> Tensor:
    parts = [rows[cut].double() @ weight_SAB[s].double() for s, cut in enumerate(segments(counts))]
    return torch.cat([*parts, rows.new_empty((0, weight_SAB.shape[2]), dtype=torch.float64)])


def plain_weights(grad: Tensor, rows: Tensor, counts: list[int]) -> Tensor:
    return torch.stack([grad[cut].double().t() @ rows[cut].double() for cut in segments(counts)])


def check_rows(counts: list[int], dtype: torch.dtype, by: Tiles | None) -> None:
    rows, weight = normal(sum(counts), 17, dtype=dtype), normal(len(counts), 20, 17, seed=1, dtype=dtype)
    matrix, target = weight.transpose(1, 2), Poisoned(sum(counts), 20, dtype)
    assert grouped_mm(rows, matrix, counts, out=target.inside, by=by) is target.inside
    assert_close(target.inside, plain_rows(rows, matrix, counts))
    assert target.untouched()


def check_weights(counts: list[int], dtype: torch.dtype, by: Tiles | None, *, add: bool) -> None:
    grad, rows = normal(sum(counts), 20, dtype=dtype), normal(sum(counts), 17, seed=1, dtype=dtype)
    exact = plain_weights(grad, rows, counts)
    for wide in {dtype, torch.float32}:
        before = normal(len(counts), 20, 17, seed=2, dtype=wide)
        out = before.clone() if add else torch.full_like(before, float("nan"))
        assert grouped_mm_weight(grad, rows, counts, out=out, add=add, by=by) is out
        assert_close(out, exact + before.double() if add else exact)
        for s, count in enumerate(counts):
            if count == 0:
                assert torch.equal(out[s], before[s] if add else torch.zeros_like(out[s]))


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_times_their_matrix(dtype: torch.dtype, by: Tiles | None) -> None:
    check_rows(COUNTS, dtype, by)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradients(dtype: torch.dtype, by: Tiles | None, add: bool) -> None:
    check_weights(COUNTS, dtype, by, add=add)


@pytest.mark.parametrize("counts", [[0, 0], [40], [0, 3, 0, 17, 0]], ids=str)
def test_any_segments(counts: list[int]) -> None:
    check_rows(counts, torch.float32, None)
    check_weights(counts, torch.float32, None, add=False)


@pytest.mark.parametrize("width", [1, 15, 17])
def test_widths_that_are_no_multiple_of_anything(width: int) -> None:
    counts, other = [1, 7, 9, 0, 15], 2 * width + 1
    rows, grad = normal(32, width), normal(32, other, seed=1)
    weight = normal(5, width, other, seed=2)
    target = Poisoned(32, other)
    assert_close(
        grouped_mm(rows, weight, counts, out=target.inside, by=SMALL), plain_rows(rows, weight, counts)
    )
    assert target.untouched()
    out = torch.full((5, other, width), float("nan"), device=DEVICE)
    assert_close(grouped_mm_weight(grad, rows, counts, out=out, by=SMALL), plain_weights(grad, rows, counts))


def test_operands_and_results_with_strides() -> None:
    counts = [3, 0, 20]
    rows = normal(12, 23).t()
    weight = normal(3, 30, 24, seed=1)[:, ::2, 1:11].transpose(1, 2)[:, :, :12].transpose(1, 2)
    assert rows.shape[1] == weight.shape[1] == 12
    out = torch.full((10, 23), float("nan"), device=DEVICE).t()
    assert_close(grouped_mm(rows, weight, counts, out=out, by=SMALL), plain_rows(rows, weight, counts))
    grad = normal(23, 40, seed=3)[:, ::4]
    found = torch.full((12, 3, 10), float("nan"), device=DEVICE).permute(1, 2, 0)
    assert_close(
        grouped_mm_weight(grad, rows, counts, out=found, by=SMALL), plain_weights(grad, rows, counts)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_rows_read_by_index_and_results_put_by_index(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    counts, gen = [5, 0, 18], torch.Generator().manual_seed(4)
    source, weight = normal(9, 24, dtype=dtype), normal(3, 24, 20, seed=1, dtype=dtype)
    index = torch.randint(0, 9, (23,), generator=gen).to(DEVICE, index_dtype)
    place = torch.randperm(30, generator=gen)[:23].to(DEVICE, index_dtype)
    target = Poisoned(30, 20, dtype)
    grouped_mm(source, weight, counts, out=target.inside, index_N=index, place_N=place, by=SMALL)
    rows = source[index.long()]
    assert_close(target.inside[place.long()], plain_rows(rows, weight, counts))
    assert int(target.inside.isnan().sum()) == 7 * 20
    assert target.untouched()


def test_a_weight_gradient_of_rows_read_by_index() -> None:
    counts = [5, 0, 18]
    rows, grad = normal(9, 24), normal(11, 20, seed=1)
    gen = torch.Generator().manual_seed(4)
    index, of_grad = (torch.randint(0, n, (23,), generator=gen).to(DEVICE) for n in (9, 11))
    out = torch.full((3, 20, 24), float("nan"), device=DEVICE)
    grouped_mm_weight(grad, rows, counts, out=out, index_N=index, grad_index_N=of_grad, by=SMALL)
    assert_close(out, plain_weights(grad[of_grad], rows[index], counts))


def test_rows_after_the_last_segment_are_neither_read_nor_written() -> None:
    rows, weight = normal(12, 16), normal(2, 16, 16, seed=1)
    rows[7:] = float("nan")
    out = torch.full((12, 16), float("nan"), device=DEVICE)
    grouped_mm(rows, weight, [3, 4], out=out, by=SMALL)
    assert_close(out[:7], plain_rows(rows[:7], weight, [3, 4]))
    assert bool(out[7:].isnan().all())
    found = torch.full((2, 16, 16), float("nan"), device=DEVICE)
    assert_close(
        grouped_mm_weight(rows, rows, [3, 4], out=found, by=SMALL),
        plain_weights(rows[:7], rows[:7], [3, 4]),
    )


def test_non_finite_numbers_stay_in_their_rows() -> None:
    rows, weight = normal(20, 16), normal(2, 16, 16, seed=1)
    rows[3, 5], rows[15, 0] = float("inf"), float("nan")
    out = torch.empty(20, 16, device=DEVICE)
    grouped_mm(rows, weight, [9, 11], out=out, by=SMALL)
    broken = ~out.isfinite().all(dim=1)
    assert broken.nonzero().squeeze(1).tolist() == [3, 15]


def test_sums_are_wider_than_fp16() -> None:
    rows = torch.full((1, 64), 300.0, dtype=torch.float16, device=DEVICE)
    weight = torch.full((1, 64, 16), 300.0, dtype=torch.float16, device=DEVICE)
    weight[:, 1::2] *= -1
    out = torch.full((1, 16), float("nan"), dtype=torch.float16, device=DEVICE)
    assert torch.equal(grouped_mm(rows, weight, [1], out=out), torch.zeros_like(out))


def test_runs_repeat_and_a_row_does_not_depend_on_its_neighbours() -> None:
    rows, weight = normal(40, 18, dtype=torch.bfloat16), normal(2, 18, 16, seed=1, dtype=torch.bfloat16)

    def run(begin: int, counts: list[int]) -> Tensor:
        part = rows[begin : begin + sum(counts)]
        out = torch.empty(part.shape[0], 16, dtype=part.dtype, device=DEVICE)
        return grouped_mm(part, weight, counts, out=out, by=SMALL)

    whole = run(0, [21, 19])
    assert torch.equal(run(0, [21, 19]), whole)
    assert torch.equal(run(4, [17, 19]), whole[4:])


def test_nothing_to_do_writes_nothing() -> None:
    out = torch.full((0, 16), float("nan"), device=DEVICE)
    assert grouped_mm(normal(0, 16), normal(2, 16, 16), [0, 0], out=out).shape == (0, 16)
    none = torch.empty(0, 16, 16, device=DEVICE)
    assert grouped_mm_weight(normal(0, 16), normal(0, 16), [], out=none) is none
    kept = torch.full((2, 4, 4), 3.0, device=DEVICE)
    grouped_mm_weight(normal(0, 4), normal(0, 4), [0, 0], out=kept, add=True)
    assert bool((kept == 3).all())
    wide = grouped_mm(normal(3, 0), normal(1, 0, 8), [3], out=torch.full((3, 8), float("nan"), device=DEVICE))
    assert bool((wide == 0).all())


def test_tiles_of_rows_never_cross_segments() -> None:
    assert row_tiles([0, 5, 0, 16, 1, 0], 8).tolist() == [[1, 0, 5], [3, 5, 13], [3, 13, 21], [4, 21, 22]]
    assert row_tiles([], 8).shape == row_tiles([0, 0], 8).shape == (0, 3)


def test_indices_that_repeat_are_summed_in_a_weight_gradient() -> None:
    rows, grad = normal(2, 16), normal(4, 16, seed=1)
    out = torch.empty(1, 16, 16, device=DEVICE)
    grouped_mm_weight(grad, rows, [4], out=out, index_N=numbers([1, 1, 1, 0]), by=SMALL)
    assert_close(out, plain_weights(grad, rows[[1, 1, 1, 0]], [4]))
