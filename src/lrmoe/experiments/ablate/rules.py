"""What an ablation compares: rules for the kept set, in regimes, over seeds. Imports no torch.

Rule      score, estimator, drop, quotas, router gradient, where the set is fixed
Part      rules x seeds in one regime, each beside the same run with nothing dropped
Ablation  parts of one model
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lrmoe.config import FORWARD_SCORES, LRMoEConfig
from lrmoe.errors import ConfigError, did_you_mean
from lrmoe.experiments.trajectories.regimes import CACHE, get_regime
from lrmoe.experiments.trajectories.virtual import QUOTA_RULES
from lrmoe.training.config import LoopConfig


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How backward chooses what it keeps. Equal rules are written equally: what changes nothing is set to its default.

    Attributes:
        score, estimator, router_grad, select_in: as in LRMoEConfig. drop: its max_drop.
        quota_rule: "variance" (one sampling constant, from past scores) or "count" (equal shares; always for topk).

    Raises:
        ConfigError: fields that contradict each other.
    """

    score: str = "lrm"
    estimator: str = "sampled"
    drop: float = 0.3
    quota_rule: str = "variance"
    router_grad: str = "auto"
    select_in: str = "backward"

    def __post_init__(self) -> None:
        if self.quota_rule not in QUOTA_RULES:
            raise ConfigError(f"quota_rule={self.quota_rule!r}: must be one of {', '.join(QUOTA_RULES)}")
        config = LRMoEConfig(**self.changes)
        if not 0 < config.max_drop < 1:
            raise ConfigError(
                f"drop={self.drop}: must lie between 0 and 1; nothing dropped always runs beside it"
            )
        object.__setattr__(self, "drop", config.max_drop)
        if self.estimator == "topk":
            object.__setattr__(self, "quota_rule", "count")
        if self.router_grad == ("full" if self.estimator == "topk" else "retained"):
            object.__setattr__(self, "router_grad", "auto")

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of LRMoEConfig."""
        return {
            "score": self.score,
            "estimator": self.estimator,
            "max_drop": self.drop,
            "router_grad": self.router_grad,
            "select_in": self.select_in,
        }

    @property
    def marks(self) -> tuple[str, ...]:
        """What differs from the estimator's usual form."""
        found = []
        if self.select_in == "forward":
            found.append("forward")
        if self.quota_rule == "count" and self.estimator == "sampled":
            found.append("count")
        if self.router_grad != "auto":
            found.append(f"router_{self.router_grad}")
        return tuple(found)

    @property
    def variant(self) -> str:
        """Estimator and marks, as names of figures and folders have them."""
        return "-".join((self.estimator, *self.marks))

    @property
    def name(self) -> str:
        """Of figures and folders: <score>.<variant>.drop<d>."""
        return f"{self.score}.{self.variant}.drop{self.drop:g}"

    @property
    def label(self) -> str:
        """The rule without its drop, for people."""
        words = {"forward": "fixed in forward", "count": "quotas by count", "router_full": "full router gradient",
                 "router_retained": "router gradient of kept pairs"}  # fmt: skip
        return ", ".join((f"{self.estimator} {self.score}", *(words[mark] for mark in self.marks)))


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rules in one regime, over seeds.

    Raises:
        ConfigError: an unknown regime, a seed twice, or no seed or rule.
    """

    regime: str
    seeds: tuple[int, ...]
    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        get_regime(self.regime)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ConfigError(f"seeds={list(self.seeds)!r}: must be integers from 0, each once, at least one")
        if not self.rules:
            raise ConfigError(f"regime={self.regime!r}: no rule to run")


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Everything that `lrmoe ablate` runs.

    Attributes:
        parts: in their order; a regime may come twice. model: a preset, a directory or a Hub name.
        aux: coefficient of the load-balancing loss. steps: instead of the regimes'.
        folder: of the run. cache: of start checkpoints.

    Raises:
        ConfigError: `aux` or `steps` is out of range.
    """

    parts: tuple[Part, ...]
    model: str = "qwen3-moe-micro"
    aux: float = 0.0
    steps: int | None = None
    folder: Path = Path("runs") / "ablate"
    cache: Path = CACHE

    def __post_init__(self) -> None:
        steps = 1 if self.steps is None else self.steps
        LoopConfig(steps=steps, router_aux_loss=self.aux)  # which checks both

    def cells(self) -> Iterator[Cell]:
        """All runs, each once: with nothing dropped first, then seed by seed, so that rules fill up evenly."""
        seen: set[tuple[str, int, Rule | None]] = set()
        for part in self.parts:
            for seed in part.seeds:
                for rule in (None, *part.rules):
                    if (part.regime, seed, rule) not in seen:
                        seen.add((part.regime, seed, rule))
                        yield Cell(regime=part.regime, seed=seed, rule=rule)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of an ablation: a rule, or None for nothing dropped, with one seed in one regime.

    A comparison has cells of its own (compare/cells.py), each several systems beside each other.
    """

    regime: str
    seed: int
    rule: Rule | None

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.regime}-{'exact' if self.rule is None else self.rule.name}-seed{self.seed}"


def rules_of(
    *,
    scores: Sequence[str],
    estimators: Sequence[str],
    drops: Sequence[float],
    quota_rules: Sequence[str],
    router_grads: Sequence[str],
    select_ins: Sequence[str],
) -> tuple[Rule, ...]:
    """All combinations that make sense; forward leaves out scores that need a gradient where others remain.

    Raises:
        ConfigError: a value that no rule can have, or no combination that makes sense.
    """
    found: dict[Rule, None] = {}
    others = any(score in FORWARD_SCORES for score in scores)
    for values in product(select_ins, estimators, quota_rules, router_grads, scores, drops):
        select_in, estimator, quota_rule, router_grad, score, drop = values
        rule = Rule(
            score=score, estimator=estimator, drop=drop, quota_rule=quota_rule, router_grad=router_grad
        )
        if select_in != "forward" or score in FORWARD_SCORES or not others:
            found[dataclasses.replace(rule, select_in=select_in)] = None
    return tuple(found)


def _topk(scores: Iterable[str], drop: float) -> Iterator[Rule]:
    yield from (Rule(estimator="topk", score=score, drop=drop) for score in scores)


_PUBLISHED_SCORES = ("lrm", "grad_norm", "abs_grad", "alpha_grad", "alpha", "random")
_SAMPLED = (Rule(drop=0.3), Rule(drop=0.5))
_TOPK30 = Rule(estimator="topk", drop=0.3)
_FORWARD = Rule(score="alpha_phi", select_in="forward", drop=0.3)
_ROUTER_FULL = tuple(dataclasses.replace(rule, router_grad="full") for rule in _SAMPLED)
_FORWARD_TOPK = tuple(
    dataclasses.replace(rule, select_in="forward", router_grad=grad)
    for rule in _topk(("alpha", "alpha_phi"), 0.3)
    for grad in ("full", "retained")
)
_MEMORISE = Part(
    regime="memorise",
    seeds=tuple(range(8)),
    rules=(
        *_topk(_PUBLISHED_SCORES, 0.3),
        *_topk(("lrm",), 0.2),
        *_SAMPLED,
        _FORWARD,
        Rule(score="alpha", select_in="forward", drop=0.3),
    ),
)

PRESETS: Mapping[str, tuple[Part, ...]] = MappingProxyType(
    {
        "published": (_MEMORISE,),
        "full": (
            _MEMORISE,
            Part(
                regime="continued",
                seeds=tuple(range(6)),
                rules=(*_SAMPLED, *_ROUTER_FULL, _FORWARD, _TOPK30, *_FORWARD_TOPK),
            ),
            Part(regime="scratch", seeds=tuple(range(8)), rules=(*_SAMPLED, _TOPK30)),
        ),
    }
)


def get_preset(name: str) -> tuple[Part, ...]:
    """The parts of a preset.

    Raises:
        ConfigError: no such preset; names the nearest and all valid ones.
    """
    if name in PRESETS:
        return PRESETS[name]
    hint = did_you_mean(name, PRESETS)
    raise ConfigError(f"preset={name!r}: no such ablation{hint}; valid: {', '.join(PRESETS)}")


def with_seeds(parts: Sequence[Part], seeds: tuple[int, ...] | None) -> tuple[Part, ...]:
    """The parts, with these seeds instead of their own where they are given."""
    return tuple(parts) if seeds is None else tuple(dataclasses.replace(part, seeds=seeds) for part in parts)
