"""Text as token ids, and batches that depend on counters only.

Shapes: B sequences of a batch, S tokens of a sequence.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lrmoe.errors import ConfigError, require_extra
from lrmoe.training.config import DataConfig
from lrmoe.training.presets import BYTE_VOCABULARY, SEPARATOR_ID

log = logging.getLogger(__name__)

# Left out of the default corpus: not part of the library proper, and missing from some distributions.
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
_SEPARATORS = ("<|endoftext|>", "</s>", "<|im_end|>", "[SEP]")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus in memory.

    Attributes:
        tokens: ids, one-dimensional, uint16 or int32.
        vocab_size: ids are below it.
        held_out: tokens at the end that training never reads.
        name: where it came from.
    """

    tokens: np.ndarray[Any, Any]
    vocab_size: int
    held_out: int
    name: str

    @classmethod
    def load(cls, config: DataConfig) -> Corpus:
        """Read and tokenize; says in the log how much there is.

        Raises:
            ConfigError: path or tokenizer cannot be read, or there is too little text; names the path.
        """
        name = "the standard library's source" if config.path is None else config.path
        found = _standard_library() if config.path is None else _files(Path(config.path))
        if config.limit is not None and config.tokenizer is None:
            found = _first(found, config.limit)  # one token per byte: no file beyond the limit is opened
        texts = list(found)
        tokens, vocab_size = _bytes(texts) if config.tokenizer is None else _tokenize(texts, config.tokenizer)
        tokens = tokens[: config.limit]
        least = _least_tokens(config)
        if len(tokens) < least:
            raise ConfigError(
                f"data.path={name!r}: {len(tokens)} tokens; training on sequences of data.seq_len={config.seq_len} "
                f"with data.held_out={config.held_out} needs at least {least}"
            )
        held_out = max(int(len(tokens) * config.held_out), config.seq_len + 1) if config.held_out else 0
        files = f"{len(texts)} file{'s' * (len(texts) != 1)}"
        log.info("text: %s, %s, %d tokens, %d of them held out", name, files, len(tokens), held_out)
        return cls(tokens=tokens, vocab_size=vocab_size, held_out=held_out, name=name)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the ids, their type and the split."""
        head = f"{self.tokens.dtype.str}:{self.held_out}:".encode()
        return hashlib.sha256(head + self.tokens.tobytes()).hexdigest()

    def train_batch(
        self, *, seed: int, step: int, micro_batch: int, rank: int, world_size: int, size: int, seq_len: int
    ) -> torch.Tensor:
        """Token ids (B=size, S=seq_len + 1) int64: random crops of the training part.

        Row b of a rank is sequence (micro_batch * world_size + rank) * size + b of the step, and a sequence depends on
        (seed, step, its number) only: the step's text is the same however it is spread over ranks and micro-batches.
        """
        first = (micro_batch * world_size + rank) * size
        numbers = np.arange(first, first + size, dtype=np.uint64)
        span = len(self.tokens) - self.held_out - seq_len
        return self._rows(_random(seed, step, numbers) % np.uint64(span), seq_len)

    def held_out_batch(self, *, number: int, total: int, size: int, seq_len: int) -> torch.Tensor:
        """Token ids (B=size, S=seq_len + 1) int64: batch `number` of `total` spread evenly over the held-out part."""
        span = self.held_out - seq_len  # starts that fit
        rows = np.arange(number * size, (number + 1) * size, dtype=np.uint64)
        starts = len(self.tokens) - self.held_out + rows * np.uint64(span) // np.uint64(total * size)
        return self._rows(starts, seq_len)

    def _rows(self, starts: np.ndarray[Any, Any], seq_len: int) -> torch.Tensor:
        index = starts.astype(np.int64)[:, None] + np.arange(seq_len + 1)
        return torch.from_numpy(self.tokens[index].astype(np.int64))


def _random(seed: int, step: int, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Uniform uint64 by counter: the mixing function of splitmix64 (Steele, Lea, Flood 2014), once per key."""
    state = np.zeros_like(numbers)
    for key in (np.uint64(seed), np.uint64(step), numbers):
        state = (state + key + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def _least_tokens(config: DataConfig) -> int:
    """Fewest tokens that leave a training crop with a choice of two places, and a held-out sequence where asked."""
    train, held = config.seq_len + 2, config.seq_len + 1
    if not config.held_out:
        return train
    return max(train + held, math.floor((train - 1) / (1 - config.held_out)) + 1)


def _standard_library() -> Iterator[bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(_walk(root, _SKIPPED_FOLDERS), key=lambda path: path.relative_to(root).as_posix()):
        if path.suffix == ".py":
            yield _read(path)


def _files(path: Path) -> Iterator[bytes]:
    """The text of a file, or of every text file below a directory in sorted order."""
    if not path.exists():
        raise ConfigError(f"data.path={str(path)!r}: no such file or directory")
    if not path.is_dir():
        yield _read(path)
        return
    found = 0
    for file in sorted(_walk(path), key=lambda file: file.relative_to(path).as_posix()):
        content = _read(file)
        if content and b"\0" not in content[:8192]:  # else not text
            found += 1
            yield content
    if not found:
        raise ConfigError(
            f"data.path={str(path)!r}: no text files under {path}: every file there is empty, binary or hidden"
        )


def _walk(root: Path, skipped: Collection[str] = ()) -> Iterator[Path]:
    """Files below a directory, hidden ones and those in hidden or `skipped` folders left out."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        yield from (Path(folder) / name for name in files if not name.startswith("."))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"data.path={str(path)!r}: cannot be read: {error.strerror}") from error


def _first(texts: Iterator[bytes], limit: int) -> Iterator[bytes]:
    """Texts until they hold `limit` bytes; the last one whole."""
    held = 0
    for text in texts:
        yield text
        held += len(text) + 1
        if held >= limit:
            return


def _bytes(texts: list[bytes]) -> tuple[np.ndarray[Any, Any], int]:
    separator = np.array([SEPARATOR_ID], dtype=np.uint16)
    parts = []
    for text in texts:
        parts += [np.frombuffer(text, dtype=np.uint8).astype(np.uint16), separator]
    return np.concatenate(parts or [separator]), BYTE_VOCABULARY


def _tokenize(texts: list[bytes], path: str) -> tuple[np.ndarray[Any, Any], int]:
    tokenizers = require_extra("tokenizers", "transformers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"data.tokenizer={path!r}: not a tokenizer file: {error}") from error
    separators = [tokenizer.token_to_id(name) for name in _SEPARATORS]
    separator = [identity for identity in separators if identity is not None][:1]
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([text.decode("utf-8", errors="replace") for text in texts]):
        ids += [*encoding.ids, *separator]
    return np.array(ids, dtype=np.int32), tokenizer.get_vocab_size()
