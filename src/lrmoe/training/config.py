"""Configuration of a training run: five TOML tables, each a frozen dataclass validated when it is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError, did_you_mean
from lrmoe.training.options import NUMBER, Table, described, option
from lrmoe.training.presets import DEFAULT_PRESET, get_preset
from lrmoe.training.toml_files import read_tables


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Table):
    """Table [model]: where the model comes from. One of preset, config, checkpoint; without any, the tiny Qwen3-MoE."""

    TABLE = "model"
    preset: str | None = option(None, "A shape that ships with the package, with new weights.", kind=str)
    config: str | None = option(
        None,
        "Transformers configuration, with new weights: a Hub name or a directory with config.json.",
        kind=str,
    )
    checkpoint: str | None = option(
        None,
        "Weights to start from: a local directory with config.json and safetensors files, or a run or checkpoint of "
        "`lrmoe train`.",
        kind=str,
    )
    overrides: dict[str, Any] = field(
        default_factory=dict,
        metadata=described("Fields of the transformers configuration to change.", kind=dict),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("preset", "config", "checkpoint") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"model: {' and '.join(given)} given; valid: one of preset, config, checkpoint")
        if not given:
            object.__setattr__(self, "preset", DEFAULT_PRESET)
        if self.preset is not None:
            get_preset(self.preset)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Table):
    """Table [data]: the corpus."""

    TABLE = "data"
    path: str | None = option(
        None,
        "Text file, or directory: every file below it that is neither binary (a NUL among its first bytes) nor hidden, "
        "whatever its name, is text. Unset: the source text of the running Python's standard library.",
        kind=str,
    )
    tokenizer: str | None = option(
        None, "JSON file of the `tokenizers` library; unset: one token per byte.", kind=str
    )
    seq_len: int = option(256, "Tokens per sequence.", kind=int, least=2)
    limit: int | None = option(
        None, "Tokens of the text that are read, from its start; unset: all. A small text is learned by heart.",
        kind=int, least=2,
    )  # fmt: skip
    held_out: float = option(
        0.01, "Share of the corpus, at its end, that is kept for evaluation.", kind=NUMBER, least=0, below=1
    )


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Table):
    """Table [optim]: AdamW, linear warm-up, cosine decay."""

    TABLE = "optim"
    lr: float = option(1e-3, "Peak learning rate.", kind=NUMBER, least=0, below=1e6)
    beta1: float = option(0.9, "Decay of the gradient's average.", kind=NUMBER, least=0, below=1)
    beta2: float = option(0.95, "Decay of the squared gradient's average.", kind=NUMBER, least=0, below=1)
    eps: float = option(1e-8, "Added to the root of the squared gradient.", kind=NUMBER, least=0, below=1)
    weight_decay: float = option(
        0.1, "Decoupled weight decay of matrices; vectors have none.", kind=NUMBER, least=0, below=1e6
    )
    warmup_steps: int = option(20, "Steps of linear warm-up.", kind=int, least=0)
    min_lr_ratio: float = option(
        0.1, "Learning rate at the end, over the peak.", kind=NUMBER, least=0, below=1.000001
    )
    clip_norm: float = option(
        1.0, "Limit on the norm of the whole gradient, all ranks' experts included; 0 is none.", kind=NUMBER, least=0,
        below=1e12,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Table):
    """Table [train]: the loop."""

    TABLE = "train"
    name: str = option("train", "The run's folder is <runs>/<name>.", kind=str)
    runs: str = option("runs", "Folder that holds the runs.", kind=str)
    steps: int = option(200, "Optimizer steps.", kind=int, least=1)
    seed: int = option(0, "Seed of weights, data order and dropout.", kind=int, least=0, below=2**63)
    batch_size: int = option(8, "Sequences per rank and micro-batch.", kind=int, least=1)
    accumulate: int = option(1, "Micro-batches per step.", kind=int, least=1)
    skip_positions: int = option(
        0,
        "Predictions at the start of each sequence that the loss leaves out, where too little text has been seen to "
        "know how it goes on.",
        kind=int,
        least=0,
    )
    dtype: str = option(
        "float32", "Of weights and activations; bfloat16 keeps float32 masters in the optimizer.", kind=str,
        choices=("float32", "bfloat16"),
    )  # fmt: skip
    device: str = option("auto", "Where to train.", kind=str, choices=("auto", "cpu", "cuda"))
    timeout_s: float = option(
        600.0,
        "Seconds that ranks wait for each other before the run ends with an error.",
        kind=NUMBER,
        least=1,
        below=1e6,
    )
    activation_checkpointing: str = option(
        "none",
        "Recompute decoder layers in backward.",
        kind=str,
        choices=("none", "reentrant", "non_reentrant"),
    )
    router_aux_loss: float = option(
        0.0,
        "Coefficient of the load-balancing loss, which no reported loss contains; 0 is none.",
        kind=NUMBER,
        least=0,
        below=1e6,
    )
    checkpoint_every: int = option(
        0, "Steps between checkpoints; 0: none, not even at the end.", kind=int, least=0
    )
    checkpoint_async: bool = option(
        False,
        "Copy a checkpoint to host memory and let a thread write it while training goes on; it counts from the first "
        "step after all ranks have written theirs.",
        kind=bool,
    )
    keep_last: int = option(2, "Checkpoints to keep.", kind=int, least=1)
    eval_every: int = option(0, "Steps between evaluations on held-out text; 0 is never.", kind=int, least=0)
    eval_batches: int = option(4, "Batches per rank in one evaluation.", kind=int, least=1)
    log_every: int = option(
        10, "Steps between histograms, and between log lines where there is no terminal.", kind=int, least=1
    )
    wandb: str | None = option(
        None,
        "Project at Weights & Biases that shows the run; WANDB_MODE=offline keeps it in the folder.",
        kind=str,
    )
    trace: bool | None = option(
        None,
        "Write trace.parquet, the counts of every layer call; unset: where pyarrow is installed.",
        kind=bool,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name or Path(self.name).name != self.name:
            raise ConfigError(f"train.name={self.name!r}: must be a folder's name, without separators")
        if self.router_aux_loss and self.activation_checkpointing == "reentrant":
            raise ConfigError(
                "train.router_aux_loss with train.activation_checkpointing='reentrant': the router's logits would "
                "carry no gradient; valid: 'none' or 'non_reentrant'"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run.

    Raises:
        ConfigError: a field is of the wrong type, out of range, or contradicts another; the message names it.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    lrmoe: LRMoEConfig = field(default_factory=LRMoEConfig)

    def __post_init__(self) -> None:
        if self.train.eval_every and not self.data.held_out:
            raise ConfigError(f"train.eval_every={self.train.eval_every}: needs data.held_out > 0")
        if self.train.skip_positions >= self.data.seq_len:
            raise ConfigError(
                f"train.skip_positions={self.train.skip_positions}: must be below data.seq_len={self.data.seq_len}"
            )

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.train.runs) / self.train.name

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build from nested tables; with `lrmoe.cooldown_steps`, `lrmoe.total_steps` is `train.steps` unless given.

        Raises:
            ConfigError: an unknown table or key (names the nearest valid one), or a bad value.
        """
        _refuse_unknown(values)
        tables: dict[str, Any] = {}
        for name, kind in TABLES.items():
            given = dict(values.get(name, {}))
            if kind is LRMoEConfig and given.get("cooldown_steps"):
                given.setdefault("total_steps", tables["train"].steps)
            try:
                tables[name] = kind(**given)
            except ConfigError as error:
                text = str(error)
                raise ConfigError(text if text.startswith(name) else f"{name}.{text}") from None
        return cls(**tables)

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
        """Read a TOML file and apply `table.key=value` overrides, later ones last.

        Raises:
            ConfigError: the file cannot be read or parsed, or its content is not valid.
        """
        return cls.from_dict(read_tables(path, overrides))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain tables; fields that are None are left out, as TOML has no null."""
        tables = {name: dataclasses.asdict(getattr(self, name)) for name in TABLES}
        if self.lrmoe.cooldown_steps and self.lrmoe.total_steps == self.train.steps:
            del tables["lrmoe"]["total_steps"]  # follows train.steps when that changes
        return {n: {k: v for k, v in t.items() if v is not None} for n, t in tables.items()}

    def replace(self, **tables: Mapping[str, Any]) -> TrainConfig:
        """A copy with some keys changed: `config.replace(train={"steps": 5}, lrmoe={"max_drop": 0.2})`."""
        values = self.to_dict()
        for name, changes in tables.items():
            values[name] = {**values.get(name, {}), **changes}
        return TrainConfig.from_dict(values)

    def write(self, path: Path) -> None:
        """Write the resolved configuration as commented TOML."""
        import tomlkit

        document = tomlkit.document()
        document.add(
            tomlkit.comment("The resolved configuration of this run; lrmoe train --config reads it back.")
        )
        for name, values in self.to_dict().items():
            table = tomlkit.table()
            for key, value in values.items():
                table.add(key, value)
            document.add(name, table)
        path.write_text(tomlkit.dumps(document), encoding="utf-8")


TABLES: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "train": LoopConfig,
    "lrmoe": LRMoEConfig,
}


def _keys() -> Iterator[str]:
    for name, kind in TABLES.items():
        for item in dataclasses.fields(kind):
            yield f"{name}.{item.name}"


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    valid = list(_keys())
    for name, table in values.items():
        if name not in TABLES:
            raise ConfigError(
                f"{name}: no such table{did_you_mean(name, list(TABLES))}; valid: {', '.join(TABLES)}"
            )
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name}={table!r}: must be a table")
        for key in table:
            if f"{name}.{key}" not in valid:
                ours = ", ".join(item.name for item in dataclasses.fields(TABLES[name]))
                hint = did_you_mean(f"{name}.{key}", valid)
                raise ConfigError(f"{name}.{key}: no such key{hint}; valid in [{name}]: {ours}")
