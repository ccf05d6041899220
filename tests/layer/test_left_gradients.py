"""Weight gradients that the experts' backward leaves for later are those that it would have computed, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lrmoe.layer.buffers import Rows, Sink
from lrmoe.layer.experts import BLOCK_ROWS, experts_backward, first_weight_gradients
from lrmoe.layer.seat_weights import Needs, Slots, WeightGrads, Weights

HOMES, FOREIGN, HIDDEN, WIDTH = 3, 2, 16, 8
COUNTS = [
    [0, 0, 0, 0, 0],
    [1, 0, 7, 0, 9],
    [0, 9, 0, 0, 0],
    [0, 0, 0, 7, 0],
    [BLOCK_ROWS, 5, 3, BLOCK_ROWS + 1, 2],
]


def weights(dtype: torch.dtype) -> Weights:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(HOMES + FOREIGN, 2 * WIDTH, HIDDEN, generator=generator).to(dtype)
    down = torch.randn(HOMES + FOREIGN, HIDDEN, WIDTH, generator=generator).to(dtype)
    slots = Slots.here(gate_up[HOMES:], down[HOMES:])
    return Weights(gate_up=gate_up[:HOMES], down=down[:HOMES], activation="silu", slots=slots)


def rows(count: int, width: int, dtype: torch.dtype, seed: int, *, spare: int = 3) -> Rows:
    """Rows read by index out of a larger buffer, whose other rows are NaN."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.full((count + spare, width), torch.nan).to(dtype)
    index = torch.randperm(count + spare, generator=generator)[:count]
    source[index] = torch.randn(count, width, generator=generator).to(dtype)
    return Rows(source=source, index_M=index)


def backward(
    counts: list[int], dtype: torch.dtype, *, stash: bool, add: bool, leaves: bool
) -> tuple[Tensor, Tensor, WeightGrads]:
    count, given = sum(counts), weights(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    grads = WeightGrads.like(given, Needs(gate_up=True, down=True), home=dtype, slots=wide, zero=add)
    for tensor in (*grads.home, *grads.foreign):
        assert tensor is not None
        tensor.fill_(0.5 if add else torch.nan)  # a sum so far, or what nobody may leave as it is
    x, g = rows(count, HIDDEN, dtype, 2), rows(count, HIDDEN, dtype, 3)
    h = rows(count, 2 * WIDTH, dtype, 4, spare=0) if stash else None
    scale = torch.linspace(0.1, 2, count, dtype=wide)
    dx = Sink(lambda: torch.empty(count, HIDDEN, dtype=dtype))
    dh = torch.full((count, 2 * WIDTH), torch.nan, dtype=dtype) if leaves else None
    dots = experts_backward(
        given, x, h, g, scale, counts, dx=dx, dx_index=torch.arange(count).flip(0), grads=grads, add=add, dh=dh
    )  # fmt: skip
    if dh is not None:
        for foreign in (True, False):
            first_weight_gradients(dh, x, counts, HOMES, grads, add=add, foreign=foreign)
    return dots, dx.whole, grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("stash", [True, False])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_what_is_left_for_later_gives_the_same_bits(
    counts: list[int], add: bool, stash: bool, dtype: torch.dtype
) -> None:
    one = backward(counts, dtype, stash=stash, add=add, leaves=False)
    two = backward(counts, dtype, stash=stash, add=add, leaves=True)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    pairs = zip((*one[2].home, *one[2].foreign), (*two[2].home, *two[2].foreign), strict=True)
    for first, second in pairs:
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)
        assert bool(second.isfinite().all())


def test_foreign_seats_are_served_before_homes() -> None:
    """After the first half the foreign gradients are complete and the home ones untouched."""
    counts, given = [4, 0, 3, 2, 5], weights(torch.float32)
    grads = WeightGrads.like(
        given, Needs(gate_up=True, down=False), home=torch.float32, slots=torch.float32, zero=False
    )
    home, foreign = grads.home[0], grads.foreign[0]
    assert home is not None
    assert foreign is not None
    home.fill_(torch.nan)
    foreign.fill_(torch.nan)
    dh, x = torch.randn(14, 2 * WIDTH), Rows(source=torch.randn(14, HIDDEN), index_M=None)
    first_weight_gradients(dh, x, counts, HOMES, grads, add=False, foreign=True)
    assert bool(home.isnan().all())
    torch.testing.assert_close(foreign[1], dh[9:].T @ x.source[9:])
    first_weight_gradients(dh, x, counts, HOMES, grads, add=False, foreign=False)
    torch.testing.assert_close(home[0], dh[:4].T @ x.source[:4])
    assert bool((home[1] == 0).all())


def test_released_slots_are_not_read_again() -> None:
    given = weights(torch.float32)
    assert given.of(slice(HOMES, HOMES + 1))[0].shape == (1, 2 * WIDTH, HIDDEN)
    given.release()
    given.release()
    assert given.of(slice(0, 1))[0].shape == (1, 2 * WIDTH, HIDDEN)
    with pytest.raises(AssertionError, match="after their release"):
        given.of(slice(HOMES, HOMES + 1))
