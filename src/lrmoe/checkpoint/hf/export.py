"""A checkpoint of this package as a folder in the Transformers layout.

OUT/
    config.json                          the model's configuration, with its class and dtype
    model-00001-of-00003.safetensors     tensors in the order of the model, each file at most max_shard_size
    model.safetensors.index.json         which file holds which tensor; its metadata states the layout and the step
    tokenizer.json, ...                  where the run had one
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lrmoe.checkpoint.hf.folder import CONFIG, INDEX, LAYOUT, Source, own_fields, own_source, steps_below
from lrmoe.checkpoint.hf.names import LAYOUTS, PER_EXPERT, is_experts, naming_of
from lrmoe.checkpoint.hf.outline import Outline, config_of, outline_of
from lrmoe.checkpoint.hf.tensors import DTYPES, NAMES, Chunk, Entry, Reader, write_tensors
from lrmoe.checkpoint.hf.tokenizer import copy_run_tokenizer
from lrmoe.checkpoint.load import Checkpoint, open_checkpoint
from lrmoe.checkpoint.manifest import STATE, sync, write_json
from lrmoe.checkpoint.places import take_place
from lrmoe.errors import CheckpointError, ConfigError
from lrmoe.sizes import parse_size

log = logging.getLogger(__name__)
TRIES = 5  # where the run goes on and removes the checkpoint that is read
EXPORT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export has written.

    Attributes:
        folder: where. step: optimizer steps the weights have seen.
        files: of weights. nbytes: of their tensors.
        layout: one of LAYOUTS. dtype: of the model.
    """

    folder: Path
    step: int
    files: int
    nbytes: int
    layout: str
    dtype: str


def export_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    layout: str = PER_EXPERT,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> Exported:
    """Write a checkpoint's weights so that `from_pretrained(out)` reads them; a block of a tensor in memory at a time.

    The folder appears under its name by one rename, when everything is on the disk.

    Args:
        source: a checkpoint, or a run or folder of checkpoints, of which the newest that verifies is taken.
        out: the folder to make.
        step: of the checkpoint to take.
        layout: "per-expert", as the model's family is published, or "fused", as transformers' modules hold experts.
        dtype: of the weights: float32, bfloat16, float16; None: that of the run's training, or else
            the one they are stored in. Buffers, and what the model keeps in float32 whatever its dtype, keep theirs.
        max_shard_size: bytes, or "5GB": most of one file; a larger tensor has one to itself.
        overwrite: replace `out` where it is a folder of files with a config.json.

    Raises:
        ConfigError: no checkpoint there, `out` exists, or an argument is not valid.
        CheckpointError: no usable checkpoint, a tensor is missing or of another shape, or `out` cannot be written.
        UnsupportedError: a family whose published names are not known.
    """
    source, out = Path(source), Path(out)
    _check_arguments(layout, dtype)
    limit = parse_size("max_shard_size", max_shard_size)
    refuse_existing(out, overwrite=overwrite)
    for left in reversed(range(TRIES)):
        folders = reading = steps_below(source, step)
        try:
            checkpoint = _newest_verified(folders)
            reading = [checkpoint.folder]
            return _export(checkpoint, out, layout, dtype, limit)
        except CheckpointError as error:
            removed = [folder for folder in reading if not folder.exists()]
            if not removed:
                raise
            if not left or step is not None or source in folders:
                raise CheckpointError(
                    f"{removed[0]}: was removed while it was read, as by a run that goes on: train.keep_last says how "
                    "many it keeps"
                ) from error
    raise AssertionError("unreachable")


def _export(checkpoint: Checkpoint, out: Path, layout: str, dtype: str | None, limit: int) -> Exported:
    where = str(checkpoint.folder / STATE)
    config = config_of(own_fields(checkpoint.folder), where)
    outline = outline_of(config)
    weights = own_source(checkpoint.folder)
    dtype = dtype or _run_dtype(checkpoint, weights, outline)
    entries = _entries(weights, outline, layout, DTYPES_BY_NAME[dtype])
    config.architectures = [outline.architecture]
    config.dtype = DTYPES_BY_NAME[dtype]
    with replacing(out) as folder:
        metadata = {LAYOUT: layout, "step": str(checkpoint.manifest.step)}
        files = _write_weights(folder, entries, limit, metadata)
        config.save_pretrained(folder)
        sync(folder / CONFIG)
        copy_run_tokenizer(checkpoint.state, folder)
    return Exported(
        folder=out,
        step=checkpoint.manifest.step,
        files=files,
        nbytes=sum(entry.nbytes for entry in entries),
        layout=layout,
        dtype=dtype,
    )


