"""Three ways to train, which show different sides of a pruned backward.

    scratch     new weights, 400 steps                          exposes bias; noisy
    continued   from a start checkpoint, 200 steps of new text  least noise: ranks what costs little
    memorise    from the same checkpoint, 8 KB by heart         closest to the published setting

The start checkpoint is trained once for each model, text and auxiliary loss, and kept in a cache. Imports torch only to
make it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lrmoe.errors import ConfigError, did_you_mean
from lrmoe.telemetry.figures import environment
from lrmoe.training.config import ModelConfig, TrainConfig
from lrmoe.training.locks import locked

if TYPE_CHECKING:
    from lrmoe.training.data import Corpus

log = logging.getLogger(__name__)

CACHE = Path("runs") / "cache"
START_STEPS = 800
_LOG_STEPS = 100
_VERSION = 1  # of how a start checkpoint is made

Progress = Callable[[int, int], None]  # steps done, steps in all


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A way to train.

    Attributes:
        name, about: for people.
        continues: whether it starts from the checkpoint.
        tables: what it sets of a training run; everything else is the base's.
        target_loss: smoothed training loss that counts as learned, or None.
    """

    name: str
    about: str
    continues: bool
    tables: Mapping[str, Mapping[str, Any]]
    target_loss: float | None = None


_BATCH = {"batch_size": 8, "accumulate": 1}
_TEXT = {"seq_len": 128, "held_out": 0.0}
_START: Mapping[str, Mapping[str, Any]] = {
    "data": {**_TEXT},
    "optim": {"lr": 2e-3, "warmup_steps": 20},
    "train": {**_BATCH, "steps": START_STEPS},
}

REGIMES: Mapping[str, Regime] = MappingProxyType(
    {
        regime.name: regime
        for regime in (
            Regime(
                name="scratch",
                about="from new weights, 400 steps",
                continues=False,
                tables={
                    "data": {**_TEXT},
                    "optim": {"lr": 2e-3, "warmup_steps": 20},
                    "train": {**_BATCH, "steps": 400},
                },
            ),
            Regime(
                name="continued",
                about=f"from a checkpoint of {START_STEPS} steps, 200 more",
                continues=True,
                tables={
                    "data": {**_TEXT},
                    "optim": {"lr": 1e-3, "warmup_steps": 10},
                    "train": {**_BATCH, "steps": 200},
                    "lrmoe": {"warmup_steps": 0},
                },
            ),
            Regime(
                name="memorise",
                about=f"from a checkpoint of {START_STEPS} steps, 8 KB of text by heart",
                continues=True,
                tables={
                    "data": {**_TEXT, "limit": 8192},
                    "optim": {"lr": 3e-3, "warmup_steps": 10, "beta2": 0.99, "weight_decay": 0.0},
                    # The target comes after about 270 steps: rules that need a quarter more still reach it.
                    "train": {**_BATCH, "steps": 340, "skip_positions": 16},
                    "lrmoe": {"warmup_steps": 0},
                },
                target_loss=0.05,
            ),
        )
    }
)


def get_regime(name: str) -> Regime:
    """Look a regime up.

    Raises:
        ConfigError: no such regime; names the nearest and all valid ones.
    """
    if name in REGIMES:
        return REGIMES[name]
    hint = did_you_mean(name, REGIMES)
    raise ConfigError(f"regime={name!r}: no such regime{hint}; valid: {', '.join(REGIMES)}")


