"""This process's place in the run: alone, started by torchrun, or started by `launch.run_workers`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from lrmoe.errors import ConfigError, LRMoEError, RankError

T = TypeVar("T")


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


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device.

    Raises:
        ConfigError: `cuda` is asked for and there is none, or fewer devices than local ranks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"train.device={name!r}: this machine has {count} CUDA devices, local rank {local_rank} needs one more"
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
    where = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")))
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


def agreed(group: dist.ProcessGroup | None, action: Callable[[], T]) -> T:
    """Run `action` on every rank and go on only if it worked on all of them.

    The action must not use collectives that the others may miss. Its own error is raised where it happened; the other
    ranks raise the same kind when it is one of this package's, so that nobody waits for a rank that has left.

    Raises:
        LRMoEError: some rank failed; the message names it.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    if group is not None and dist.get_world_size(group) > 1:
        reports: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
        report = None if error is None else (type(error).__name__, str(error))
        dist.all_gather_object(reports, report, group=group)
        if error is None:
            _raise_reported(reports)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # set whenever no error was raised


def _raise_reported(reports: list[tuple[str, str] | None]) -> None:
    import lrmoe.errors

    for rank, report in enumerate(reports):
        if report is None:
            continue
        name, message = report
        kind = getattr(lrmoe.errors, name, None)
        same = isinstance(kind, type) and issubclass(kind, LRMoEError)
        raise (kind if same else RankError)(
            f"rank {rank}: {message}" if same else f"rank {rank}: {name}: {message}"
        )
