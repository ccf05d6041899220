"""Where checkpoints lie. One that was written under another name takes its place by one rename."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import torch.distributed as dist

from lrmoe.checkpoint.agree import gathered, rank_of
from lrmoe.checkpoint.manifest import sync
from lrmoe.errors import CheckpointError

REPLACED = ".replaced-"  # before the name of a folder while another takes its place


def take_place(written: Path, final: Path) -> None:
    """Give `written` the name `final`, and remove what has that name now; where it fails, that keeps it.

    A process that is killed between two renames leaves the earlier folder as .replaced-<name>.

    Raises:
        OSError: it cannot be renamed.
    """
    sync(written)
    earlier = final.with_name(f"{REPLACED}{final.name}")
    if final.exists():
        shutil.rmtree(earlier, ignore_errors=True)
        final.rename(earlier)
    try:
        written.rename(final)
    except OSError:
        if earlier.exists():
            earlier.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def try_root(root: Path, group: dist.ProcessGroup | None) -> None:
    """Find out before a run begins, and not at its first checkpoint, that none can be written; every rank calls it.

    Raises:
        CheckpointError: the folder cannot be made or written to, or is not the same on all ranks; raised on all.
    """
    trial, first = root / f".trial-{os.getpid()}", rank_of(group) == 0
    try:
        (name, *_) = gathered(group, lambda: _written(trial) if first else "")
        gathered(group, lambda: _seen(root / name))
    finally:
        if first:
            with contextlib.suppress(OSError):
                trial.unlink()


def _written(path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise CheckpointError(f"{path.parent}: checkpoints cannot be written there: {error}") from error
    return path.name


def _seen(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(
            f"{path.parent}: not the same folder on all ranks; must lie on a file system that they share"
        )
