"""Find, verify and read checkpoints, at the number of ranks that wrote them or any other."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from lrmoe.checkpoint.agree import gathered, rank_of, size_of
from lrmoe.checkpoint.manifest import STATE, Manifest, read_json, verify
from lrmoe.errors import CheckpointError

log = logging.getLogger(__name__)


def folder_of(root: Path, step: int) -> Path:
    """The folder of one step's checkpoint."""
    return root / f"step-{step:08d}"


def find_steps(root: Path) -> list[int]:
    """Steps that have a checkpoint folder below `root`, in rising order; complete or not."""
    if not root.is_dir():
        return []
    found = (re.fullmatch(r"step-(\d{8,})", path.name) for path in root.iterdir())
    return sorted(int(match.group(1)) for match in found if match)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        folder: where it lies.
        manifest: what it consists of.
        state: the JSON state that was saved.
    """

    folder: Path
    manifest: Manifest
    state: dict[str, Any]

    @contextlib.contextmanager
    def reader(self) -> Iterator[TensorReader]:
        """Open the shards for reading, each when it is first needed."""
        with contextlib.ExitStack() as stack:
            yield TensorReader(self.folder, self.manifest, stack)


class TensorReader:
    """Reads tensors by key; one open file per shard."""

    def __init__(self, folder: Path, manifest: Manifest, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._file_of = manifest.file_of()
        self._stack = stack
        self._open: dict[str, Any] = {}

    def dense(self, key: str) -> torch.Tensor:
        """One tensor, on the CPU.

        Raises:
            CheckpointError: there is no such key.
        """
        name = self._file_of.get(key)
        if name is None:
            raise CheckpointError(f"{self._folder}: holds no tensor {key!r}")
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self._folder / name, framework="pt"))
        return self._open[name].get_tensor(key)

    def experts(self, key: str, first: int, count: int) -> torch.Tensor:
        """Rows of global experts first .. first + count - 1 as (count, ...), whichever ranks wrote them.

        Raises:
            CheckpointError: one of them is not there.
        """
        return torch.stack([self.dense(f"{key}/expert/{first + i}") for i in range(count)])


def open_checkpoint(folder: Path, *, group: dist.ProcessGroup | None = None) -> Checkpoint:
    """Verify every file, the work shared by the ranks, and open.

    Raises:
        CheckpointError: it is partial or corrupt; the same error on every rank, naming the file.
    """
    rank, world_size = rank_of(group), size_of(group)
    manifest = gathered(group, lambda: verify(folder, part=rank, parts=world_size))[0]
    state = gathered(group, lambda: read_json(folder / STATE))[0]
    return Checkpoint(folder=folder, manifest=manifest, state=state)


def open_latest(root: Path, *, group: dist.ProcessGroup | None = None) -> Checkpoint:
    """Open the newest checkpoint that verifies; a bad one is passed over with a warning.

    Raises:
        CheckpointError: there is none, or none that is whole; the same error on every rank.
    """
    steps = gathered(group, lambda: find_steps(root))[0]
    errors = []
    for step in reversed(steps):
        try:
            return open_checkpoint(folder_of(root, step), group=group)
        except CheckpointError as error:
            errors.append(str(error))
            if rank_of(group) == 0:
                log.warning("%s is not usable: %s", folder_of(root, step).name, error)
    if errors:
        raise CheckpointError(f"{root}: no usable checkpoint; the newest: {errors[0]}")
    raise CheckpointError(f"{root}: no checkpoint to resume from")
