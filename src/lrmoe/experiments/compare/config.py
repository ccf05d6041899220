"""The configuration of a comparison: table [compare] beside the tables of a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError, did_you_mean
from lrmoe.experiments.lists import is_number, non_negative_numbers, positive_numbers, seeds, words
from lrmoe.experiments.systems.registry import System, expand, get_systems
from lrmoe.experiments.trajectories.regimes import REGIMES, get_regime
from lrmoe.report.data import BASELINE
from lrmoe.training.config import TABLES, ModelConfig, TrainConfig

# what every system states itself: another value in the common configuration would be ignored
_OF_SYSTEMS = ("policy", "storage")


def _option(default: Any, valid: str, doc: str) -> Any:
    return field(default=default, metadata={"valid": valid, "doc": doc})


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Table [compare]: what `lrmoe compare` compares, and where it ends; its files hold this table too.

    Raises:
        ConfigError: a field is of the wrong type or out of range.
    """

    systems: tuple[str, ...] = _option(
        ("megatron", "lrmoe"),
        "names",
        'Systems, or "all": those that prune backward are trained, those with exact gradients share one training run.',
    )
    target_loss: float | None = _option(
        None,
        "number > 0",
        "Training loss at which the smoothed loss of a system has arrived; unset: all do `max_steps` steps.",
    )
    targets: tuple[float, ...] = _option(
        (),
        "numbers > 0",
        "Several losses, instead of `target_loss`: systems run to the lowest, and are timed to each.",
    )
    seeds: tuple[int, ...] = _option((), "integers >= 0", "A comparison for each, instead of `train.seed`.")
    models: tuple[str, ...] = _option(
        (),
        "names",
        "A comparison for each, instead of the table [model]: presets, Hub names, or directories. `model.overrides` "
        "are kept.",
    )
    aux: tuple[float, ...] = _option(
        (), "numbers >= 0", "A comparison for each, instead of `train.router_aux_loss`."
    )
    regime: str | None = _option(
        None,
        ", ".join(f"`{name}`" for name in REGIMES),
        "Where training starts and on which text, with its own batch, learning rate and, for memorise, target; unset: "
        "as the other tables say.",
    )
    against: str | None = _option(
        None, "name", f"System that ratios are taken to; unset: {BASELINE}, where it is compared."
    )
    max_steps: int = _option(
        400,
        "integer >= 1",
        "Steps; with a target, where a system that has not arrived is stopped. Also the default of train.steps.",
    )
    ep: int = _option(2, "integer >= 2", "Processes; the experts are spread over all of them.")
    smoothing_steps: int = _option(
        10, "integer >= 1", "The smoothed loss is the mean of this many last steps."
    )
    link_skip_steps: int = _option(
        3, "integer >= 0", "Steps of fixed ownership that the link speed is not taken from."
    )
    link_steps: int = _option(5, "integer >= 1", "Steps after them that it is taken from.")
    link_bytes_per_s: float | None = _option(
        None, "number > 0", "A stated link speed; unset: taken by the rule in summary.json."
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "systems", words("systems", self.systems))
        get_systems(self.systems)
        object.__setattr__(self, "systems", expand(self.systems))
        for name, check in _LISTS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        for name, least in _INTEGERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"compare.{name}={value!r}: must be an integer >= {least}")
        if self.target_loss is not None:
            _check_positive("target_loss", self.target_loss)
        if self.link_bytes_per_s is not None:
            _check_positive("link_bytes_per_s", self.link_bytes_per_s)
        self._check_words()

    def _check_words(self) -> None:
        if self.target_loss is not None and self.targets:
            raise ConfigError("compare.target_loss and compare.targets given; valid: one of them")
        if self.regime is not None:
            get_regime(str(self.regime))
        if self.against is not None and self.against not in self.systems:
            raise ConfigError(
                f"compare.against={self.against!r}: must be one of the systems: {', '.join(self.systems)}"
            )

    @property
    def aims(self) -> tuple[float, ...]:
        """The target losses, highest first; empty where steps end the comparison."""
        given = self.targets or (() if self.target_loss is None else (self.target_loss,))
        return tuple(sorted(given, reverse=True))

    @property
    def base(self) -> str | None:
        """The system that ratios are taken to, or None where there is none."""
        return self.against or (BASELINE if BASELINE in self.systems else None)


