"""The pool itself: values, errors per rank, time limits, dead processes, no orphans."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool, PoolError

pytestmark = pytest.mark.distributed


def rank_and_sum(value: int) -> tuple[int, int]:
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"bad luck on rank {rank}")


def hang_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def die_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def pid() -> int:
    return os.getpid()


def test_runs_on_every_rank(pool2: Pool) -> None:
    assert pool2.run(rank_and_sum, 10) == [(0, 21), (1, 21)]


def test_errors_come_back_by_rank(pool2: Pool) -> None:
    outcomes = pool2.outcomes(fail_on_rank, 1)
    assert outcomes[0].error is None
    assert isinstance(outcomes[1].error, ValueError)
    assert "bad luck" in outcomes[1].traceback
    with pytest.raises(PoolError, match="bad luck on rank 0"):
        pool2.run(fail_on_rank, 0)
    assert pool2.run(rank_and_sum, 0) == [(0, 1), (1, 1)]


def test_a_rank_that_hangs_is_reported_with_its_stack(pool2: Pool) -> None:
    started = time.monotonic()
    with pytest.raises(PoolError, match=r"ranks \[1\] gave no answer(.|\n)*hang_on_rank"):
        pool2.run(hang_on_rank, 1, limit_s=1.0)
    assert time.monotonic() - started < 20
    assert pool2.run(rank_and_sum, 0) == [(0, 1), (1, 1)]


def test_a_rank_that_dies_is_reported(pool2: Pool) -> None:
    with pytest.raises(PoolError, match="the process ended"):
        pool2.run(die_on_rank, 0)
    assert pool2.run(rank_and_sum, 0) == [(0, 1), (1, 1)]


def test_no_process_outlives_its_pool() -> None:
    pool = Pool(2)
    pids = pool.run(pid)
    pool.close()
    for process in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
