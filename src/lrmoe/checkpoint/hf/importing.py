"""A folder in the Transformers layout as a checkpoint of this package at step 0, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrmoe.checkpoint.hf.export import replacing, split
from lrmoe.checkpoint.hf.folder import (
    CONFIG,
    Source,
    refuse_quantised,
    stated_layout,
    transformers_source,
)
from lrmoe.checkpoint.hf.names import LAYOUTS, PER_EXPERT, is_experts, own
from lrmoe.checkpoint.hf.outline import Outline, model_fields, outline_of
from lrmoe.checkpoint.hf.tensors import DTYPES, Entry, Reader, write_tensors
from lrmoe.checkpoint.manifest import DENSE, STATE, FileEntry, Manifest, describe, folder_of, write_json
from lrmoe.errors import CheckpointError, ConfigError, require_extra

SHARD = 5 * 10**9  # most bytes of a file of experts


def import_checkpoint(
    folder: str | Path,
    root: str | Path,
    *,
    layout: str | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Write root/step-00000000 from a local folder that `from_pretrained` reads, a block of a tensor at a time.

    Tensors keep the dtype they have. Everything is looked up before anything is written, and what cannot be finished is
    removed.

    Args:
        folder: holds config.json and safetensors files.
        root: folder of the checkpoints to be; made where it is not.
        layout: "per-expert" or "fused"; None: what an export of this package states, else "per-expert".
        state: of the checkpoint; None: the model's configuration and dtype alone, which is enough for
            `model.checkpoint` and for `export_checkpoint`. `lrmoe import` gives what `lrmoe train --resume` needs.

    Returns:
        The checkpoint's folder.

    Raises:
        ConfigError: no config.json there, the layout is not the stated one, or there is a checkpoint of step 0.
        CheckpointError: weights are missing, damaged, of other shapes, or have no place in the model; names them.
        UnsupportedError: a family whose published names are not known, or quantised weights.
    """
    folder, final = Path(folder), folder_of(Path(root), 0)
    if final.exists():
        raise ConfigError(f"{final}: exists; import into another folder")
    config = read_config(folder)
    outline = outline_of(config)
    layout = _layout(folder, layout)
    source = transformers_source(folder, outline.style, layout)
    dense, experts = _entries(source, outline)
    _refuse_strangers(source, outline)
    if state is None:
        state = {"model": model_fields(config), "config": {"train": {"dtype": dtype_name(config)}}}
    with replacing(final) as partial:
        _write(partial, dense, experts, state)
    return final


def read_config(folder: Path) -> Any:
    """The transformers configuration of a local folder whose weights are not quantised.

    Raises:
        ConfigError: there is none, or transformers cannot read it.
        UnsupportedError: the weights are quantised.
    """
    hf = require_extra("transformers", "transformers")
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: no directory with a {CONFIG}")
    refuse_quantised(folder)
    try:
        return hf.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the validators of huggingface_hub raise classes of their own
        raise ConfigError(f"{folder / CONFIG}: transformers cannot read it: {error}") from error


def dtype_name(config: Any) -> str:
    """The dtype a transformers configuration says its weights have, as text; float32 where it says none."""
    return str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")


def _layout(folder: Path, given: str | None) -> str:
    stated = stated_layout(folder)
    if given is not None and given not in LAYOUTS:
        raise ConfigError(f"layout={given!r}: must be one of {', '.join(map(repr, LAYOUTS))}")
    if given is not None and stated is not None and given != stated:
        raise ConfigError(f"layout={given!r}: {folder} states {stated!r}")
    return given or stated or PER_EXPERT


def _entries(source: Source, outline: Outline) -> tuple[list[Entry], list[Entry]]:
    """Dense tensors and experts of the checkpoint."""
    dense, experts = [], []
    for name, shape in outline.shapes.items():
        if not is_experts(name):
            dense.append(_entry(source, name, shape, None, 0))
            continue
        _check_layout(source, name)
        experts += [_entry(source, name, shape[1:], expert, shape[0]) for expert in range(shape[0])]
    return dense, experts


def _check_layout(source: Source, name: str) -> None:
    """Say which layout it is where the names of the other one are there."""
    there = name in source.stored
    [first, *_] = source.naming(name, (2, 1), 0)
    if there and first.row is None and first.name not in source.stored:
        raise CheckpointError(
            f"{source.folder}: holds {name}, so its layout is 'fused'; say so with --layout fused"
        )
    if not there and first.row is not None:
        raise CheckpointError(f"{source.folder}: holds no tensor {name!r}, as layout 'fused' has it")


def _entry(source: Source, name: str, shape: tuple[int, ...], expert: int | None, experts: int) -> Entry:
    chunks = [chunk for _, chunk in source.chunks(name, shape, expert, experts)]
    kinds = {chunk.stored.dtype for chunk in chunks}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{source.folder}: {name} of expert {expert} has several dtypes: {sorted(kinds)}"
        )
    [piece] = own(name, shape, expert)
    return Entry(name=piece.name, dtype=DTYPES[kinds.pop()], shape=shape, chunks=tuple(chunks))


def _refuse_strangers(source: Source, outline: Outline) -> None:
    """A tensor without a place in the model is a sign that something else is meant."""
    known = {
        piece.name
        for name, shape in outline.shapes.items()
        for expert in (range(shape[0]) if is_experts(name) else (None,))
        for piece in source.naming(name, shape[1:] if is_experts(name) else shape, expert)
    }
    for name, stored in source.stored.items():
        if name not in known and not outline.is_spare(name):
            raise CheckpointError(
                f"{stored.file}: holds {name}, which {outline.architecture} has no place for"
            )


def _write(folder: Path, dense: Sequence[Entry], experts: Sequence[Entry], state: Mapping[str, Any]) -> None:
    shards = split(experts, SHARD)
    names = [f"experts-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    files: list[FileEntry] = []
    with Reader.opened() as reader:
        for name, entries in zip((DENSE, *names), (dense, *shards), strict=True):
            write_tensors(folder / name, entries, reader, {})
            files.append(describe(folder / name, [entry.name for entry in entries]))
    write_json(folder / STATE, dict(state))
    files.append(describe(folder / STATE, ()))
    Manifest(step=0, world_size=1, files=tuple(files)).write(folder)
