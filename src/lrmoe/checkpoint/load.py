"""Find, verify and read checkpoints, at the number of ranks that wrote them or any other."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from lrmoe.checkpoint.agree import gathered, rank_of, size_of
from lrmoe.checkpoint.manifest import STATE, Manifest, folder_of, read_json, verify
from lrmoe.checkpoint.places import REPLACED
from lrmoe.errors import CheckpointError

log = logging.getLogger(__name__)


def find_steps(root: Path) -> list[int]:
    """Steps that have a checkpoint folder below `root`, in rising order; complete or not.

    One that is just being replaced, or was when its run was killed, counts; `put_back` gives it its name again.

    Raises:
        CheckpointError: `root` cannot be listed.
    """
    if not root.is_dir():
        return []
    try:
        names = {path.name.removeprefix(REPLACED) for path in root.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error}") from error
    found = [(name, re.fullmatch(r"step-([0-9]{8,})", name)) for name in names]
    steps = [(name, int(match.group(1))) for name, match in found if match]
    return sorted(step for name, step in steps if name == folder_of(root, step).name)


def put_back(root: Path) -> None:
    """Give a checkpoint its name again that was written anew when the run was killed between two renames.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    for replaced in root.glob(f"{REPLACED}step-*"):
        final = replaced.with_name(replaced.name.removeprefix(REPLACED))
        if not final.exists():
            try:
                replaced.rename(final)
            except OSError as error:
                raise CheckpointError(f"{replaced}: cannot be renamed: {error}") from error
            log.warning("%s: a run was killed while it was written anew; what it held before is back", final)


def _steps(root: Path, rank: int) -> list[int]:
    if rank == 0:
        put_back(root)
    return find_steps(root)


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
            CheckpointError: there is no such key, or its file can no longer be read.
        """
        tensor: torch.Tensor = self._read(key, lambda file: file.get_tensor(key))
        return tensor

    def shape(self, key: str) -> tuple[int, ...]:
        """One tensor's shape, from its file's header.

        Raises:
            CheckpointError: as `dense`.
        """
        return tuple(self._read(key, lambda file: file.get_slice(key).get_shape()))

    def _read(self, key: str, read: Callable[[Any], Any]) -> Any:
        name = self._file_of.get(key)
        if name is None:
            raise CheckpointError(f"{self._folder}: holds no tensor {key!r}")
        try:
            if name not in self._open:
                self._open[name] = self._stack.enter_context(safe_open(self._folder / name, framework="pt"))
            return read(self._open[name])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._folder / name}: cannot be read: {error}") from error

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
    state = gathered(group, lambda: _read_state(folder))[0]
    return Checkpoint(folder=folder, manifest=manifest, state=state)


def _read_state(folder: Path) -> dict[str, Any]:
    state = read_json(folder / STATE)
    if not isinstance(state, dict):
        raise CheckpointError(f"{folder / STATE}: holds a {type(state).__name__}: must be an object")
    return state


def open_latest(
    root: Path,
    *,
    group: dist.ProcessGroup | None = None,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> Checkpoint:
    """Open the newest checkpoint that verifies; a bad one is passed over with a warning.

    Args:
        root: folder of the checkpoints.
        group: ranks that open it together.
        check: what else makes a checkpoint bad; raises CheckpointError on any rank.

    Raises:
        CheckpointError: there is none, or none that is whole; the same error on every rank.
    """
    steps = gathered(group, lambda: _steps(root, rank_of(group)))[0]
    errors = []
    for step in reversed(steps):
        try:
            checkpoint = open_checkpoint(folder_of(root, step), group=group)
            gathered(group, partial(check, checkpoint))
            return checkpoint
        except CheckpointError as error:
            errors.append(str(error))
            if rank_of(group) == 0:
                log.warning("%s is not usable: %s", folder_of(root, step).name, error)
    if errors:
        raise CheckpointError(f"{root}: no usable checkpoint; the newest: {errors[0]}")
    raise CheckpointError(f"{root}: no checkpoint to resume from")
