"""A rank that fails, is killed or stops: the others end within the time limit, with the reason where there is one."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lrmoe.distributed import Comm, peers
from lrmoe.distributed.messages import Exchange
from lrmoe.errors import ConfigError, RankError
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed
LIMIT_S = 2


def short() -> Comm:
    """The exchanges of a group whose ranks wait no longer than LIMIT_S for each other."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=LIMIT_S))
    return Comm(group, "MoE layer 7")


def rows(comm: Comm) -> None:
    comm.all_to_all(torch.zeros(2, 3), [1, 1], [1, 1])


def started_rows(comm: Comm) -> None:
    comm.start_all_to_all(torch.zeros(2, 3), [1, 1], [1, 1]).wait()


def numbers(comm: Comm) -> None:
    comm.all_gather_ints(torch.zeros(3, dtype=torch.int64), "waiting for counts")


def weights(comm: Comm) -> None:
    other, tensor = 1 - comm.rank, torch.zeros(5)
    Exchange(comm, [(other, tensor)], [(other, torch.empty(5))]).wait()


EXCHANGES = {
    "an exchange of rows": rows,
    "an exchange of rows ": started_rows,
    "waiting for counts": numbers,
    "an exchange of weights or gradients": weights,
}


def waited(exchange: Callable[[Comm], None], comm: Comm) -> tuple[str, float]:
    """The error of an exchange that the other rank does not join, and how long it took."""
    begin = time.monotonic()
    try:
        exchange(comm)
    except RankError as error:
        return str(error), time.monotonic() - begin
    return "nothing", 0.0


def other_leaves(exchange: Callable[[Comm], None], way: str) -> tuple[str, float]:
    """Worker: rank 1 leaves in some way, rank 0 waits for it."""
    comm = short()
    numbers(comm)  # both are here, and connected
    if dist.get_rank() == 1:
        leave(way)
    return waited(exchange, comm)


def leave(way: str) -> None:
    if way == "raises":
        with contextlib.suppress(OSError), peers.telling():
            raise OSError("the disk is gone")
    if way == "raises what nobody catches":
        sys.excepthook, shown = lambda *_: print("shown"), sys.excepthook
        peers.tell_when_failing()
        hook = sys.excepthook
        peers.tell_when_failing()
        assert sys.excepthook is hook is not shown
        hook(ValueError, ValueError("not caught"), None)
    if way == "is stopped":
        pause = f"sleep {LIMIT_S + 1}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", pause])
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if way == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("raises", "rank 1 failed: OSError: the disk is gone"),
        ("raises what nobody catches", "rank 1 failed: ValueError: not caught"),
        ("is killed", "some rank was lost: it was killed, or left without an error of its own"),
    ],
)
def test_who_waits_is_told_why(pool: Pool, way: str, said: str) -> None:
    text, took = pool.outcomes(other_leaves, rows, way)[0].value
    assert text.startswith(f"MoE layer 7: an exchange of rows: {said}")
    assert text.isascii()
    assert took < 1.9 + LIMIT_S


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_ends_when_a_rank_hangs(pool: Pool, name: str) -> None:
    text, took = pool.outcomes(other_leaves, EXCHANGES[name], "is stopped")[0].value
    assert text.startswith(f"MoE layer 7: {name.strip()}: some rank did not come in time")
    assert "every rank must make the same calls" in text
    assert LIMIT_S - 0.5 < took < LIMIT_S + 4


def first_reason() -> str:
    """Worker: rank 1 tells of an error that its group outlives, of what it was told, and of two of its own."""
    if dist.get_rank() == 1:
        with contextlib.suppress(ValueError), peers.telling():
            raise ValueError("long ago")
        with peers.telling():
            for error in (RankError("rank 0 failed"), SystemExit(0), ConfigError("first"), OSError("second")):
                peers.tell(error)
    dist.barrier()
    try:
        with peers.waiting("this"):
            raise (
                RuntimeError("[pair.cc:1] Connection closed. GLHF!")
                if dist.get_rank() == 0
                else ConfigError("mine")
            )
    except (RankError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"


def test_the_first_error_of_a_ranks_own_stays(pool: Pool) -> None:
    told = pool.run(first_reason)
    pool.stop()  # what was told is in their store
    assert told == ["RankError: this: rank 1 failed: ConfigError: first", "ConfigError: mine"]


def test_a_store_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "STORE_S", 0.1)
    monkeypatch.setattr(peers, "HEARD_S", 0.1)
    monkeypatch.setattr(peers, "_alone", lambda: False)
    monkeypatch.setattr(peers, "_store", lambda: time.sleep(60))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    begin = time.monotonic()
    with (
        pytest.raises(RankError, match=r"^this: some rank was lost: .* \(Connection closed\)$"),
        peers.waiting("this"),
    ):
        raise RuntimeError("[pair.cc:1] Connection closed. GLHF!")
    peers.tell(ValueError("x"))
    assert time.monotonic() - begin < 5


def test_alone_nothing_is_told_and_errors_stay_themselves() -> None:
    peers.tell(ValueError("x"))
    with pytest.raises(torch.OutOfMemoryError), peers.waiting("this"):
        raise torch.OutOfMemoryError("no memory")
