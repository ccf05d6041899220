"""Who computes a grouped product, in which tiles, and that it reaches who was chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lrmoe import ops
from lrmoe.ops.triton.rule import Product, chosen, tiles
from tests.ops.triton.inputs import DEVICE, assert_close, normal
from tests.ops.triton.test_grouped import COUNTS, plain_rows, plain_weights

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


@pytest.mark.parametrize("add", [False, True])
def test_the_layer_s_products_reach_the_kernels(add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, grad, weight = normal(40, 17), normal(40, 20, seed=1), normal(5, 20, 17, seed=2)

    def both() -> list[Tensor]:
        out = weight.clone()
        ops.grouped_mm_weight(grad, rows, COUNTS, out=out, add=add)
        return [ops.grouped_mm(rows, weight, COUNTS), ops.grouped_mm_input(grad, weight, COUNTS), out]

    by_torch = both()
    taken: list[Any] = []

    def way(*given: Any, **named: Any) -> str:
        taken.append(given)
        return "triton"

    monkeypatch.setattr(ops.grouped, "_way", way)
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

    def __init__(self, aligned: bool, strides: tuple[int, int]) -> None:
        self.aligned, self.stride = aligned, strides.__getitem__


@pytest.mark.parametrize(
    ("counts", "aligned", "sums_rows", "gathered", "way"),
    [
        ([256, 256], True, False, False, "torch"),
        ([256, 250], True, False, False, "torch"),
        ([256, 250], False, False, False, "triton"),
        ([256, 256], True, True, False, "torch"),
        ([256, 250], True, True, False, "torch"),
        ([256, 250], False, True, True, "triton"),
        ([8] * 1024, True, False, False, "triton"),
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
    claims: Any = Claims(aligned, (2048, 1))
    monkeypatch.setattr(ops.grouped, "_fast", lambda *tensors: all(t.aligned for t in tensors))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ops.grouped, "usable", lambda *tensors: None)
    named = {"sums_rows": sums_rows, "gathered": gathered}
    assert ops.grouped._way(claims, claims, counts, (1536, 2048), **named) == way
    if gathered:
        assert ops.reads_by_index(claims, claims, counts, (1536, 2048), sums_rows=sums_rows)
    monkeypatch.setattr(ops.grouped, "usable", lambda *tensors: "switched off")
    whole = aligned and len(counts) < 1024
    assert ops.grouped._way(claims, claims, counts, (1536, 2048), **named) == ("torch" if whole else "loop")
    assert not ops.reads_by_index(claims, claims, counts, (1536, 2048), sums_rows=sums_rows)


@pytest.mark.parametrize(
    ("strides", "counts", "way"),
    [((1, 512), [256, 250], "triton"), ((1, 512), [256, 248], "torch"), ((1, 1), [256, 250], "triton")],
    ids=["columns", "columns of whole tiles", "one column"],
)
def test_rows_that_lie_column_after_column_are_summed_by_torch_from_aligned_rows_on(
    strides: tuple[int, int], counts: list[int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Any = Claims(True, (2048, 1))
    columns: Any = Claims(True, strides)
    monkeypatch.setattr(ops.grouped, "_fast", lambda *tensors: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ops.grouped, "usable", lambda *tensors: None)
    for pair in ((rows, columns), (columns, rows)):
        assert ops.grouped._way(*pair, counts, (1536, 2048), sums_rows=True) == way


@pytest.mark.parametrize("add", [False, True])
def test_what_torch_leaves_in_matrices_of_empty_segments_is_never_seen(
    add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad, rows, before = normal(33, 16), normal(33, 24, seed=1), normal(5, 16, 24, seed=2)
    counts = [1, 0, 9, 0, 23]
    found = plain_weights(grad, rows, counts).float()
    found[1], found[3] = float("nan"), 7.0
    monkeypatch.setattr(ops.grouped, "_way", lambda *given, **named: "torch")
    monkeypatch.setattr(ops.grouped, "_cuda_grouped", lambda *given: found.clone())
    out = before.clone()
    assert ops.grouped_mm_weight(grad, rows, counts, out=out, add=add) is out
    exact = plain_weights(grad, rows, counts)
    assert_close(out, exact + before.double() if add else exact)
    assert torch.equal(out[1], before[1] if add else torch.zeros_like(out[1]))


def test_a_product_of_torch_is_handed_on_where_no_destination_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = normal(4, 8)
    monkeypatch.setattr(ops.grouped, "_way", lambda *given, **named: "torch")
    monkeypatch.setattr(ops.grouped, "_cuda_grouped", lambda *given: made)
    rows, weight, out = normal(4, 6), normal(2, 8, 6), torch.empty(4, 8, device=DEVICE)
    assert ops.grouped_mm(rows, weight, [1, 3]) is made, "no copy"
    assert ops.grouped_mm(rows, weight, [1, 3], out=out) is out
    assert torch.equal(out, made)
    stack = normal(2, 4, 4, seed=3)
    monkeypatch.setattr(ops.grouped, "_cuda_grouped", lambda *given: stack)
    assert ops.grouped_mm_weight(made, made, [1, 3]) is stack, "no copy"


@pytest.mark.parametrize("way", ["triton", "loop"])
def test_a_weight_gradient_makes_its_own_destination(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.grouped, "_way", lambda *given, **named: way)
    grad, rows = normal(40, 20), normal(40, 17, seed=1)
    assert_close(ops.grouped_mm_weight(grad, rows, COUNTS), plain_weights(grad, rows, COUNTS))


def test_on_a_cpu_rows_are_packed() -> None:
    rows = torch.ones(4, 4)
    assert not ops.reads_by_index(rows, rows, [4], (4, 4))
