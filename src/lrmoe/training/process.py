"""This process's place in the run: alone, started by torchrun, or started by `launch.run_workers`."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lrmoe.distributed.peers import waiting
from lrmoe.errors import ConfigError, RankError

POLL_S = 0.02
START_S = 600.0  # how long ranks wait for each other to start


@dataclass(frozen=True, kw_only=True)
class Process:
    """Where this process stands.

    Attributes:
        rank, world_size: place among all processes of the run; 0 of 1 when alone.
        device: where tensors live.
        group: the group of all ranks; None when alone.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as this process's device; torchrun's LOCAL_RANK chooses among several.

    Raises:
        ConfigError: `cuda` is asked for and there is none, or fewer devices than local ranks, or LOCAL_RANK is no rank.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    local_rank, count = _integer("LOCAL_RANK", os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"train.device={name!r}: PyTorch sees {count} CUDA devices here, local rank {local_rank} needs its own"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _check_variables() -> None:
    world_size = _integer("WORLD_SIZE", os.environ.get("WORLD_SIZE"), least=1)
    _integer("RANK", os.environ.get("RANK"), below=world_size)
    _integer("MASTER_PORT", os.environ.get("MASTER_PORT"), below=1 << 16)
    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise ConfigError(_wrong("MASTER_ADDR", host, "must name the host of rank 0"))


def _integer(name: str, text: str | None, *, least: int = 0, below: int | None = None) -> int:
    """The number in a variable of the environment."""
    value = int(text) if text is not None and text.isascii() and text.isdigit() else -1
    if value < least or (below is not None and value >= below):
        upper = "" if below is None else f" and below {below}"
        raise ConfigError(_wrong(name, text, f"must be an integer of at least {least}{upper}"))
    return value


def _wrong(name: str, text: str | None, what: str) -> str:
    found = f"{name} is not set" if text is None else f"{name}={text!r}"
    return (
        f"environment variable {found}: {what}, as torchrun sets it; unset RANK and WORLD_SIZE to run alone"
    )


@contextlib.contextmanager
def joined(device: str = "auto", *, timeout_s: float = 600.0) -> Iterator[Process]:
    """Join the run's process group (gloo on CPU, NCCL on CUDA) and leave it at the end.

    A group that exists already is used and left as it is. Without torchrun's variables the process is alone.

    Args:
        device: as `pick_device`.
        timeout_s: how long a rank waits for the others in an exchange, once all have started.

    Raises:
        ConfigError: a variable of torchrun's is missing or not a valid number, or as `pick_device`; names it.
        RankError: some rank did not start in time.
    """
    ours = not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if ours:
        _check_variables()
    where = pick_device(device)
    if ours:
        _init("nccl" if where.type == "cuda" else "gloo", timeout_s)
    try:
        yield current(where)
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()
            # Cycles in a model hold the group still; gloo's threads must be gone before the interpreter ends.
            gc.collect()


def _init(backend: str, timeout_s: float) -> None:
    with waiting("the start of all ranks"):
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=START_S)))
        store = PrefixStore(f"lrmoe/{_attempt(store, rank, world_size, START_S)}", store)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _attempt(store: Store, rank: int, world_size: int, limit_s: float) -> str:
    """A name that the ranks that are starting now have in common, and no earlier ones.

    torchrun keeps its store over restarts, and what dead ranks wrote there would be taken for the new ones' addresses.
    Counts of restarts do not tell attempts apart: every node has its own.

        rank r    here/<r> = a word of its own      waits for answer/<word>, then writes done/<answer>/<r>
        rank 0    answers the words that it finds, until all ranks are done: a dead one's is written over
    """
    mine = uuid.uuid4().hex
    if rank != 0:
        store.set(f"lrmoe/here/{rank}", mine)
        attempt = bytes(store.get(f"lrmoe/answer/{mine}")).decode()
        store.set(f"lrmoe/done/{attempt}/{rank}", "")
        return attempt
    end, missing = time.monotonic() + limit_s, set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"lrmoe/done/{mine}/{other}"]):
                missing.remove(other)
            elif store.check([f"lrmoe/here/{other}"]):
                word = bytes(store.get(f"lrmoe/here/{other}")).decode()
                store.set(f"lrmoe/answer/{word}", mine)
        if missing and time.monotonic() > end:
            raise RankError(
                f"the start of all ranks: ranks {sorted(missing)} did not come within {limit_s:g} s"
            )
        time.sleep(POLL_S)
    return mine


def current(device: torch.device) -> Process:
    """This process's place, given the group that is there now."""
    if not dist.is_initialized():
        return Process(rank=0, world_size=1, device=device, group=None)
    return Process(
        rank=dist.get_rank(), world_size=dist.get_world_size(), device=device, group=dist.group.WORLD
    )
