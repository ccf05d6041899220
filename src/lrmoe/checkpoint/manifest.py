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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open

from lrmoe.errors import CheckpointError

FORMAT = 2  # 2: state.json of a trainer holds totals
MANIFEST = "manifest.json"
STATE = "state.json"
DENSE = "dense.safetensors"


def folder_of(root: Path, step: int) -> Path:
    """The folder of one step's checkpoint."""
    return root / f"step-{step:08d}"


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
            CheckpointError: it is missing, not JSON, of another format or another step than the folder's name says,
                lacks fields, or names files that no checkpoint has; names the path.
        """
        path = folder / MANIFEST
        content = read_json(path)
        try:
            if content["format"] != FORMAT:
                raise CheckpointError(f"{path}: format {content['format']!r}, this version reads {FORMAT}")
            files = tuple(_entry(path, given) for given in content["files"])
            manifest = cls(step=content["step"], world_size=content["world_size"], files=files)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: incomplete: {error!r}") from error
        manifest._check(folder)
        return manifest

    def _check(self, folder: Path) -> None:
        path = folder / MANIFEST
        for name, least in (("step", 0), ("world_size", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise CheckpointError(f"{path}: {name}={value!r}: must be an integer of at least {least}")
        if folder.name.startswith("step-") and folder.name != folder_of(folder.parent, self.step).name:
            raise CheckpointError(f"{path}: is of step {self.step}; the folder was renamed")
        names = [entry.name for entry in self.files]
        lacking = [name for name in (STATE, DENSE) if name not in names]
        if lacking:
            raise CheckpointError(f"{path}: incomplete: does not list {lacking[0]}")
        for what, values in (("file", names), ("tensor", [key for e in self.files for key in e.keys])):
            twice = [value for value, count in Counter(values).items() if count > 1]
            if twice:
                raise CheckpointError(f"{path}: lists the {what} {twice[0]!r} twice")


def _entry(path: Path, given: Any) -> FileEntry:
    """One entry of manifest.json at `path`."""
    name, size, sha256, keys = (given[field] for field in ("name", "size", "sha256", "keys"))
    plain = isinstance(name, str) and name == PurePath(name).name and not set(name) & set("\\:\0")
    if not plain or name in ("", "..", MANIFEST):
        raise CheckpointError(f"{path}: file name {name!r}: must be a plain name of a file in the folder")
    if type(size) is not int or not isinstance(sha256, str):
        raise CheckpointError(
            f"{path}: size {size!r} and SHA-256 {sha256!r} of {name}: must be an integer and text"
        )
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointError(f"{path}: keys of {name}: must be a list of texts")
    return FileEntry(name=name, size=size, sha256=sha256, keys=tuple(keys))


def describe(path: Path, keys: Sequence[str]) -> FileEntry:
    """A file's entry, its hash taken from what the file system gives back."""
    return FileEntry(name=path.name, size=path.stat().st_size, sha256=_hash(path), keys=tuple(keys))


def check_sizes(folder: Path) -> Manifest:
    """Read the manifest and compare which files there are and their sizes: a check that reads no file's content.

    Raises:
        CheckpointError: the manifest cannot be used, a file is missing or of another size, or holds tensors and is not
            in the manifest; names the file.
    """
    manifest = Manifest.read(folder)
    try:
        for entry in manifest.files:
            path = folder / entry.name
            if not path.is_file():
                raise CheckpointError(f"{path}: missing")
            if path.stat().st_size != entry.size:
                raise CheckpointError(f"{path}: {path.stat().st_size} bytes, the manifest says {entry.size}")
        listed = {entry.name for entry in manifest.files}
        odd = sorted(path for path in folder.glob("*.safetensors") if path.name not in listed)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    if odd:
        raise CheckpointError(f"{odd[0]}: not in the manifest, which is incomplete or another checkpoint's")
    return manifest


def verify(folder: Path, *, part: int = 0, parts: int = 1) -> Manifest:
    """Check all sizes, and hashes and tensors of files; with `parts` > 1 only of every parts-th file, from `part`.

    Raises:
        CheckpointError: as `check_sizes`, or a file is of another hash or holds other tensors; names the file.
    """
    manifest = check_sizes(folder)
    for entry in manifest.files[part::parts]:
        path = folder / entry.name
        try:
            if _hash(path) != entry.sha256:
                raise CheckpointError(f"{path}: its SHA-256 differs from the manifest's: the file is corrupt")
            if path.suffix == ".safetensors":
                _check_keys(path, entry)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
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
        CheckpointError: it is missing, not JSON or nested too deeply; names the path.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
