"""Controllers' states by rank: what is shared stands once, and follows its experts to another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lrmoe.checkpoint.layers import gather_layers, layers_of
from lrmoe.errors import RankError
from tests.distributed.pool import Pool


def state_of(rank: int, ranks: int) -> dict[str, Any]:
    """Of one layer with 4 experts."""
    first, count = rank * 4 // ranks, 4 // ranks
    layer = {
        "mean": [float(e) for e in range(first, first + count)],
        "calls": 7,
        "past": {"counts": [[1, 2]]},
    }
    return {"step": 3, "layers": {"a": layer, "b": {"mean": [0.5] * count}}}


def gathered_states(ranks: int) -> list[dict[str, Any]]:
    return gather_layers(dist.group.WORLD, lambda: state_of(dist.get_rank(), ranks))


@pytest.mark.distributed
def test_they_follow_their_experts_to_any_number_of_ranks(pool2: Pool) -> None:
    states, others = pool2.run(gathered_states, 2)
    assert states == others
    assert states[0] == state_of(0, 2)
    assert states[1] == {
        "step": 3,
        "layers": {"a": {"mean": [2.0, 3.0], "calls": 7}, "b": {"mean": [0.5] * 2}},
    }
    for ranks in (1, 2, 4):
        assert [layers_of(states, rank, ranks) for rank in range(ranks)] == [
            state_of(rank, ranks) for rank in range(ranks)
        ]


def test_alone_nothing_is_left_out() -> None:
    assert layers_of(gather_layers(None, lambda: state_of(0, 1)), 0, 1) == state_of(0, 1)


def failing() -> str:
    try:
        gather_layers(dist.group.WORLD, lambda: {} if dist.get_rank() == 1 else state_of(0, 2))
    except RankError as error:
        return str(error)
    return "nothing"


@pytest.mark.distributed
def test_a_rank_without_a_state_is_everybodys_error(pool2: Pool) -> None:
    assert pool2.run(failing) == ["rank 1: KeyError: 'layers'"] * 2
