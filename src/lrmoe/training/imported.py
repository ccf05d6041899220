"""A run that begins from a folder in the Transformers layout: what `lrmoe import` makes.

RUN/
    config.toml                 a run's configuration, for `lrmoe train --resume`
    model/                      config.json, and the tokenizer where the folder has one
    checkpoints/step-00000000/  the weights, bit for bit, and the state of a trainer that has done nothing yet
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lrmoe.checkpoint.hf.export import replacing
from lrmoe.checkpoint.hf.importing import dtype_name, import_checkpoint, read_config
from lrmoe.checkpoint.hf.tokenizer import TOKENIZER, copy_tokenizer
from lrmoe.errors import ConfigError
from lrmoe.training.config import TrainConfig
from lrmoe.training.data import Corpus
from lrmoe.training.folder import CONFIG, MODEL
from lrmoe.training.loop import Trainer
from lrmoe.training.model import meta_model
from lrmoe.training.state import trainer_state
from lrmoe.training.toml_files import read_tables


def import_run(
    folder: Path,
    run: Path,
    *,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    layout: str | None = None,
) -> Path:
    """Make a run whose checkpoint of step 0 holds the weights of a Transformers folder; returns the checkpoint.

    Args:
        folder: local, with config.json and safetensors files.
        run: folder of the run to make; must not exist.
        config: TOML file with the run's tables, without [model]. overrides: `table.key=value`.
        layout: of the folder, see `import_checkpoint`.

    Raises:
        ConfigError: `run` exists, [model] is given, or a value is not valid.
        CheckpointError: weights are missing, damaged, or do not fit.
        UnsupportedError: a model that is not read or not trained.
    """
    if run.exists():
        raise ConfigError(f"{run}: exists; name another run, or remove it")
    tables = read_tables(config, overrides)
    if tables.get("model"):
        raise ConfigError(
            f"model.{next(iter(tables['model']))}: the model is that of {folder}; leave [model] out"
        )
    found = read_config(folder)
    settings = _settings(tables, folder, run, found)
    state = trainer_state(_idle_trainer(settings, folder, found))
    with replacing(run) as partial:
        (partial / MODEL).mkdir()
        found.save_pretrained(partial / MODEL)
        if (folder / TOKENIZER).is_file():
            copy_tokenizer(folder / TOKENIZER, partial / MODEL)
        settings.write(partial / CONFIG)
        made = import_checkpoint(folder, partial / "checkpoints", layout=layout, state=state)
    return run / made.relative_to(partial)


def _settings(tables: dict[str, Any], folder: Path, run: Path, found: Any) -> TrainConfig:
    """The run's configuration: its place, the model's, and what the folder says where nothing else is given."""
    train = {**tables.get("train", {}), "runs": str(run.parent), "name": run.name}
    if dtype_name(found) == "bfloat16":
        train.setdefault("dtype", "bfloat16")
    data = dict(tables.get("data", {}))
    if (folder / TOKENIZER).is_file():
        data.setdefault("tokenizer", str(run / MODEL / TOKENIZER))
    model = {"config": str(run / MODEL)}
    return TrainConfig.from_dict({**tables, "model": model, "data": data, "train": train})


def _idle_trainer(settings: TrainConfig, folder: Path, found: Any) -> Trainer:
    """A trainer before its first step that has everything but weights."""
    data = settings.data
    if (folder / TOKENIZER).is_file() and data.tokenizer == str(settings.folder / MODEL / TOKENIZER):
        data = dataclasses.replace(data, tokenizer=str(folder / TOKENIZER))  # it is copied when all is well
    corpus = Corpus.load(data)
    model = meta_model(copy.deepcopy(found), None, settings.lrmoe.storage)
    return Trainer(settings, model=model, corpus=corpus, device=torch.device("cpu"))
