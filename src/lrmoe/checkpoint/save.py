"""Write a checkpoint: every rank its experts, rank 0 the rest, visible only when complete."""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from lrmoe.checkpoint.agree import gathered, rank_of, size_of
from lrmoe.checkpoint.load import find_steps, put_back
from lrmoe.checkpoint.manifest import (
    DENSE,
    STATE,
    FileEntry,
    Manifest,
    check_sizes,
    describe,
    folder_of,
    sync,
    write_json,
)
from lrmoe.checkpoint.places import REPLACED, take_place
from lrmoe.errors import CheckpointError

log = logging.getLogger(__name__)
T = TypeVar("T")
UNFINISHED = ".partial-*", f"{REPLACED}*", ".removed-*"  # a run that is killed may leave them


@dataclass(frozen=True, kw_only=True)
class ExpertTensor:
    """This rank's experts of one tensor.

    Attributes:
        values: (E_local, ...), one row of any shape per expert.
        first: global id of values[0]; the rest follow.
    """

    values: torch.Tensor
    first: int


@dataclass(frozen=True, kw_only=True)
class Content:
    """What is saved.

    Attributes:
        dense: key -> tensor; the same on all ranks, rank 0's is written.
        experts: key -> this rank's experts; written as <key>/expert/<global id>.
        state: anything JSON can hold; the same on all ranks, rank 0's is written.
    """

    dense: Mapping[str, torch.Tensor]
    experts: Mapping[str, ExpertTensor] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)


def expert_key(key: str, expert: int) -> str:
    """The key of one expert's row of a tensor."""
    return f"{key}/expert/{expert}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A checkpoint that is being written: where, by whom, and what goes when it is there.

    Attributes:
        root, step: it will be root/step-<step>.
        partial: the folder it is written into, a new one each time: no other writer, not even one that was left behind
            by a run that was killed, knows its name.
        group: ranks that write it.
        keep_last, protect: see `save`.
    """

    root: Path
    step: int
    partial: Path
    group: dist.ProcessGroup | None
    keep_last: int
    protect: frozenset[int]

    @classmethod
    def begin(
        cls,
        root: Path,
        step: int,
        *,
        group: dist.ProcessGroup | None,
        keep_last: int,
        protect: Collection[int],
    ) -> Target:
        """Make the partial folder; every rank calls it.

        Raises:
            CheckpointError: it cannot be made; raised on every rank.
        """
        made = gathered(group, lambda: _prepare(root, step) if rank_of(group) == 0 else None)[0]
        assert made is not None, "the first rank names the folder"
        return cls(
            root=root, step=step, partial=made, group=group, keep_last=keep_last, protect=frozenset(protect)
        )

    def write(self, content: Content) -> list[FileEntry]:
        """Write this rank's files and flush them to the disk; waits for no other rank.

        Raises:
            CheckpointError: they cannot be written.
        """
        return _checked(_write_rank, self.partial, content, rank_of(self.group), size_of(self.group))

    def publish(self, written: Callable[[], list[FileEntry]]) -> Path:
        """Give the folder its name once every rank's files are there; every rank calls it.

        Args:
            written: gives this rank's files, or raises what kept it from writing them.

        Raises:
            CheckpointError: some rank could not write; raised on every rank, and nothing is published.
        """
        final, first = folder_of(self.root, self.step), rank_of(self.group) == 0
        try:
            entries = gathered(self.group, written)
            files = tuple(entry for part in entries for entry in part)
            manifest = Manifest(step=self.step, world_size=size_of(self.group), files=files)
            gathered(self.group, lambda: _checked(_publish, self.partial, final, manifest) if first else None)
        finally:
            self.clear()
        if first:
            _prune(self.root, self.keep_last, {self.step, *self.protect})
        return final

    def clear(self) -> None:
        """Remove what is left of the partial folder, on the first rank: gone already when all went well."""
        if rank_of(self.group) == 0:
            shutil.rmtree(self.partial, ignore_errors=True)


def save(
    root: Path,
    step: int,
    content: Content,
    *,
    group: dist.ProcessGroup | None = None,
    keep_last: int = 2,
    protect: Collection[int] = (),
) -> Path:
    """Write root/step-<step> and remove all but the newest `keep_last`; every rank of the group calls it.

    The folder appears under its name by one rename, after every file of every rank is on the disk. The ranks must share
    the file system. `step` and the steps in `protect` are never removed; folders that are no usable checkpoints are
    left where they are, do not count, and are named in a warning.

    Raises:
        CheckpointError: some rank could not write; raised on every rank, and older checkpoints are untouched.
    """
    target = Target.begin(root, step, group=group, keep_last=keep_last, protect=protect)
    return target.publish(lambda: target.write(content))


def _prepare(root: Path, step: int) -> Path:
    put_back(root)
    for pattern in UNFINISHED:
        for left in root.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)
    partial = root / f".partial-{folder_of(root, step).name}-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{partial}: cannot be created: {error}") from error
    return partial


def _checked(write: Callable[..., T], folder: Path, *args: Any) -> T:
    try:
        return write(folder, *args)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error


def _write_rank(folder: Path, content: Content, rank: int, world_size: int) -> list[FileEntry]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not seen by rank {rank}; all ranks must share the file system")
    entries = []
    if rank == 0:
        entries.append(_write_tensors(folder / DENSE, content.dense))
        write_json(folder / STATE, dict(content.state))
        entries.append(describe(folder / STATE, ()))
    if content.experts:
        rows = {
            expert_key(key, part.first + i): row
            for key, part in content.experts.items()
            for i, row in enumerate(part.values)
        }
        entries.append(_write_tensors(folder / f"experts-{rank:05d}-of-{world_size:05d}.safetensors", rows))
    return entries


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, path)
    sync(path)
    return describe(path, list(tensors))


def _publish(partial: Path, final: Path, manifest: Manifest) -> None:
    missing = [entry.name for entry in manifest.files if not (partial / entry.name).is_file()]
    if missing:
        raise CheckpointError(
            f"{partial / missing[0]}: not seen by rank 0; all ranks must share the file system"
        )
    manifest.write(partial)
    take_place(partial, final)  # of an earlier one where a run went back and came to this step again


def _prune(root: Path, keep_last: int, keep: Collection[int]) -> None:
    usable = []
    try:
        steps = find_steps(root)
    except (
        CheckpointError
    ) as error:  # only the first rank is here: what it raised would be news to the others
        log.warning("no checkpoint was removed: %s", error)
        return
    for step in steps:
        try:
            check_sizes(folder_of(root, step))
            usable.append(step)
        except CheckpointError as error:
            log.warning("%s is not usable and left as it is: %s", folder_of(root, step), error)
    for step in usable[:-keep_last]:
        if step not in keep:
            _remove(folder_of(root, step))


def _remove(folder: Path) -> None:
    """Out of sight first: a checkpoint is whole as long as it has its name."""
    hidden = folder.with_name(f".removed-{folder.name}")
    try:
        folder.rename(hidden)
    except OSError as error:
        log.warning("%s cannot be removed: %s", folder, error)
    shutil.rmtree(hidden, ignore_errors=True)
