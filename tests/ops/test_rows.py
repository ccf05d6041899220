"""Packing rows, putting them back, and the deterministic sum per token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lrmoe.ops import Workspace, combine, gather_rows, place_rows
from tests.reference import assert_within

pytestmark = pytest.mark.usefixtures("level")

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain_combine(rows: Tensor, index: Tensor, ends: Tensor, weight: Tensor | None) -> Tensor:
    """One token and one row after the other, rounded to the rows' dtype at every step, as index_add does."""
    out, begin = rows.new_zeros(ends.shape[0], rows.shape[1]), 0
    for token, end in enumerate(ends.tolist()):
        for m in range(begin, end):
            row = rows[index[m]]
            out[token] += (row if weight is None else row * weight[m]).to(out.dtype)
        begin = end
    return out


def entries(tokens: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """A random number of entries (0 to 4) per token."""
    gen = torch.Generator().manual_seed(seed)
    each = torch.randint(0, 5, (tokens,), generator=gen)
    index = torch.randint(0, max(rows, 1), (int(each.sum()),), generator=gen)
    return index, each.cumsum(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 9])
def test_gather_and_place_are_inverse(rows: int, dtype: torch.dtype) -> None:
    source, order = (
        normal(rows, 5, dtype=dtype),
        torch.randperm(rows, generator=torch.Generator().manual_seed(1)),
    )
    packed = gather_rows(source, order)
    assert packed.is_contiguous()
    assert torch.equal(packed, source[order])
    target = torch.full_like(source, float("nan"))
    assert place_rows(target, order, packed) is target
    assert torch.equal(target, source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 5, 6])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_place_keeps_every_bit_and_what_lies_around(offset: int, width: int, dtype: torch.dtype) -> None:
    order = torch.tensor([4, 0, 6])
    target, rows = normal(7, 12, dtype=dtype), normal(3, 10, seed=1, dtype=dtype)
    rows[1, :8] = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 6e-8, -float("nan"), 0.0]
    )
    expected = target.clone()
    for row, at in zip(rows, order.tolist(), strict=True):
        expected[at, offset : offset + width] = row[offset : offset + width]
    cut = slice(offset, offset + width)
    place_rows(target[:, cut], order, rows[:, cut])
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    assert torch.equal(target.view(bits), expected.view(bits))


def test_gather_takes_any_strides_and_repeats() -> None:
    source = normal(6, 8)
    index = torch.tensor([5, 0, 0, 3])
    for view in (source.t(), source[:, ::2], source[:1].expand(6, 8), source.flip(0)):
        wanted = index.clamp(max=view.shape[0] - 1)
        assert torch.equal(gather_rows(view, wanted), view.contiguous()[wanted])
    out = torch.full((4, 8), float("nan"), dtype=torch.float64)
    assert gather_rows(source, index, out=out) is out
    assert torch.equal(out, source[index])


@pytest.mark.parametrize("weights", ["none", "same", "wider"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 513, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_sums_rows_per_token(dtype: torch.dtype, tokens: int, weights: str) -> None:
    rows = normal(40, 6, dtype=dtype)
    index, ends = entries(tokens, 40, seed=tokens)
    weight = normal(index.shape[0], seed=3).abs()
    given = {
        "none": None,
        "same": weight.to(dtype),
        "wider": weight.to(torch.promote_types(dtype, torch.float32)),
    }[weights]
    found = combine(rows, index, ends, given)
    wide = None if given is None else given.double()
    exact = plain_combine(rows.double(), index, ends, wide)
    assert found.dtype == dtype
    assert_within(found, exact, plain_combine(rows, index, ends, given), "combine")


def test_combine_accumulates_low_precision_rows_in_fp32() -> None:
    rows = torch.cat([torch.full((1, 8), 256.0), torch.full((255, 8), 1.0)]).bfloat16()
    index, ends = torch.arange(256), torch.tensor([256])
    for weight in (None, torch.ones(256), torch.ones(256).bfloat16()):
        assert combine(rows, index, ends, weight)[0].tolist() == [512.0] * 8  # bf16 sums would stick at 256


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_index_that_names_no_row_is_an_error(dtype: torch.dtype) -> None:
    for index in (torch.tensor([0, 3]), torch.tensor([-1, 0])):
        with pytest.raises((IndexError, RuntimeError)):
            combine(normal(3, 4, dtype=dtype), index, torch.tensor([2]))


def test_combine_leaves_tokens_without_entries_zero_in_dirty_memory() -> None:
    dirt = torch.full((64, 16), float("nan"))
    del dirt
    found = combine(normal(3, 16, dtype=torch.float32), torch.tensor([2, 0]), torch.tensor([0, 2, 2, 2]))
    assert torch.equal(found[[0, 2, 3]], torch.zeros(3, 16))
    assert torch.equal(
        combine(normal(0, 16), torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
        torch.zeros(3, 16, dtype=torch.float64),
    )


def test_workspace_reuses_by_name_and_dtype_and_forgets_on_release() -> None:
    space, like = Workspace(), torch.empty(0)
    first = space.take("rows", (4, 3), like)
    assert first.shape == (4, 3)
    assert space.take("rows", (2, 3), like).data_ptr() == first.data_ptr()
    assert space.take("other", (4, 3), like).data_ptr() != first.data_ptr()
    assert space.take("rows", (4, 3), like.double()).dtype == torch.float64
    assert space.take("rows", (0, 3), like).shape == (0, 3)
    space.release()
    assert not vars(space)["_buffers"]
