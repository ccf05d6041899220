"""What a resumed run is made of: its own configuration, and on top of it what the user gives now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrmoe.checkpoint import Manifest, find_steps, folder_of
from lrmoe.errors import CheckpointError, ConfigError
from lrmoe.training.config import LoopConfig, TrainConfig
from lrmoe.training.folder import CONFIG, MODEL, SUMMARY
from lrmoe.training.toml_files import read_tables, read_toml

SOURCES = ("preset", "config", "checkpoint")  # of a model


def resumed_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration that a run goes on with: config.toml of its folder, a file's keys over it, then overrides.

    Raises:
        ConfigError: there is no such run, a value is bad, or the model would be another than the checkpoints'.
    """
    given = read_tables(path, overrides)
    loop = _loop(given)
    stored = _stored(Path(loop.runs) / loop.name, loop)
    below = stored.to_dict()
    if any(name in given.get("model", ()) for name in SOURCES):  # a new source replaces the old one
        below["model"] = {key: value for key, value in below["model"].items() if key not in SOURCES}
    values = _merged(below, given)
    values["train"] |= {"name": loop.name, "runs": loop.runs}  # the folder may have been moved
    config = TrainConfig.from_dict(values)
    refuse_changes(stored.to_dict()["model"], config.to_dict()["model"], "model")
    return config


def resume_or_start(path: str | Path | None = None, overrides: Sequence[str] = ()) -> tuple[bool, bool]:
    """What a command that may be run again and again has to do: (resume, overwrite).

    It resumes where the run's folder holds a checkpoint, usable or not. Otherwise it starts, and overwrites what an
    unfinished try left, but not what a finished run did.

    Raises:
        ConfigError: there is no checkpoint and none would be made, so that no restart could ever go on.
    """
    given = read_tables(path, overrides)
    loop = _loop(given)
    folder = Path(loop.runs) / loop.name
    if find_steps(folder / "checkpoints"):
        return True, False
    if not TrainConfig.from_dict(given).train.checkpoint_every:
        raise ConfigError(
            "train.checkpoint_every=0 with --auto-resume: a restart would begin anew; valid: 1 or more"
        )
    return False, not (folder / SUMMARY).exists()


def refuse_changes(saved: Mapping[str, Any], given: Mapping[str, Any], table: str) -> None:
    """Refuse two versions of a table that differ.

    Raises:
        ConfigError: names the first key that differs, and both values.
    """
    for key in dict.fromkeys([*saved, *given]):
        old, new = saved.get(key), given.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            refuse_changes(old, new, f"{table}.{key}")
        elif old != new:
            raise ConfigError(
                f"{table}.{key}={_shown(new)}: the run to go on with has {_shown(old)}, and its checkpoints fit "
                "nothing else; leave it out, or start another run with another --name"
            )


def ranks_saved(config: TrainConfig) -> int | None:
    """Ranks that wrote the newest checkpoint of a run on local CPU processes; None where that cannot be said."""
    root = config.folder / "checkpoints"
    if config.train.device != "cpu":
        return None  # torchrun starts the ranks of a run on CUDA
    for step in reversed(find_steps(root)):
        try:
            return Manifest.read(folder_of(root, step)).world_size
        except CheckpointError:
            continue  # loading will warn of it
    return None


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value)


def _loop(given: Mapping[str, Any]) -> LoopConfig:
    """Where the run lies, from what is given alone."""
    table = given.get("train", {})
    return LoopConfig(**{key: table[key] for key in ("name", "runs") if key in table})


def _stored(folder: Path, loop: LoopConfig) -> TrainConfig:
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"--resume: no run {folder} to go on with ({path} does not exist); --name says which, train.runs="
            f"{loop.runs!r} where"
        )
    values = read_toml(path)
    if "compare" in values:
        raise ConfigError(f"--resume: {folder} holds a comparison, which keeps no checkpoints to go on from")
    return TrainConfig.from_dict(_here(values, folder))


def _here(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths of an imported run's own model and tokenizer, where the folder is now."""
    model, data = (dict(values.get(name, {})) for name in ("model", "data"))
    own, then = folder / MODEL, model.get("config")
    if then is None or not own.is_dir():
        return values
    tokenizer = Path(data.get("tokenizer", ""))
    if tokenizer.parent == Path(then):
        data["tokenizer"] = str(own / tokenizer.name)
    return {**values, "model": {**model, "config": str(own)}, "data": data}


def _merged(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `given` over those of `stored`, tables within tables too."""
    merged = dict(stored)
    for key, value in given.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(below, value) if both else value  # type: ignore[arg-type]  # `both` says they are mappings
    return merged
