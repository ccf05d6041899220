"""Write a checkpoint while training goes on: copied to the host at a step's end, published at a later one's.

    boundary of step n     every rank copies its tensors; a thread of each writes and flushes its files
    boundaries after it    one number over all ranks: is everybody done?
    the first at which     the same manifest, the same rename as without a thread; an error of any thread is raised now,
    all are done           on every rank

Only the thread's copies are read by it, so whatever becomes of a checkpoint, training is as it was.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lrmoe.checkpoint.agree import agreed, all_true, rank_of
from lrmoe.checkpoint.manifest import FileEntry, folder_of
from lrmoe.checkpoint.save import Content, ExpertTensor, Target
from lrmoe.errors import CheckpointError

STOP_S = 3.0  # how long a dropped write is waited for


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """One checkpoint on its way, and this rank's part of it."""

    target: Target
    files: Future[list[FileEntry]]


class BackgroundSaver:
    """At most one checkpoint on its way; every rank of the group makes the same calls.

    Args:
        group: ranks that save together.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._pending: _Pending | None = None

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._pending is not None

    def start(
        self, root: Path, step: int, content: Content, *, keep_last: int = 2, protect: Collection[int] = ()
    ) -> Path:
        """Copy the content and begin to write it; see `save`. One that is still on its way is published first.

        Returns:
            The folder that it will have.

        Raises:
            CheckpointError: the one before could not be written, or this one's folder cannot be made; raised on every
                rank, and nothing is on its way then.
        """
        self.wait()
        target = Target.begin(root, step, group=self._group, keep_last=keep_last, protect=protect)
        try:
            copied = agreed(self._group, lambda: _on_host(content, rank_of(self._group)))
        except BaseException:
            target.clear()
            raise
        self._pending = _Pending(target=target, files=_written(target, copied))
        return folder_of(root, step)

    def poll(self) -> Path | None:
        """Publish what is on its way if every rank has written its part; its folder if so.

        Costs one small all-reduce while something is on its way, nothing otherwise.

        Raises:
            CheckpointError: some rank could not write; raised on every rank, older checkpoints are untouched, and
                nothing is on its way any more.
        """
        pending = self._pending
        if pending is None or not all_true(self._group, pending.files.done()):
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Wait for what is on its way and publish it; its folder, None where nothing was.

        Raises:
            CheckpointError: as `poll`.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.target.publish(pending.files.result)

    def drop(self) -> None:
        """Forget what is on its way, without a word to other ranks: for a run that fails.

        Waits a few seconds for this rank's thread; a folder that outlives it has a name that nobody reads, and goes
        with the next save.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with contextlib.suppress(CheckpointError, TimeoutError):
            pending.files.result(timeout=STOP_S)
        pending.target.clear()


def _written(target: Target, content: Content) -> Future[list[FileEntry]]:
    """Start this rank's thread; every error of it is a CheckpointError."""
    files: Future[list[FileEntry]] = Future()

    def write() -> None:
        try:
            files.set_result(target.write(content))
        except CheckpointError as error:
            files.set_exception(error)
        except Exception as error:
            said = f"{target.partial}: cannot be written: {type(error).__name__}: {error}"
            files.set_exception(CheckpointError(said))

    # A daemon: a process that has to end does not wait for a slow disk.
    threading.Thread(target=write, name=f"checkpoint-{target.step}", daemon=True).start()
    return files


@torch.no_grad()
def _on_host(content: Content, rank: int) -> Content:
    """What this rank will write, in memory that nobody else changes."""
    dense: Mapping[str, torch.Tensor] = content.dense if rank == 0 else {}
    return Content(
        dense={key: _copied(tensor) for key, tensor in dense.items()},
        experts={
            key: ExpertTensor(values=_copied(part.values), first=part.first)
            for key, part in content.experts.items()
        },
        state=copy.deepcopy(dict(content.state)) if rank == 0 else {},
    )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