_LISTS: Mapping[str, Callable[[str, Any], tuple[Any, ...]]] = {
    "targets": positive_numbers,
    "seeds": seeds,
    "models": words,
    "aux": non_negative_numbers,
}
_INTEGERS = {"max_steps": 1, "ep": 2, "smoothing_steps": 1, "link_skip_steps": 0, "link_steps": 1}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A whole comparison.

    Attributes:
        preset: the preset that it started from.
        compare: what is compared.
        train: the run that each system does; `lrmoe` is the base of every system's configuration.
        start: the model that training starts from, instead of `train.model`: that of a regime.
    """

    preset: str
    compare: CompareConfig = field(default_factory=CompareConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    start: ModelConfig | None = None

    @property
    def systems(self) -> list[System]:
        """The systems, in order."""
        return get_systems(self.compare.systems)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.train.folder

    @property
    def executed(self) -> list[System]:
        """Systems with exact gradients that run the calls of one shared trajectory, which fixed ownership trains."""
        return [s for s in self.systems if s.name != BASELINE and s.exact(self.train.lrmoe)]

    def train_config(self, system: System) -> TrainConfig:
        """What one system trains with, or runs the shared trajectory's calls with."""
        model = self.start or self.train.model
        return dataclasses.replace(self.train, model=model, lrmoe=system.config(self.train.lrmoe))

    @classmethod
    def from_dict(cls, preset: str, values: Mapping[str, Any]) -> Experiment:
        """Build from nested tables: [compare] and those of a training run.

        Raises:
            ConfigError: an unknown table or key, a bad value, or a system that cannot run with the rest.
        """
        tables = dict(values)
        _refuse_unknown_tables(tables)
        given = tables.pop("compare", {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"compare={given!r}: must be a table")
        _refuse_unknown(given)
        compare = CompareConfig(**given)
        own = {"steps": compare.max_steps, **tables.get("train", {})}
        if own.setdefault("device", "cpu") != "cpu":
            raise ConfigError(
                f"train.device={own['device']!r}: a comparison starts local CPU processes; valid: 'cpu'"
            )
        _refuse_ignored(tables.get("lrmoe", {}))
        train = TrainConfig.from_dict({**tables, "train": own})
        experiment = cls(preset=preset, compare=compare, train=train)
        for system in experiment.systems:
            experiment.train_config(system)
        return experiment

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain tables; fields that are None are left out, as TOML has no null, and so are empty lists."""
        compare = {k: v for k, v in dataclasses.asdict(self.compare).items() if v is not None and v != ()}
        lists = {name: list(value) for name, value in compare.items() if isinstance(value, tuple)}
        return {"compare": {**compare, **lists}, **self.train.to_dict()}

    def write(self, path: Path) -> None:
        """Write the resolved configuration as TOML."""
        import tomlkit

        document = tomlkit.document()
        document.add(
            tomlkit.comment("The resolved configuration of this comparison; lrmoe compare --config reads it.")
        )
        for name, values in self.to_dict().items():
            document.add(name, tomlkit.item(values))
        path.write_text(tomlkit.dumps(document), encoding="utf-8")


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    valid = [item.name for item in dataclasses.fields(CompareConfig)]
    for name in given:
        if name not in valid:
            hint = did_you_mean(str(name), valid)
            raise ConfigError(f"compare.{name}: no such key{hint}; valid in [compare]: {', '.join(valid)}")


def _refuse_unknown_tables(tables: Mapping[str, Any]) -> None:
    valid = ("compare", *TABLES)
    for name in tables:
        if name not in valid:
            hint = did_you_mean(str(name), valid)
            raise ConfigError(f"{name}: no such table{hint}; valid: {', '.join(valid)}")


def _refuse_ignored(lrmoe: Any) -> None:
    """Fields that every system sets itself stand in resolved files, with their defaults."""
    if not isinstance(lrmoe, Mapping):
        return
    for name in _OF_SYSTEMS:
        default = getattr(LRMoEConfig(), name)
        if lrmoe.get(name, default) != default:
            raise ConfigError(
                f"lrmoe.{name}={lrmoe[name]!r}: every system of a comparison has its own; valid: the systems "
                "that --systems names"
            )


def _check_positive(name: str, value: Any) -> None:
    if not is_number(value) or value <= 0:
        raise ConfigError(f"compare.{name}={value!r}: must be a positive finite number")
