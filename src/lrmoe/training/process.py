"""This process's place in the run: alone, started by torchrun, or started by `launch.run_workers`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lrmoe.errors import ConfigError


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
        ConfigError: `cuda` is asked for and there is none, or fewer devices than local ranks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"train.device={name!r}: PyTorch sees {count} CUDA devices here, local rank {local_rank} needs its own"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def joined(device: str = "auto", *, timeout_s: float = 600.0) -> Iterator[Process]:
    """Join the run's process group (gloo on CPU, NCCL on CUDA) and leave it at the end.

    A group that exists already is used and left as it is. Without torchrun's variables the process is alone.
    """
    ours = not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    where = pick_device(device)
    if ours:
        dist.init_process_group(
            "nccl" if where.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s)
        )
    try:
        yield current(where)
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()


def current(device: torch.device) -> Process:
    """This process's place, given the group that is there now."""
    if not dist.is_initialized():
        return Process(rank=0, world_size=1, device=device, group=None)
    return Process(
        rank=dist.get_rank(), world_size=dist.get_world_size(), device=device, group=dist.group.WORLD
    )
