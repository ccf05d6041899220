"""What a checkpoint consists of: every file with size and hash, every tensor with its file.

step-00000200/
    manifest.json                   written last
    state.json                      step, configuration, controller states
    dense.safetensors               model/<name>, optim/<name>/<moment>
    experts-00000-of-00002.safetensors   model/<name>/expert/<global id>, ...: the experts of rank 0
    experts-00001-of-00002.safetensors   ... of rank 1
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lrmoe.errors import CheckpointError

FORMAT = 2  # 2: state.json of a trainer holds totals
MANIFEST = "manifest.json"
STATE = "state.json"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file: its name in the folder, its size in bytes, its SHA-256, and the tensors in it."""

    name: str
    size: int
    sha256: str
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        files: all files but the manifest itself.
    """

    step: int
    world_size: int
    files: tuple[FileEntry, ...]

    def file_of(self) -> dict[str, str]:
        """Every tensor's key -> the name of its file."""
        return {key: entry.name for entry in self.files for key in entry.keys}

    def write(self, folder: Path) -> None:
        """Write manifest.json and flush it to the disk."""
        files = [dataclasses.asdict(entry) for entry in self.files]
        content = {"format": FORMAT, "step": self.step, "world_size": self.world_size, "files": files}
        write_json(folder / MANIFEST, content)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Parse manifest.json.

        Raises:
            CheckpointError: it is missing, not JSON, of another format, or lacks fields; names the path.
        """
        content = read_json(folder / MANIFEST)
        try:
            if content["format"] != FORMAT:
                raise CheckpointError(
                    f"{folder / MANIFEST}: format {content['format']!r}, this version reads {FORMAT}"
                )
            files = tuple(
                FileEntry(name=f["name"], size=f["size"], sha256=f["sha256"], keys=tuple(f["keys"]))
                for f in content["files"]
            )
            return cls(step=content["step"], world_size=content["world_size"], files=files)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / MANIFEST}: incomplete: {error!r}") from error


def describe(path: Path, keys: Sequence[str]) -> FileEntry:
    """A file's entry, its hash taken from what the file system gives back."""
    return FileEntry(name=path.name, size=path.stat().st_size, sha256=_hash(path), keys=tuple(keys))


def verify(folder: Path, *, part: int = 0, parts: int = 1) -> Manifest:
    """Read the manifest and check files against it; with `parts` > 1 only every parts-th file, from `part`.

    Raises:
        CheckpointError: a file is missing, of another size or hash, or holds other tensors; names the file.
    """
    manifest = Manifest.read(folder)
    for entry in manifest.files[part::parts]:
        path = folder / entry.name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if path.stat().st_size != entry.size:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes, the manifest says {entry.size}")
        if _hash(path) != entry.sha256:
            raise CheckpointError(f"{path}: its SHA-256 differs from the manifest's: the file is corrupt")
        if path.suffix == ".safetensors":
            _check_keys(path, entry)
    return manifest


def _check_keys(path: Path, entry: FileEntry) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            found = set(file.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
    if found != set(entry.keys):
        odd = sorted(found ^ set(entry.keys))[0]
        raise CheckpointError(f"{path}: its tensors differ from the manifest's, first: {odd}")


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write JSON and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        CheckpointError: it is missing or not JSON; names the path.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
