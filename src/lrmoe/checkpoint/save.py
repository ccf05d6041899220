"""Write a checkpoint: every rank its experts, rank 0 the rest, visible only when complete."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from lrmoe.checkpoint.agree import gathered, rank_of, size_of
from lrmoe.checkpoint.load import find_steps
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
from lrmoe.errors import CheckpointError

log = logging.getLogger(__name__)
UNFINISHED = ".partial-*", ".replaced-*", ".removed-*"  # a run that is killed may leave them


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
    rank, world_size = rank_of(group), size_of(group)
    final = folder_of(root, step)
    partial = root / f".partial-{final.name}"
    gathered(group, lambda: _prepare(root, partial) if rank == 0 else None)
    try:
        entries = gathered(group, lambda: _checked(_write_rank, partial, content, rank, world_size))
        files = tuple(entry for part in entries for entry in part)
        manifest = Manifest(step=step, world_size=world_size, files=files)
        gathered(group, lambda: _checked(_publish, partial, final, manifest) if rank == 0 else None)
    finally:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # gone already when all went well
    if rank == 0:
        _prune(root, keep_last, {step, *protect})
    return final


def _prepare(root: Path, partial: Path) -> None:
    for pattern in UNFINISHED:
        for left in root.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{partial}: cannot be created: {error}") from error


def _checked(write: Any, folder: Path, *args: Any) -> Any:
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
    sync(partial)
    replaced = final.with_name(f".replaced-{final.name}")
    if final.exists():  # the same step, written again after going back to an earlier one
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    try:
        partial.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _prune(root: Path, keep_last: int, keep: Collection[int]) -> None:
    usable = []
    for step in find_steps(root):
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
