"""What a capacity question asks, checked; and the loads it is planned for.

Shape letters: S steps, R ranks, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lrmoe.errors import ConfigError, PlanError
from lrmoe.planning import Topology
from lrmoe.planning.calibration import Calibration
from lrmoe.planning.hardware import Hardware
from lrmoe.planning.model_memory import Training
from lrmoe.planning.policies import policy_info
from lrmoe.planning.problem import IntArray
from lrmoe.planning.shapes import ModelShape
from lrmoe.simulate.generators import GENERATORS, calibrate, generate

_PATTERN_TOKENS = 8192  # tokens per rank of the pattern that is scaled to the micro-batch asked for
MAX_RANKS = 4096
MAX_TOKENS = 2**30  # of a rank's micro-batch; byte counts stay in 64 bits
_MAX_GPUS = 2**20
_HISTORY = 11  # calls before the planned one, for policies that plan from history


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to plan.

    Attributes:
        model, hardware: sizes and devices. gpus: all of the job. ep: ranks that share the experts, None: all.
        nodes: None: as many as `hardware.gpus_per_node` asks for.
        micro_batch, sequence: tokens per rank are their product.
        policy, slots, max_drop, drop: the planner, foreign experts a rank may hold, what backward may leave out.
        activations: "stash", "recompute" or "auto". checkpointing: "none", "layer" or "auto".
        gradient_bytes: 4 or 2. optimizer: a name of model_memory.OPTIMIZERS.
        budget: bytes per rank for the MoE part (weights, gradients, waiting stashes, largest transient), or None.
        layer_budget: bytes per rank for one layer call, or None.
        reserved: bytes per rank that are not MoE, or None for an estimate.
        headroom: share of the device left free (driver, communication buffers, fragmentation).
        skew: a pattern of simulate.generators. peak: fixed ownership's peak that lognormal skew is calibrated to.
        seed: of the skew. calibration: constants of the time model.

    Raises:
        ConfigError: a value out of range; names the field.
    """

    model: ModelShape
    hardware: Hardware
    gpus: int = 8
    ep: int | None = None
    nodes: int | None = None
    micro_batch: int = 1
    sequence: int = 4096
    policy: str = "lrmoe"
    slots: int = 2
    max_drop: float = 0.3
    drop: str = "always"
    activations: str = "auto"
    checkpointing: str = "auto"
    gradient_bytes: int = 4
    optimizer: str = "adamw"
    budget: int | None = None
    layer_budget: int | None = None
    reserved: int | None = None
    headroom: float = 0.1
    skew: str = "lognormal"
    peak: float | None = None
    seed: int = 0
    calibration: Calibration = field(default_factory=Calibration)

    def __post_init__(self) -> None:
        for name in ("gpus", "ep", "nodes", "micro_batch", "sequence", "budget", "layer_budget"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r}: must be an integer of at least 1")
        for name in ("slots", "reserved", "seed"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value}: must not be negative")
        choices = {
            "activations": ("auto", "stash", "recompute"),
            "checkpointing": ("auto", "none", "layer"),
            "drop": ("always", "overload"),
            "skew": GENERATORS,
        }
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(valid)}")
        self._check_sizes()
        self._check_numbers()
        self._check_layout()

    def _check_sizes(self) -> None:
        if self.ranks > MAX_RANKS:
            raise ConfigError(
                f"{'gpus' if self.ep is None else 'ep'}={self.ranks}: at most {MAX_RANKS} ranks can share experts"
            )
        if self.gpus > _MAX_GPUS:
            raise ConfigError(f"gpus={self.gpus}: must be at most {_MAX_GPUS:,}")
        if self.tokens > MAX_TOKENS:
            raise ConfigError(
                f"sequence={self.sequence}: {self.micro_batch} sequences of it are {self.tokens:,} tokens per GPU, at "
                f"most {MAX_TOKENS:,}"
            )

    def _check_numbers(self) -> None:
        if not 0 <= self.max_drop < 1:
            raise ConfigError(f"max_drop={self.max_drop}: must lie in [0, 1)")
        if not 0 <= self.headroom < 1:
            raise ConfigError(f"headroom={self.headroom}: must lie in [0, 1), a share of the device's memory")
        if self.peak is not None and not 1 <= self.peak <= self.ranks:
            raise ConfigError(
                f"peak={self.peak}: must lie in [1, {self.ranks}], the load of one rank over the mean"
            )
        if self.peak is not None and self.skew != "lognormal":
            raise ConfigError(
                f"peak={self.peak} with skew={self.skew!r}: only lognormal is calibrated to a peak"
            )

    def _check_layout(self) -> None:
        if self.gpus % self.ranks:
            raise ConfigError(f"ep={self.ranks}: must divide gpus={self.gpus}")
        if self.model.experts < self.ranks or self.model.experts % self.ranks:
            name, experts = "gpus" if self.ep is None else "ep", self.model.experts
            valid = [ranks for ranks in self.expert_ranks if self.gpus % ranks == 0]
            add = f"add --ep {valid[-1]}" if self.ep is None else f"take --ep {valid[-1]}"
            raise ConfigError(
                f"{name}={self.ranks}: {self.model.name} has {experts} experts, which must be a multiple of the ranks "
                f"that share them; {add} (valid --ep on {self.gpus} GPUs: {', '.join(map(str, valid))})"
            )
        foreign = self.model.experts - self.model.experts // self.ranks
        if self.ranks > 1 and self.slots > foreign:
            raise ConfigError(f"slots={self.slots}: must be at most {foreign}, the experts homed elsewhere")
        if self.gpus % self.node_count and self.nodes is None:
            raise ConfigError(
                f"gpus={self.gpus}: do not fill {self.node_count} nodes of {self.hardware.gpus_per_node} evenly; give "
                "--nodes, or a multiple"
            )
        if self.gpus % self.node_count:
            raise ConfigError(f"nodes={self.node_count}: must divide gpus={self.gpus}")
        try:
            self.training(False)
            _ = self.topology
            policy_info(self.policy)
            self.calibration.check(self.hardware.name)
        except PlanError as error:
            raise ConfigError(str(error)) from error

    @property
    def plans_under_budget(self) -> bool:
        """Whether the policy reads budgets and drop limits: this package's, or one from a user's file."""
        return self.policy == "lrmoe" or ":" in self.policy

    @property
    def ranks(self) -> int:
        """Ranks that share the experts."""
        return self.gpus if self.ep is None else self.ep

    @property
    def expert_ranks(self) -> list[int]:
        """Numbers of ranks that the model's experts can be shared by, ascending."""
        experts = self.model.experts
        return [ranks for ranks in range(1, experts + 1) if experts % ranks == 0]

    @property
    def node_count(self) -> int:
        """Nodes of the job."""
        return -(-self.gpus // self.hardware.gpus_per_node) if self.nodes is None else self.nodes

    @property
    def topology(self) -> Topology:
        """The expert-parallel group: consecutive ranks, nodes filled in order."""
        per_node = self.gpus // self.node_count
        inside = self.ranks <= per_node
        return Topology(
            ranks=self.ranks, experts=self.model.experts, ranks_per_node=None if inside else per_node
        )

    @property
    def tokens(self) -> int:
        """Tokens of a rank's micro-batch."""
        return self.micro_batch * self.sequence

    @property
    def pairs(self) -> int:
        """(token, expert) pairs that a rank sends."""
        return self.tokens * self.model.top_k

    @property
    def device_bytes(self) -> int:
        """Device memory that may be used."""
        return int(self.hardware.memory_bytes * (1 - self.headroom))

    def training(self, checkpointing: bool) -> Training:
        """The whole-model side of the question; an expert's optimizer state is shared by its data-parallel copies."""
        return Training(
            layers=self.model.moe_layers,
            gradient_bytes=self.gradient_bytes,
            optimizer=self.optimizer,
            optimizer_shards=self.gpus // self.ranks,
            checkpointing=checkpointing,
        )

    def change(self, **fields: Any) -> Question:
        """The same question with some fields changed."""
        return dataclasses.replace(self, **fields)


def question_calls(question: Question) -> IntArray:
    """Consecutive calls of one layer, int64 (S, R, E), each source with exactly its pairs."""
    past = _HISTORY if policy_info(question.policy).inputs == "history" else 0
    model = question.model
    pattern = _pattern(
        question.skew, question.peak, question.ranks, model.experts, model.top_k, question.seed, past + 1
    )
    return np.stack([scale_counts(counts_RE, question.pairs) for counts_RE in pattern])


@functools.lru_cache(maxsize=32)
def _pattern(
    skew: str, peak: float | None, ranks: int, experts: int, top_k: int, seed: int, steps: int
) -> IntArray:
    sizes = {"ranks": ranks, "experts": experts, "top_k": top_k, "tokens": _PATTERN_TOKENS}
    options: dict[str, Any] = {}
    if peak is not None:
        options["sigma"] = calibrate(peak, seeds=[seed], steps=steps, skip=steps - 1, **sizes)
    return generate(skew, **sizes, seed=seed, steps=steps, **options)


def scale_counts(counts_RE: IntArray, pairs: int) -> IntArray:
    """The same distribution with the largest source at `pairs` pairs: rounded down, remainders by largest fraction."""
    sent_R = counts_RE.sum(axis=1)
    most = max(int(sent_R.max()), 1)
    target_R = sent_R * pairs // most
    exact_RE = counts_RE * (pairs / most)
    scaled = np.floor(exact_RE).astype(np.int64)
    order_RE = np.argsort(scaled - exact_RE, axis=1, kind="stable")
    missing_R = target_R - scaled.sum(axis=1)
    add_RE = np.arange(counts_RE.shape[1]) < missing_R[:, None]
    np.add.at(scaled, (np.arange(len(scaled))[:, None], order_RE), add_RE.astype(np.int64))
    return scaled
