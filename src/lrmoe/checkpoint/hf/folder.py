"""Where weights are read from: a folder in the Transformers layout, or a checkpoint of this package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrmoe.checkpoint.hf.names import FUSED, LAYOUTS, PER_EXPERT, Naming, Piece, Style, fused, own, per_expert
from lrmoe.checkpoint.hf.tensors import DTYPES, Chunk, Stored, read_header
from lrmoe.checkpoint.load import find_steps
from lrmoe.checkpoint.manifest import MANIFEST, STATE, check_sizes, folder_of, read_json
from lrmoe.errors import CheckpointError, ConfigError, UnsupportedError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LAYOUT = "layout"  # key of the index's metadata


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Stored tensors of a model.

    Attributes:
        folder: where they lie, for messages.
        stored: every tensor on the disk, by its name there.
        naming: what a model's tensors consist of on the disk.
    """

    folder: Path
    stored: Mapping[str, Stored]
    naming: Naming

    def chunks(
        self, name: str, shape: tuple[int, ...], expert: int | None, experts: int = 0
    ) -> Iterator[tuple[Piece, Chunk]]:
        """What a model's tensor, or one expert of it, consists of, in the order of its elements.

        Args:
            name: of the model's tensor. shape: its shape, or that of one expert.
            expert: global id, or None. experts: how many there are.

        Raises:
            CheckpointError: something is missing or of another shape; names it.
            UnsupportedError: something is quantised.
        """
        for piece in self.naming(name, shape, expert):
            stored = self._find(piece)
            whole = piece.shape if piece.row is None else (experts, *piece.shape)
            if stored.shape != whole:
                raise CheckpointError(
                    f"{stored.file}: {piece.name} has shape {stored.shape}, the configuration asks for {whole}"
                )
            yield piece, Chunk(stored=stored, first=(piece.row or 0) * piece.count, count=piece.count)

    def _find(self, piece: Piece) -> Stored:
        stored = self.stored.get(piece.name)
        if stored is None:
            raise CheckpointError(f"{self.folder}: holds no tensor {piece.name!r}")
        if stored.dtype not in DTYPES:
            raise UnsupportedError(
                f"{stored.file}: {piece.name} is stored as {stored.dtype}; quantised weights are not read, valid: "
                f"{', '.join(DTYPES)}"
            )
        return stored


def read_transformers_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder in the Transformers layout; reads headers only.

    Raises:
        CheckpointError: there are no weights, a file is missing or damaged, or holds other tensors than the index says.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX} there")
        return read_header(folder / SINGLE)
    weight_map = _index(folder).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map must be a table of file names")
    files = {name: read_header(folder / name) for name in dict.fromkeys(weight_map.values())}
    for name, file in weight_map.items():
        if name not in files[file]:
            raise CheckpointError(f"{folder / file}: holds no tensor {name!r}, which {INDEX} puts there")
    return {name: files[file][name] for name, file in weight_map.items()}


def _index(folder: Path) -> dict[str, Any]:
    index = read_json(folder / INDEX)
    if not isinstance(index, dict):
        raise CheckpointError(f"{folder / INDEX}: holds a {type(index).__name__}: must be an object")
    return index


def stated_layout(folder: Path) -> str | None:
    """The layout that an export states, None where a folder states none.

    Raises:
        CheckpointError: it states one that does not exist.
    """
    metadata = _index(folder).get("metadata") if (folder / INDEX).is_file() else None
    layout = metadata.get(LAYOUT) if isinstance(metadata, dict) else None
    if layout is not None and layout not in LAYOUTS:
        raise CheckpointError(f"{folder / INDEX}: layout {layout!r}: valid: {', '.join(LAYOUTS)}")
    return layout


def refuse_quantised(folder: Path) -> None:
    """Refuse a Transformers folder whose configuration says that its weights are quantised.

    Raises:
        CheckpointError: its config.json cannot be read.
        UnsupportedError: they are; names the method.
    """
    fields = read_json(folder / CONFIG)
    found = fields.get("quantization_config") if isinstance(fields, dict) else None
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise UnsupportedError(
            f"{folder / CONFIG}: quantization_config ({method}): quantised weights are not read; valid are float64, "
            "float32, float16 and bfloat16"
        )


def transformers_source(folder: Path, style: Style, layout: str | None = None) -> Source:
    """Weights in the Transformers layout.

    Args:
        layout: one of LAYOUTS; None: every tensor of experts under whichever of the two names is there.
    """
    stored = read_transformers_folder(folder)
    single = per_expert(style)

    def either(name: str, shape: tuple[int, ...], expert: int | None) -> list[Piece]:
        return (fused if name in stored else single)(name, shape, expert)

    naming = {FUSED: fused, PER_EXPERT: single, None: either}[layout]
    return Source(folder=folder, stored=stored, naming=naming)


def own_source(folder: Path) -> Source:
    """Weights of a checkpoint of this package, which the caller has verified."""
    names = [entry.name for entry in check_sizes(folder).files if entry.name.endswith(".safetensors")]
    stored = {key: found for name in names for key, found in read_header(folder / name).items()}
    return Source(folder=folder, stored=stored, naming=own)


def is_own(path: Path) -> bool:
    """Whether a folder is a checkpoint of this package, or one of checkpoints, or a run's."""
    return (path / MANIFEST).is_file() or bool(find_steps(_root(path)))


def _root(path: Path) -> Path:
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def steps_below(path: Path, step: int | None = None) -> list[Path]:
    """The checkpoint `path` is, or those of the run or folder it is, newest first; with `step` that one alone.

    Raises:
        ConfigError: there is none, or none of that step.
    """
    if (path / MANIFEST).is_file():
        if step is not None and path != folder_of(path.parent, step):
            raise ConfigError(
                f"step={step}: {path} is one checkpoint, of another step; name its run to choose one"
            )
        return [path]
    steps = find_steps(_root(path))
    if not steps:
        raise ConfigError(
            f"{path}: neither a checkpoint nor a run with checkpoints (no {MANIFEST}, no checkpoints/step-...); "
            "a run writes them with train.checkpoint_every"
        )
    if step is not None and step not in steps:
        raise ConfigError(f"step={step}: {path} has no such checkpoint; valid: {', '.join(map(str, steps))}")
    return [folder_of(_root(path), found) for found in reversed(steps) if step in (None, found)]


def newest_usable(path: Path) -> Path:
    """The newest checkpoint of a run whose files have their sizes; reads none of them.

    Raises:
        ConfigError: as `steps_below`.
        CheckpointError: none is usable; names the newest one's fault.
    """
    errors = []
    for folder in steps_below(path):
        try:
            check_sizes(folder)
            return folder
        except CheckpointError as error:
            errors.append(error)
    raise errors[0]


def own_fields(folder: Path) -> dict[str, Any]:
    """Fields of the transformers configuration of a checkpoint of this package.

    Raises:
        CheckpointError: it does not say them.
    """
    state = read_json(folder / STATE)
    fields = state.get("model") if isinstance(state, dict) else None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise CheckpointError(f"{folder / STATE}: says nothing of the model (model.model_type)")
    return fields
