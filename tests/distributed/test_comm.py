"""The exchange itself: there and back is the identity, whatever the sizes and dtypes; what a header says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lrmoe.distributed import Comm, Header, HeaderTable
from lrmoe.errors import RankError
from tests.distributed.pool import Pool

SENDS = [
    [[3, 1], [0, 4]],
    [[0, 0], [5, 2]],
    [[0, 0], [0, 0]],
    [[0, 7], [0, 0]],
]


def there_and_back(send_RR: list[list[int]], width: int | None, dtype: torch.dtype) -> bool:
    """Worker: rows go to their rank and come home; the received ones carry their sender's mark."""
    comm = Comm(dist.group.WORLD)
    send, receive = send_RR[comm.rank], [row[comm.rank] for row in send_RR]
    shape = (sum(send),) if width is None else (sum(send), width)
    rows = (torch.arange(sum(send) * (width or 1)).reshape(shape) + 100 * comm.rank).to(dtype)
    out = comm.all_to_all(rows, send, receive)
    assert out.shape[0] == sum(receive)
    assert out.dtype == dtype
    for sender, part in enumerate(out.split(receive)):
        assert bool(((part.float() // 100) == sender).all())
    return torch.equal(comm.all_to_all(out, receive, send), rows)


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("width", [None, 1, 3])
@pytest.mark.parametrize("send_RR", SENDS, ids=str)
def test_there_and_back_is_the_identity(
    pool2: Pool, send_RR: list[list[int]], width: int | None, dtype: torch.dtype
) -> None:
    assert pool2.run(there_and_back, send_RR, width, dtype) == [True, True]


def gathered(words: int) -> list[list[int]]:
    comm = Comm(dist.group.WORLD)
    return comm.all_gather_ints(torch.arange(words) + 2**40 * comm.rank).tolist()


@pytest.mark.distributed
def test_integers_are_gathered_exactly(pool4: Pool) -> None:
    for found in pool4.run(gathered, 3):
        assert found == [[2**40 * r, 2**40 * r + 1, 2**40 * r + 2] for r in range(4)]


def test_one_rank_needs_no_group_and_sends_nothing() -> None:
    comm, rows = Comm(None), torch.arange(6.0).reshape(3, 2)
    assert comm.all_to_all(rows, [3], [3]) is rows
    assert comm.sent_bytes(rows, [3]) == 0
    assert comm.all_gather_ints(torch.tensor([1, 2])).tolist() == [[1, 2]]


def table(*headers: Header) -> HeaderTable:
    return HeaderTable(np.stack([header.to_ints() for header in headers]))


def test_headers_that_agree_raise_nothing_and_may_differ_in_tokens() -> None:
    table(Header(tokens=3, hidden=8), Header(tokens=0, hidden=8)).raise_on_trouble(0, 0)


@pytest.mark.parametrize("name", Header.AGREE)
def test_every_field_that_must_agree_is_compared(name: str) -> None:
    with pytest.raises(RankError, match=r"layer 5: .* differs between ranks \(rank 0: 1, rank 1: 2\)"):
        table(Header(**{name: 1}), Header(**{name: 2})).raise_on_trouble(0, 5)


def test_a_fault_is_told_before_any_disagreement() -> None:
    with pytest.raises(RankError, match="rank 1 was given bad input"):
        table(Header(hidden=8), Header(fault=1)).raise_on_trouble(0, 0)
