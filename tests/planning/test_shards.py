from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrmoe.errors import PlanError
from lrmoe.planning import Topology
from lrmoe.planning.seats import Seats
from lrmoe.planning.shards import Cut, ShardExchange, copies_in_turn, expert_cuts, home_seats

sizes = st.integers(1, 40)


@given(rows=sizes, columns=sizes, ranks=st.integers(1, 16))
def test_spans_tile_an_expert(rows: int, columns: int, ranks: int) -> None:
    cut = Cut(rows=rows, columns=columns, ranks=ranks)
    spans = [cut.span(rank) for rank in range(ranks)]
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(rows * columns))
    assert max(cut.width(rank) for rank in range(ranks)) == cut.shard
    assert cut.shard * ranks - cut.size < ranks


def test_projections_of_an_expert() -> None:
    up, down = expert_cuts(6, 5, 4)
    assert (up.rows, up.columns, up.shard) == (10, 6, 15)
    assert (down.rows, down.columns, down.shard) == (6, 5, 8)
    assert [down.width(rank) for rank in range(4)] == [8, 8, 8, 6]


@pytest.mark.parametrize("name", ["rows", "columns", "ranks"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name}=0"):
        Cut(**{"rows": 2, "columns": 2, "ranks": 2, name: 0})


def test_home_layout() -> None:
    seats = home_seats(Topology(ranks=3, experts=6))
    assert seats.expert_Q.tolist() == [0, 1, 2, 3, 4, 5]
    assert seats.rank_Q.tolist() == [0, 0, 1, 1, 2, 2]
    assert not seats.spread


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 5), st.data())
def test_what_ranks_send_is_what_others_receive(experts: list[int], ranks: int, data: st.DataObject) -> None:
    rank_Q = np.sort(
        data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(experts), max_size=len(experts)))
    ).astype(np.int64)
    zeros = np.zeros(len(experts), dtype=np.int64)
    seats = Seats(
        topology=Topology(ranks=ranks, experts=5 * ranks),
        expert_Q=np.array(experts, dtype=np.int64),
        rank_Q=rank_Q,
        assign_RQ=np.zeros((ranks, len(experts)), dtype=np.int64),
        backward_Q=zeros,
    )
    cuts = expert_cuts(3, 5, ranks)
    found = [ShardExchange.of(seats, cuts, rank) for rank in range(ranks)]
    for a in range(ranks):
        for b in range(ranks):
            assert found[a].shards_R[b] == found[b].seats_R[a]
    whole = sum(cut.size for cut in cuts)
    assert [sum(one.seats_R) for one in found] == [
        int((rank_Q == rank).sum()) * whole for rank in range(ranks)
    ]
    assert sum(one.fetch_sent for one in found) == sum(one.return_sent for one in found)


@given(st.lists(st.integers(0, 5), max_size=20))
def test_turns_hold_every_seat_once_and_no_expert_twice(experts: list[int]) -> None:
    expert_Q = np.array(experts, dtype=np.int64)
    turns = copies_in_turn(expert_Q)
    assert sorted(seat for turn in turns for seat in turn) == list(range(len(experts)))
    for turn in turns:
        assert len(set(expert_Q[turn])) == len(turn)
    for expert in set(experts):
        seats = [seat for turn in turns for seat in turn if expert_Q[seat] == expert]
        assert seats == sorted(seats)