DTYPES_BY_NAME: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in EXPORT_DTYPES}


def _check_arguments(layout: str, dtype: str | None) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(f"layout={layout!r}: must be one of {', '.join(map(repr, LAYOUTS))}")
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ConfigError(f"dtype={dtype!r}: must be one of {', '.join(map(repr, EXPORT_DTYPES))}")


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder that is there, unless it may be replaced; changes nothing.

    Raises:
        ConfigError: names the folder and the ways out.
    """
    if not out.exists():
        return
    if not overwrite:
        raise ConfigError(
            f"{out}: exists; pass --overwrite (overwrite=True) to replace it, or name another folder"
        )
    plain = out.is_dir() and (out / CONFIG).is_file() and all(path.is_file() for path in out.iterdir())
    if not plain:
        raise ConfigError(
            f"{out}: is not a folder of files with a {CONFIG}, so --overwrite does not replace it"
        )


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of `out` when all went well, and is removed when not.

    Raises:
        CheckpointError: it cannot be made or renamed.
    """
    partial = out.with_name(f".partial-{out.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir(parents=True)
        yield partial
        take_place(partial, out)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when all went well


def _newest_verified(folders: Sequence[Path]) -> Checkpoint:
    """The first that verifies; the others are named, but those that a run has removed, and one that is raised alone."""
    errors = []
    for folder in folders:
        try:
            return open_checkpoint(folder)
        except CheckpointError as error:
            if folder.exists() and len(folders) > 1:
                log.warning("%s is not usable: %s", folder, error)
            errors.append(error)
    raise errors[0]


def _run_dtype(checkpoint: Checkpoint, source: Source, outline: Outline) -> str:
    """What the run says it trains in, else the one that the dense weights have."""
    config = checkpoint.state.get("config")
    table = config.get("train") if isinstance(config, dict) else None
    stated = table.get("dtype") if isinstance(table, dict) else None
    if stated in EXPORT_DTYPES:
        return str(stated)
    dense = [name for name in outline.shapes if not is_experts(name) and name not in outline.kept]
    found = {
        chunk.stored.dtype for name in dense for _, chunk in source.chunks(name, outline.shapes[name], None)
    }
    names = [name for name, dtype in DTYPES_BY_NAME.items() if {NAMES[dtype]} == found]
    if not names:
        raise ConfigError(
            f"dtype=None: {checkpoint.folder / STATE} does not say the run's (config.train.dtype={stated!r}), and the "
            f"weights are {', '.join(sorted(found))}; valid: {', '.join(map(repr, EXPORT_DTYPES))}"
        )
    return names[0]


def _entries(source: Source, outline: Outline, layout: str, dtype: torch.dtype) -> list[Entry]:
    """Every tensor to write, in the model's order; all are looked up first."""
    naming = naming_of(layout, outline.style)
    entries: list[Entry] = []
    for name, shape in outline.shapes.items():
        if not is_experts(name):
            [(_, chunk)] = source.chunks(name, shape, None)
            kept = DTYPES[chunk.stored.dtype] if name in outline.kept else dtype
            [piece] = naming(name, shape, None)
            entries.append(Entry(name=piece.name, dtype=kept, shape=shape, chunks=(chunk,)))
            continue
        experts, one = shape[0], shape[1:]
        wholes = [source.chunks(name, one, expert) for expert in range(experts)]
        chunks = [chunk for whole in wholes for _, chunk in whole]
        if layout != PER_EXPERT:
            entries.append(Entry(name=name, dtype=dtype, shape=shape, chunks=tuple(chunks)))
            continue
        for expert, chunk in enumerate(chunks):
            for piece in naming(name, one, expert):
                part = Chunk(stored=chunk.stored, first=chunk.first + piece.first, count=piece.count)
                entries.append(Entry(name=piece.name, dtype=dtype, shape=piece.shape, chunks=(part,)))
    return entries


def _write_weights(folder: Path, entries: Sequence[Entry], limit: int, metadata: dict[str, str]) -> int:
    """Write files and index; returns the number of files."""
    shards = split(entries, limit)
    weight_map: dict[str, str] = {}
    with Reader.opened() as reader:
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_tensors(folder / name, shard, reader, metadata)
            weight_map |= {entry.name: name for entry in shard}
    total = sum(entry.nbytes for entry in entries)
    write_json(folder / INDEX, {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map})
    return len(shards)


def split(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """Entries in their order, in groups of at most `limit` bytes; a larger entry is alone."""
    groups: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not groups or entry.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(entry)
        room -= entry.nbytes
    return groups
