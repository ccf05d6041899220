"""Grouped products of the kernels against one product per segment in float64, and the rule that chooses them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lrmoe import ops
from lrmoe.ops.triton.grouped import grouped_mm, grouped_mm_weight, row_tiles
from lrmoe.ops.triton.rule import Product, Tiles, chosen, tiles
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


QWEN = Product(dtype=torch.bfloat16, rows=32768, segments=128, a=2048, b=1536)


@pytest.mark.parametrize(
    ("change", "way"),
    [
        ({}, "torch"),
        ({"gathered": True}, "torch"),
        ({"gathered": True, "b": 96}, "triton"),
        ({"aligned": False}, "triton"),
        ({"dtype": torch.float16}, "triton"),
        ({"dtype": torch.float32}, "loop"),
        ({"dtype": torch.float32, "rows": 1024}, "triton"),
        ({"dtype": torch.float32, "gathered": True}, "loop"),
        ({"dtype": torch.float32, "gathered": True, "rows": 1024}, "triton"),
        ({"dtype": torch.float64}, "loop"),
        ({"dtype": torch.float64, "gathered": True, "rows": 0, "segments": 0}, "loop"),
    ],
    ids=str,
)
def test_who_computes_what_on_hopper(change: dict[str, Any], way: str) -> None:
    assert chosen(dataclasses.replace(QWEN, **change), (9, 0)) == way


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_take_the_kernel_for_bf16(capability: tuple[int, int]) -> None:
    assert chosen(QWEN, capability) == "triton"


def test_tiles_fit_the_product() -> None:
    large = tiles(QWEN)
    assert (large.rows, large.columns, large.depth, large.warps, large.resident) == (128, 128, 64, 8, 1)
    for rows, height in ((1, 16), (128 * 17, 32), (128 * 100, 128), (10**6, 128)):
        assert tiles(dataclasses.replace(QWEN, rows=rows)).rows == height
    narrow = tiles(dataclasses.replace(QWEN, b=7, a=9, dtype=torch.float32))
    assert (narrow.rows, narrow.columns, narrow.depth, narrow.warps, narrow.resident) == (64, 16, 16, 4, 3)
    sums = tiles(dataclasses.replace(QWEN, rows=128 * 20, b=48), sums_rows=True)
    assert (sums.rows, sums.columns, sums.depth) == (64, 128, 32)


def test_indices_that_repeat_are_summed_in_a_weight_gradient() -> None:
    rows, grad = normal(2, 16), normal(4, 16, seed=1)
    out = torch.empty(1, 16, 16, device=DEVICE)
    grouped_mm_weight(grad, rows, [4], out=out, index_N=numbers([1, 1, 1, 0]), by=SMALL)
    assert_close(out, plain_weights(grad, rows[[1, 1, 1, 0]], [4]))


@pytest.mark.parametrize("add", [False, True])
def test_the_layer_s_products_reach_the_kernels(add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, grad, weight = normal(40, 17), normal(40, 20, seed=1), normal(5, 20, 17, seed=2)

    def both() -> list[Tensor]:
        out = weight.clone()
        ops.grouped_mm_weight(grad, rows, COUNTS, out=out, add=add)
        return [ops.grouped_mm(rows, weight, COUNTS), ops.grouped_mm_input(grad, weight, COUNTS), out]

    by_torch = both()
    taken: list[Any] = []
    monkeypatch.setattr(ops.grouped, "_way", lambda *given, **named: (taken.append(given), "triton")[1])
    for found, wanted in zip(both(), by_torch, strict=True):
        assert_close(found, wanted.double())
    # The weight gradient, forward, the input gradient: width of the result and of the rows.
    assert [tuple(given[3]) for given in taken] == [(20, 17), (20, 17), (17, 20)]


def test_rows_are_read_by_index_where_the_rule_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    source, weight, grad = normal(9, 17), normal(5, 20, 17, seed=1), normal(40, 20, seed=2)
    index = torch.arange(40, device=DEVICE) % 9
    monkeypatch.setattr(ops.grouped, "_way", lambda *given, **named: "loop")
    with pytest.raises(AssertionError, match="packed first"):
        ops.grouped_mm(source, weight, COUNTS, index_N=index)
    monkeypatch.setattr(ops.grouped, "_way", lambda *given, **named: "triton")
    found = ops.grouped_mm(source, weight, COUNTS, index_N=index)
    assert_close(found, plain_rows(source[index], weight.transpose(1, 2), COUNTS))
    out = torch.empty_like(weight)
    assert_close(
        ops.grouped_mm_weight(grad, source, COUNTS, out=out, index_N=index),
        plain_weights(grad, source[index], COUNTS),
    )


class Claims:
    """A bf16 tensor that says it lies on a GPU."""

    is_cuda, dtype, device = True, torch.bfloat16, "cuda"

    def __init__(self, aligned: bool) -> None:
        self.aligned = aligned


@pytest.mark.parametrize(
    ("counts", "aligned", "sums_rows", "gathered", "way"),
    [
        ([256, 256], True, False, False, "torch"),
        ([256, 250], True, False, False, "torch"),
        ([256, 250], False, False, False, "triton"),
        ([256, 256], True, True, False, "torch"),
        ([256, 250], True, True, False, "triton"),  # the second segment begins at no multiple of 16 bytes
        ([256, 250], True, True, True, "triton"),
    ],
)
def test_what_the_rule_is_asked(
    counts: list[int],
    aligned: bool,
    sums_rows: bool,
    gathered: bool,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claims: Any = Claims(aligned)
    monkeypatch.setattr(ops.grouped, "_fast", lambda *tensors: all(t.aligned for t in tensors))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ops.grouped, "usable", lambda *tensors: None)
    named = {"sums_rows": sums_rows, "gathered": gathered}
    assert ops.grouped._way(claims, claims, counts, (1536, 2048), **named) == way
    if gathered:
        assert ops.reads_by_index(claims, claims, counts, (1536, 2048), sums_rows=sums_rows)
    monkeypatch.setattr(ops.grouped, "usable", lambda *tensors: "switched off")
    whole = aligned and not (sums_rows and any(count % 8 for count in counts))
    assert ops.grouped._way(claims, claims, counts, (1536, 2048), **named) == ("torch" if whole else "loop")
    assert not ops.reads_by_index(claims, claims, counts, (1536, 2048), sums_rows=sums_rows)


def test_on_a_cpu_rows_are_packed() -> None:
    rows = torch.ones(4, 4)
    assert not ops.reads_by_index(rows, rows, [4], (4, 4))
