"""The state a layer keeps between calls: where in training it is, and what past scores taught the planner."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError
from lrmoe.layer.budget import Waiting
from lrmoe.layer.drops import DropControl
from lrmoe.layer.learned import Learned
from lrmoe.layer.randomness import Key
from lrmoe.planning import Topology
from lrmoe.planning.problem import FloatArray
from lrmoe.planning.restore import value_of
from lrmoe.planning.score_bins import COLUMNS, ScoreHistory

log = logging.getLogger(__name__)
_PATIENCE = 64  # training calls of one layer in what should be one optimizer step


class StepClock:
    """Counts optimizer steps; one clock serves all layers of a model.

    Where nobody advances it, a warning says so once and calls of the layer count as steps, after 64 calls that are
    taken for micro-batches of the first step. Set `expected` where somebody will advance it: it is then waited for.
    """

    def __init__(self) -> None:
        self.step = 0
        self.expected = False
        self._warned: set[str] = set()
        self._layers: list[Any] = []
        self.waiting = Waiting()

    def advance(self) -> None:
        """One optimizer step is done: forget what only an unfinished step may need."""
        self.step += 1
        self.expected = True
        self.waiting.clear()
        for layer in self._layers:
            layer.release()

    def watch(self, layer: Any) -> None:
        """Release this layer's replay records at every step."""
        self._layers.append(layer)

    def warn_idle(self) -> None:
        """Say once that nobody advances the clock."""
        self._warn(
            "lrmoe: no optimizer step was announced in many training calls; counting calls instead. Call "
            "handle.step() after each optimizer step, or handle.attach(optimizer), or use the Trainer callback."
        )

    def warn_evaluation(self) -> None:
        """Say once that gradients flow through a layer in evaluation mode, where nothing is left out."""
        self._warn(
            "lrmoe: gradients flow through MoE layers in evaluation mode: backward is exact and nothing is counted. "
            "To train, call model.train() first (from_pretrained returns a model in evaluation mode)."
        )

    def say_anew(self, text: str) -> None:
        """Say once, for all layers and ranks, what a restored state could not bring."""
        if text in self._warned:
            return
        self._warned.add(text)
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning("lrmoe: %s", text)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=3)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a training call happens, and whether its backward may leave pairs out."""

    step: int
    micro_batch: int
    prune: bool
    reason: str


class Controller:
    """Schedule, call counter, score history and drop limits of one layer.

    Args:
        config: the configuration.
        clock: the optimizer-step clock.
        layer: index of the layer, part of its random key.
        experts: experts homed on this rank. ranks: of the group.

    Attributes:
        learned: scores of past calls as this rank saw them. drops: what of `max_drop` a call may use.
        by_source: whether this rank sees scores of its own pairs only (`selection="local"`), of all experts.
    """

    def __init__(
        self, *, config: LRMoEConfig, clock: StepClock, layer: int, experts: int, ranks: int = 1
    ) -> None:
        self.config = config
        self.clock = clock
        self.layer = layer
        self.by_source = config.selection == "local" and ranks > 1 and not config.observe
        seen = experts * ranks if self.by_source else experts
        self.learned = Learned(seen if config.estimator == "sampled" else 0, ranks, own=self.by_source)
        self.drops = DropControl(config)
        self._step = 0
        self._calls_in_step = 0
        self._calls = 0
        self.prices = (0.0, 0.0)  # of a copy and a crossing row in the latest call (planning.rates)

    def next_moment(self) -> Moment:
        """Count one training call."""
        if self.clock.step != self._step:
            self._step, self._calls_in_step = self.clock.step, 0
        step, micro_batch = self._step, self._calls_in_step
        self._calls_in_step += 1
        self._calls += 1
        if not self.clock.expected and self._calls > _PATIENCE:
            self.clock.warn_idle()
            step, micro_batch = self._calls - 1, 0
        reason = self._exact_because(step)
        return Moment(
            step=step, micro_batch=micro_batch, prune=reason is None, reason=reason or self.config.drop
        )

    def _exact_because(self, step: int) -> str | None:
        config = self.config
        if config.observe:
            return "observe"
        if config.max_drop == 0:
            return "off"
        if step < config.warmup_steps:
            return "warmup"
        if config.total_steps is not None and step >= config.total_steps - config.cooldown_steps:
            return "cooldown"
        return None

    def key(self, moment: Moment) -> Key:
        """The random key of a call."""
        return Key(seed=self.config.seed, layer=self.layer, step=moment.step, micro_batch=moment.micro_batch)

    def learn(self, score_M: Tensor, counts_X: Tensor) -> None:
        """Add a call's scores to the history; see `Learned.learn`."""
        self.learned.learn(score_M, counts_X)

    def book(self, variance: Tensor, energy: Tensor, predicted: float | None) -> None:
        """Add what a call measured, for the limit on added variance; see `Learned.book`."""
        self.learned.book(variance, energy, predicted)

    def hear(self, told_RW: FloatArray, topology: Topology, *, training: bool) -> ScoreHistory | None:
        """Take in what all ranks told, their fp64 tail of a call's message; returns what is known of past scores.

        Evaluation reads and changes nothing.
        """
        size = self.learned.sums_XF.numel()
        if training:
            self.drops.book(told_RW[:, size : size + 3], self.learned.predicted)
            self.drops.measure(told_RW[:, size + 3 :])
            self.learned.sent()
        if not size:
            return None
        if not self.by_source:
            return ScoreHistory.from_sums(told_RW[:, :size].reshape(topology.experts, COLUMNS))
        total = np.zeros((topology.experts, COLUMNS))
        for one in told_RW[:, :size]:  # in rank order: the same bits on every rank
            total += one.reshape(total.shape)
        return ScoreHistory.from_sums(total)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state of this rank."""
        return {
            "step": self._step,
            "calls_in_step": self._calls_in_step,
            "calls": self._calls,
            **self.learned.state(),
            "drops": self.drops.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave.

        A state of an earlier version has mean scores only (`score_mean`); what it lacks begins anew.

        Raises:
            ConfigError: a field is missing or of another type, or the state belongs to a layer with another number of
                local experts; nothing is changed then.
        """
        known = (
            "step",
            "calls_in_step",
            "calls",
            *(() if "score_mean" in state else ("score_sums", "drops")),
        )
        missing = [name for name in known if name not in state]
        if missing:
            raise ConfigError(f"state of layer {self.layer} lacks {', '.join(missing)}")
        drops = state.get("drops", {})
        try:
            counts = [value_of(int, state[name], name) for name in ("step", "calls_in_step", "calls")]
            self.drops.checked(drops)
            self.learned.load(state)
        except ConfigError as error:
            raise ConfigError(f"state of layer {self.layer}: {error}") from error
        self.drops.load(drops)
        self._step, self._calls_in_step, self._calls = counts
