"""A run's folder: nothing is written before the run is sure to start, nothing is overwritten unless asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from lrmoe.checkpoint import find_steps
from lrmoe.errors import ConfigError
from lrmoe.training.config import TrainConfig
from lrmoe.training.kinds import check_kind
from lrmoe.training.locks import alone

CONFIG = "config.toml"
MODEL = "model"  # folder of an imported run: the model's configuration, and the tokenizer
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
RESULTS = (METRICS, SUMMARY, "trace.parquet", "report.html", "wandb.id")
UNWIND_S = 10.0  # ranks of a run that was killed may still be ending when its restart comes


def check_free(config: TrainConfig, *, overwrite: bool, kinds: Sequence[str] = ("train",)) -> None:
    """Refuse a folder that cannot be written or holds another run; creates and changes nothing.

    Args:
        overwrite: whether an earlier run may be replaced, if it is of one of `kinds`.

    Raises:
        ConfigError: names the folder and the ways out. Checkpoints and runs of other commands are refused even with
            `overwrite`.
    """
    folder = config.folder
    _check_writable(config)
    if find_steps(folder / "checkpoints"):
        raise ConfigError(
            f"train.name={config.train.name!r}: {folder} holds checkpoints of an earlier run, which --overwrite does "
            "not touch; go on with lrmoe train --resume, choose another --name, or remove it"
        )
    check_kind(folder, "train.name", kinds)
    found = [name for name in RESULTS if _has_content(folder / name)]
    if found and not overwrite:
        raise ConfigError(
            f"train.name={config.train.name!r}: {folder} holds an earlier run ({', '.join(found)}); pass --overwrite "
            "to replace it, or choose another --name"
        )


def hold(config: TrainConfig, until: ExitStack) -> None:
    """Be the only run in the folder until `until` closes; makes the folder.

    Raises:
        ConfigError: another process trains there, or it cannot be written.
    """
    patience_s = min(UNWIND_S, config.train.timeout_s / 2)
    try:
        until.enter_context(
            alone(config.folder, setting="train.name", command="train", patience_s=patience_s)
        )
    except OSError as error:
        raise _unwritable(config, error.strerror) from error


def claim(config: TrainConfig, write: Callable[[Path], None], *, fresh: bool) -> None:
    """Make the folder and write its config.toml; a fresh run first removes what another one left.

    Args:
        write: writes the resolved configuration to the path it is given.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = config.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if fresh:
            for name in RESULTS:
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        write(folder / CONFIG)
    except OSError as error:
        raise _unwritable(config, error.strerror) from error


def _has_content(path: Path) -> bool:
    """A run that failed before its first step leaves empty files, which nobody misses."""
    return path.is_file() and path.stat().st_size > 0


def _check_writable(config: TrainConfig) -> None:
    place = config.folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise _unwritable(config, f"{place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise _unwritable(config, f"no permission to write to {place}")


def _unwritable(config: TrainConfig, reason: str | None) -> ConfigError:
    return ConfigError(f"train.runs={config.train.runs!r}: cannot write to {config.folder}: {reason}")
