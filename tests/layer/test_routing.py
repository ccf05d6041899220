"""Orders of pairs and rows, against sorting in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lrmoe.layer.routing import (
    Layout,
    expert_order,
    group_entries,
    sort_pairs,
    token_entries,
    tokens_of,
    transposed,
)
from lrmoe.ops import cpu
from lrmoe.planning.cells import part_of_cells, ranges

with_passes = pytest.mark.skipif(not cpu.state()[0], reason=f"compiled passes: {cpu.state()[1]}")


def random_ids(tokens: int, slots: int, experts: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-1, experts + 1, (tokens, slots), generator=gen)


@pytest.mark.parametrize("experts", [1, 7, 40_000])
@pytest.mark.parametrize(("tokens", "slots"), [(0, 2), (1, 1), (50, 3)])
def test_pairs_are_sorted_by_expert_and_stay_in_order_within_one(
    tokens: int, slots: int, experts: int
) -> None:
    ids = random_ids(tokens, slots, experts)
    order, counts = sort_pairs(ids, experts)
    flat = ids.flatten().tolist()
    real = [u for u in range(tokens * slots) if 0 <= flat[u] < experts]
    assert order.tolist()[: len(real)] == sorted(real, key=lambda u: (flat[u], u))
    assert (
        counts.tolist() == [flat.count(e) for e in range(experts)]
        if experts < 100
        else sum(counts) == len(real)
    )
    assert counts.dtype == order.dtype == torch.int64


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=with_passes)])
@pytest.mark.parametrize("rows", [27, 17, 1, 0])
def test_entries_of_a_token_are_its_rows_in_slot_order(rows: int, compiled: bool) -> None:
    tokens, slots = 9, 3
    gen = torch.Generator().manual_seed(1)
    pair_N = torch.randperm(tokens * slots, generator=gen)[:rows]
    with cpu.limited(0 if compiled else None):
        entries = token_entries(pair_N, tokens, slots)
    begin = 0
    for token, end in enumerate(entries.ends_T.tolist()):
        mine = entries.pair_N[begin:end].tolist()
        assert mine == sorted(u for u in pair_N.tolist() if u // slots == token)
        assert pair_N[entries.row_N[begin:end]].tolist() == mine
        begin = end
    assert begin == len(pair_N) == len(entries.row_N)


@with_passes
def test_compiled_entries_refuse_pairs_that_are_none_or_come_twice() -> None:
    for pairs in ([0, 6], [-1], [2, 2], [1] * 7):
        with pytest.raises(IndexError, match=r"out of \[0, 6\) or comes twice"):
            token_entries(torch.tensor(pairs), 3, 2)
    assert token_entries(torch.tensor([4, 9, 1, 9])[::2], 3, 2).ends_T.tolist() == [1, 1, 2]
    assert token_entries(torch.zeros(0, dtype=torch.int64), 0, 2).ends_T.tolist() == []


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 0])
def test_a_pair_belongs_to_the_token_whose_slot_it_is(slots: int) -> None:
    assert tokens_of(torch.arange(5 * slots), slots).tolist() == [t for t in range(5) for _ in range(slots)]


def test_received_rows_are_put_in_expert_then_source_order() -> None:
    mine_RL = np.array([[2, 0, 1], [1, 3, 0], [0, 2, 2]])
    received = [(r, e, i) for r in range(3) for e in range(3) for i in range(mine_RL[r, e])]
    wanted = sorted(range(len(received)), key=lambda m: (received[m][1], received[m][0], received[m][2]))
    assert expert_order(mine_RL).tolist() == wanted
    assert expert_order(np.zeros((2, 2), dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("starts_R", [[0, 2, 4, 6, 8], [0, 0, 5, 8, 8]])
def test_the_layouts_of_all_ranks_fit_together(starts_R: list[int]) -> None:
    rng = np.random.default_rng(0)
    cells_RQ, starts = rng.integers(0, 5, (4, 8)), np.array(starts_R)
    layouts = [Layout.build(cells_RQ, starts, rank, torch.device("cpu")) for rank in range(4)]
    for r, one in enumerate(layouts):
        assert one.segments_S == cells_RQ[:, starts[r] : starts[r + 1]].sum(axis=0).tolist()
        assert one.received == sum(one.segments_S)
        for s, other in enumerate(layouts):
            assert one.send_R[s] == other.receive_R[r]
        rows = torch.arange(one.received)
        assert torch.equal(one.to_received(one.to_seats(rows)), rows)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("starts_R", [[0, 2, 4, 6, 8], [0, 0, 5, 8, 8]])
def test_parts_divide_every_rank_and_every_cell_evenly(parts: int, starts_R: list[int]) -> None:
    rng, starts = np.random.default_rng(parts), np.array(starts_R)
    cells_RQ = rng.integers(0, 30, (4, 8)) * (rng.random((4, 8)) < 0.6)
    found = np.stack([part_of_cells(cells_RQ, starts, part, parts) for part in range(parts)])
    assert np.array_equal(found.sum(axis=0), cells_RQ)
    assert found.min() >= 0
    assert (np.ptp(found, axis=0) <= 1).all()
    rank_rows = np.stack([found[:, :, starts[r] : starts[r + 1]].sum(axis=(1, 2)) for r in range(4)])
    assert (np.ptp(rank_rows, axis=1) <= 1).all()


def test_ranges_are_laid_end_to_end() -> None:
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)).tolist() == []


def test_groups_keep_the_order_of_their_rows() -> None:
    rows, ends = group_entries(torch.tensor([2, 0, 2, 3]), 5)
    assert rows.tolist() == [1, 0, 2, 3]
    assert ends.tolist() == [1, 1, 3, 4, 4]


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (4, 1)])
def test_runs_are_transposed_and_put_back(shape: tuple[int, int]) -> None:
    cells = np.random.default_rng(2).integers(0, 3, size=shape)
    values = torch.arange(int(cells.sum()))
    place = np.repeat(np.arange(cells.size), cells.reshape(-1))  # (a, b) of each value
    a, b = place // shape[1], place % shape[1]
    across = transposed(values, cells)
    assert across.tolist() == values[np.lexsort((a, b))].tolist()
    assert torch.equal(transposed(across, cells.T), values)