def regime_config(
    base: TrainConfig, regime: str, seed: int, cache: Path = CACHE, progress: Progress | None = None
) -> TrainConfig:
    """The run of a regime: the base's model, text, pruning and auxiliary loss, trained as the regime says.

    Makes the start checkpoint where the regime needs one and the cache has none. A base whose model is a checkpoint
    starts from that.

    Args:
        seed: of data order and selection, and in `scratch` of the weights.
        cache: folder of start checkpoints.
        progress: told of the steps of a start checkpoint in the making.

    Raises:
        ConfigError: an unknown regime, or `scratch` with a model that has weights.
    """
    found = get_regime(regime)
    values = {"train": {}, "lrmoe": {}, **{table: dict(fields) for table, fields in found.tables.items()}}
    values["train"] |= {"seed": seed, "trace": False, "device": "cpu"}
    values["lrmoe"] |= {"seed": seed}
    run = base.replace(**values)
    if not found.continues:
        if run.model.checkpoint is not None:
            raise ConfigError(
                f"model.checkpoint={run.model.checkpoint!r}: the regime {regime!r} starts from new weights; valid: a "
                "preset or a configuration"
            )
        return run
    return dataclasses.replace(run, model=start_model(base, cache, progress))


def start_model(base: TrainConfig, cache: Path = CACHE, progress: Progress | None = None) -> ModelConfig:
    """Where the regimes that continue start: the base's checkpoint, or its model trained once and cached.

    Args:
        base: its model, text, dtype and auxiliary loss decide which checkpoint.
        cache: folder; several processes may ask at once, one of them trains.
        progress: told of the steps.
    """
    if base.model.checkpoint is not None:
        return base.model
    config = _start_config(base)
    folder = cache / _key(config)
    if not folder.is_dir():
        with locked(cache / f".{folder.name}.lock"):
            if not folder.is_dir():  # nobody else made it meanwhile
                _make(config, folder, progress or _logged)
    return ModelConfig(checkpoint=str(folder))


def start_is_made(base: TrainConfig, cache: Path = CACHE) -> bool:
    """Whether `start_model` would train nothing."""
    return base.model.checkpoint is not None or (cache / _key(_start_config(base))).is_dir()


def _start_config(base: TrainConfig) -> TrainConfig:
    return base.replace(
        data=_START["data"],
        optim=_START["optim"],
        train={**_START["train"], "seed": 0, "trace": False, "device": "cpu"},
        lrmoe={"policy": "lrmoe", "max_drop": 0.0, "storage": "owned"},
    )


def _key(config: TrainConfig) -> str:
    """Names what decides the weights; versions are part of it, since the default text is Python's."""
    tables = config.to_dict()
    train = {
        name: tables["train"][name] for name in ("dtype", "router_aux_loss", "steps", "seed", "batch_size")
    }
    made_of = {
        "version": _VERSION,
        **{name: tables[name] for name in ("model", "data", "optim")},
        "train": train,
        "text": corpus_of(config).fingerprint,
        "versions": {name: v for name, v in environment()["versions"].items() if name != "lrmoe"},
    }
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
    return f"{config.model.preset or 'model'}-{digest}"


def corpus_of(config: TrainConfig) -> Corpus:
    """The run's text; the one that was asked for last stays in memory."""
    return _corpus(config.data)


@functools.lru_cache(maxsize=2)
def _corpus(data: Any) -> Corpus:
    from lrmoe.training.data import Corpus

    return Corpus.load(data)


def _make(config: TrainConfig, folder: Path, progress: Progress) -> None:
    """Train and save; the folder appears under its name by one rename, when it is whole."""
    import torch

    from lrmoe.training.loop import Trainer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums depend on it
    for left in folder.parent.glob(f".partial-{folder.name}-*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".partial-{folder.name}-", dir=folder.parent))
    try:
        trainer = Trainer(config, corpus=corpus_of(config))
        for step in range(1, config.train.steps + 1):
            trainer.step()
            progress(step, config.train.steps)
        trainer.handle.disable()
        with _without_bars():
            trainer.model.save_pretrained(partial)
        os.replace(partial, folder)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Transformers draws a bar while it writes, which would cross other displays."""
    from transformers.utils import logging as hf

    drawn = hf.is_progress_bar_enabled()
    hf.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            hf.enable_progress_bar()


def _logged(step: int, steps: int) -> None:
    if step % _LOG_STEPS == 0:
        log.info("start checkpoint: step %d of %d", step, steps)
