"""Safetensors files by plain reads and writes of at most BLOCK bytes at a time: nothing is mapped into memory.

A mapped file counts as the process's memory as far as it was read, whole files at that; here a process holds the
tensors it fills and one block beside them.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lrmoe.checkpoint.manifest import sync
from lrmoe.errors import CheckpointError

BLOCK = 64 * 2**20  # bytes
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file.

    Attributes:
        file: where it lies.
        dtype: as safetensors writes it, "F32" for float32; not all are keys of DTYPES.
        shape: its shape.
        start: byte of the file at which it begins.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """`count` elements of a stored tensor, flattened, from element `first`."""

    stored: Stored
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor to be written: its chunks, one after the other, in `dtype`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Stored]:
    """Every tensor of a file, by name; reads no values.

    Raises:
        CheckpointError: the file is missing or no safetensors file of the length its header says.
    """
    try:
        with safe_open(path, framework="pt"):  # checks every offset against the file's size
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    header.pop("__metadata__", None)
    return {
        name: Stored(
            file=path,
            dtype=given["dtype"],
            shape=tuple(given["shape"]),
            start=8 + size + given["data_offsets"][0],
        )
        for name, given in header.items()
    }


class Reader:
    """Reads elements of stored tensors; keeps the file of the last one open.

    Raises:
        CheckpointError: a file can no longer be read; from every method.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._path: Path | None = None

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Reader]:
        """A reader whose file is closed at the end."""
        reader = cls()
        try:
            yield reader
        finally:
            reader._close()

    def blocks(self, chunk: Chunk) -> Iterator[tuple[int, Tensor]]:
        """(its first element within the chunk, 1-D tensor in the stored dtype) of one block after the other."""
        dtype = DTYPES[chunk.stored.dtype]
        most = BLOCK // dtype.itemsize
        for begin in range(0, chunk.count, most):
            count = min(most, chunk.count - begin)
            yield begin, self._read(chunk.stored, dtype, chunk.first + begin, count)

    def fill(self, target: Tensor, chunk: Chunk) -> None:
        """Copy a chunk into a 1-D tensor of as many elements, of any dtype and device."""
        for begin, values in self.blocks(chunk):
            target[begin : begin + len(values)] = values

    def _read(self, stored: Stored, dtype: torch.dtype, first: int, count: int) -> Tensor:
        values = torch.empty(count, dtype=dtype)
        buffer = values.view(torch.uint8).numpy().data
        try:
            if self._path != stored.file or self._file is None:
                self._close()
                self._file, self._path = stored.file.open("rb"), stored.file
            self._file.seek(stored.start + first * dtype.itemsize)
            got = self._file.readinto(buffer)  # type: ignore[attr-defined]  # of every file opened as "rb"
        except OSError as error:
            raise CheckpointError(f"{stored.file}: cannot be read: {error}") from error
        if got != len(buffer):
            raise CheckpointError(f"{stored.file}: cannot be read: it has become shorter")
        return values

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._path = None


def write_tensors(path: Path, entries: Sequence[Entry], reader: Reader, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, a block at a time, and flush it to the disk.

    Raises:
        CheckpointError: it cannot be written, or a chunk cannot be read.
    """
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)  # keeps every tensor aligned
    try:
        with path.open("wb") as file:
            file.write(_header(ordered, metadata))
            for entry in ordered:
                for chunk in entry.chunks:
                    file.writelines(_bytes(reader, chunk, entry.dtype))
        sync(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


def _bytes(reader: Reader, chunk: Chunk, dtype: torch.dtype) -> Iterable[memoryview]:
    for _, values in reader.blocks(chunk):
        yield values.to(dtype).view(torch.uint8).numpy().data


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for entry in entries:
        end = start + entry.nbytes
        shape = list(entry.shape)
        content[entry.name] = {"dtype": NAMES[entry.dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
