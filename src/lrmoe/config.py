"""The configuration of LRMoE: one frozen dataclass, validated when it is built."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lrmoe.errors import ConfigError, did_you_mean
from lrmoe.sizes import check_size

POLICIES = (
    "megatron",
    "fastermoe",
    "flexmoe",
    "smartmoe",
    "symi",
    "laer",
    "ultraep",
    "topoep",
    "eplb",
    "llep",
    "lrmoe",
)
SCORES = ("lrm", "grad_norm", "alpha_grad", "abs_grad", "alpha", "alpha_phi", "random")
FORWARD_SCORES = ("alpha", "alpha_phi", "random")
PHI_SCORES = ("lrm", "alpha_phi")

CHOICES: dict[str, tuple[Any, ...]] = {
    "policy": POLICIES,
    "drop": ("always", "overload", "auto"),
    "estimator": ("sampled", "topk"),
    "score": SCORES,
    "selection": ("global", "local"),
    "select_in": ("backward", "forward"),
    "router_grad": ("auto", "full", "retained"),
    "storage": ("owned", "sharded"),
    "activations": ("auto", "stash", "recompute"),
    "lean_wire": ("auto", True, False),
}
_INTEGERS = {
    "replica_slots": 0,
    "min_keep": 0,
    "check_every": 0,
    "warmup_steps": 0,
    "cooldown_steps": 0,
    "seed": 0,
}


def _doc(text: str) -> dict[str, str]:
    return {"doc": text}


@dataclass(frozen=True, kw_only=True)
class LRMoEConfig:
    """What the backward pass leaves out, how it chooses, and when.

    Every field has the meaning fixed in the configuration reference. `max_drop=0` is exact.

    Raises:
        ConfigError: a field is out of range, of the wrong type, or contradicts another.
    """

    policy: str = field(default="lrmoe", metadata=_doc("Which system plans the layer call."))
    replica_slots: int = field(
        default=2,
        metadata=_doc(
            "Foreign expert copies a rank may hold during a call; their slots are shared by all layers, and weights "
            "are fetched again in backward. `lrmoe` fills them only where the seconds saved on the most loaded rank "
            "exceed those of the copies' traffic: by the datasheet on known GPUs, else on a link with which the "
            "exchange of a balanced call takes a third of its time."
        ),
    )
    max_drop: float = field(
        default=0.3,
        metadata=_doc(
            "Hard cap on the share of a call's (token, expert) pairs, summed over all ranks, that backward leaves "
            "out. 0 is exact."
        ),
    )
    drop: str = field(
        default="always",
        metadata=_doc(
            "`always`: leave out floor(max_drop * pairs), first where it lowers the most loaded rank. `overload`: the "
            "fewest that bring the most loaded rank to `peak_target`; on one rank none. `auto` (sampled only): as many "
            "as minimise the estimated time to loss, at most `max_drop`."
        ),
    )
    estimator: str = field(
        default="sampled",
        metadata=_doc(
            "`sampled`: keep pairs at random with probability pi growing with the score, re-weighted by 1/pi "
            "(unbiased). `topk`: keep the highest scores (the published rule, biased)."
        ),
    )
    score: str = field(
        default="lrm",
        metadata=_doc(
            "Root of a pair's contribution. `lrm` = alpha*norm(g)*norm(phi); `grad_norm` = norm(g); `alpha_grad` = "
            "alpha*norm(g); `abs_grad` = sum abs(g); `alpha`; `alpha_phi` = alpha*norm(phi); `random` = 1 (with topk: "
            "uniform numbers)."
        ),
    )
    selection: str = field(
        default="global",
        metadata=_doc(
            "`global`: the kept set is chosen over all ranks. `local`: each rank its share of the quota."
        ),
    )
    select_in: str = field(
        default="backward",
        metadata=_doc(
            "Where the kept set is fixed. `forward` only with `alpha`, `alpha_phi` and `random`, which need no "
            "gradient: left-out pairs keep no activations, and backward exchanges no scores."
        ),
    )
    router_grad: str = field(
        default="auto",
        metadata=_doc(
            "Gradient of the routing weights. `full`: of every pair (keeps expert outputs at the token's rank). "
            "`retained`: of kept pairs, re-weighted. `auto`: topk full, sampled retained."
        ),
    )
    max_added_variance: float | None = field(
        default=None,
        metadata=_doc(
            "Limit on the gradient variance that sampling adds, over the gradient's own (sampled only): kept to by the "
            "mean over 50 calls. The tighter of it and `max_drop` binds, so `always` becomes up to."
        ),
    )
    memory_budget: str | int | None = field(
        default=None,
        metadata=_doc(
            "Per rank for the whole model's MoE part: bytes, `60GiB` or `60%` of the device. Weights, gradients and "
            "waiting activations of all layers plus the largest call. What does not fit is refused before compute."
        ),
    )
    layer_budget: str | int | None = field(
        default=None,
        metadata=_doc(
            "Per rank for one MoE layer call, its weights included: bytes, `6GiB` or `6%` of the device. Kept to by "
            "copies, dropping with `overload`, recomputing and chunks, in this order."
        ),
    )
    min_keep: int = field(
        default=1, metadata=_doc("Least kept pairs of an expert that has any (sampled needs at least 1).")
    )
    peak_target: float = field(
        default=1.0, metadata=_doc("What `drop='overload'` aims at, in mean loads of the complete call.")
    )
    storage: str = field(
        default="owned",
        metadata=_doc(
            "Who holds an expert's weights and optimizer state: its home rank (`owned`), or every rank an equal part "
            "of all experts (`sharded`, in the reference trainer)."
        ),
    )
    check_every: int = field(
        default=0,
        metadata=_doc(
            "Every N optimizer steps compare one layer's pruned gradient with the exact one, the next layer each time: "
            "cosine and relative error are logged, training does not change; 0 is never. Not with a budget."
        ),
    )
    activations: str = field(
        default="auto",
        metadata=_doc(
            "`stash`: keep activations for backward. `recompute`: keep none, recompute kept rows. `auto`: stash "
            "where no budget is set or it fits."
        ),
    )
    lean_wire: bool | str = field(
        default="auto",
        metadata=_doc(
            "One row per (token, rank) on the wire instead of one per pair. `auto`: on for expert parallelism unless "
            "the router gradient is full."
        ),
    )
    warmup_steps: int = field(default=20, metadata=_doc("Exact optimizer steps at the start."))
    cooldown_steps: int = field(
        default=0,
        metadata=_doc(
            "Exact optimizer steps at the end (needs `total_steps`, which `lrmoe train` takes from `train.steps`)."
        ),
    )
    total_steps: int | None = field(
        default=None, metadata=_doc("Optimizer steps of the whole run, for `cooldown_steps`.")
    )
    seed: int = field(default=0, metadata=_doc("Seed of all random choices of the layer."))
    observe: bool = field(
        default=False,
        metadata=_doc("Exact run that reports what pruning would have saved (`handle.summary()`)."),
    )

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_combinations()

    @property
    def full_router_grad(self) -> bool:
        """Whether routing weights get the gradient of every pair, dropped ones included."""
        return self.router_grad == "full" or (self.router_grad == "auto" and self.estimator == "topk")

    @property
    def lean(self) -> bool:
        """Whether tokens cross once per rank, where several ranks share the experts and no pair's output is kept."""
        return self.lean_wire is not False

    @property
    def recompute(self) -> bool:
        """Whether backward recomputes kept rows instead of reading stashed activations."""
        return self.activations == "recompute"

    @property
    def needs_phi(self) -> bool:
        """Whether scores read the norm of the down projection's input."""
        return self.score in PHI_SCORES

    def replace(self, **changes: Any) -> LRMoEConfig:
        """A copy with some fields changed; unknown names raise ConfigError."""
        return LRMoEConfig.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """All fields as a plain dictionary."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LRMoEConfig:
        """Build from a mapping.

        Raises:
            ConfigError: an unknown field (names the nearest valid one), or a bad value.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                hint = did_you_mean(str(name), names)
                raise ConfigError(f"{name}: no such field of LRMoEConfig{hint}; valid: {', '.join(names)}")
        return cls(**values)

    def _check_types(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if name == "policy" and isinstance(value, str) and ":" in value:
                continue  # "my_file.py:MyPolicy", loaded where a layer is built
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                own = ", or 'my_file.py:MyPolicy'" if name == "policy" else ""
                raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}{own}")
        for name, least in _INTEGERS.items():
            _check_integer(name, getattr(self, name), least)
        if self.total_steps is not None:
            _check_integer("total_steps", self.total_steps, 1)
        for name in ("memory_budget", "layer_budget"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        if not isinstance(self.observe, bool):
            raise ConfigError(f"observe={self.observe!r}: must be True or False")

    def _check_ranges(self) -> None:
        for name in ("max_drop", "peak_target"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"{name}={value!r}: must be a finite number")
            object.__setattr__(self, name, float(value))  # 0 and 0.0 are one configuration on every rank
        if not 0 <= self.max_drop < 1:
            raise ConfigError(f"max_drop={self.max_drop!r}: must lie in [0, 1): the share of pairs left out")
        if (limit := self.max_added_variance) is not None:
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
                raise ConfigError(
                    f"max_added_variance={limit!r}: must be a positive, finite number, or None for no limit"
                )
            object.__setattr__(self, "max_added_variance", float(limit))
        if self.peak_target <= 0:
            raise ConfigError(f"peak_target={self.peak_target!r}: must be positive (1.0 is the mean load)")

    def _check_combinations(self) -> None:
        if self.estimator == "sampled" and self.min_keep < 1:
            raise ConfigError(
                f"min_keep={self.min_keep}: estimator='sampled' needs min_keep >= 1 to stay unbiased"
            )
        if self.max_added_variance is not None and self.estimator == "topk":
            raise ConfigError(
                "max_added_variance: only with estimator='sampled' (topk is biased); valid: None"
            )
        if self.drop == "auto" and self.estimator == "topk":
            raise ConfigError(
                "drop='auto': only with estimator='sampled' (what topk's bias costs is not estimated); valid: "
                "'always', 'overload'"
            )
        if self.select_in == "forward" and self.score not in FORWARD_SCORES:
            raise ConfigError(
                f"select_in='forward' with score={self.score!r}: only {', '.join(FORWARD_SCORES)} are known in forward"
            )
        if self.policy in POLICIES and self.policy != "lrmoe" and self.max_drop > 0:
            raise ConfigError(
                f"max_drop={self.max_drop}: policy={self.policy!r} drops nothing; valid: max_drop=0"
            )
        if self.lean_wire is True and self.full_router_grad and self.max_drop > 0:
            raise ConfigError(
                "lean_wire=True: the full router gradient (estimator='topk', or router_grad='full') returns every "
                "pair's output on its own; valid: 'auto', False"
            )
        for name in ("memory_budget", "layer_budget"):
            if getattr(self, name) is not None and self.storage == "sharded":
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: needs storage='owned' (shards have no memory model); valid: None"
                )
            if getattr(self, name) is not None and self.check_every:
                raise ConfigError(
                    f"check_every={self.check_every}: its second backward holds a second gradient, which "
                    f"{name}={getattr(self, name)!r} does not promise room for; valid with a budget: 0"
                )
        self._check_cooldown()

    def _check_cooldown(self) -> None:
        if self.cooldown_steps == 0:
            return
        if self.total_steps is None:
            raise ConfigError(
                f"cooldown_steps={self.cooldown_steps}: needs total_steps, the length of the run"
            )
        if self.cooldown_steps > self.total_steps:
            raise ConfigError(
                f"cooldown_steps={self.cooldown_steps}: must be at most total_steps={self.total_steps}"
            )


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r}: must be an integer >= {least}")
    if value < least:
        raise ConfigError(f"{name}={value}: must be at least {least}")
