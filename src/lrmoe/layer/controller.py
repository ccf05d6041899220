"""The state a layer keeps between calls: where in training it is, and what past scores taught the planner."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError
from lrmoe.layer.budget import Waiting
from lrmoe.layer.randomness import Key

_PATIENCE = 64  # training calls of one layer in what should be one optimizer step
_DECAY = 0.9  # of the running mean of scores


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
    """Schedule, call counter and score history of one layer.

    Args:
        config: the configuration.
        clock: the optimizer-step clock.
        layer: index of the layer, part of its random key.
        experts: experts homed on this rank, whose score history this rank keeps.
    """

    def __init__(self, *, config: LRMoEConfig, clock: StepClock, layer: int, experts: int) -> None:
        self.config = config
        self.clock = clock
        self.layer = layer
        self.score_mean_L = torch.zeros(experts, dtype=torch.float64, device="cpu")
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

    def learn(self, score_sum_L: Tensor, count_L: Tensor) -> None:
        """Update the running mean score of the experts homed here.

        Args:
            score_sum_L: fp64 (L,), sum of finite scores; count_L: int64 (L,), pairs scored.
        """
        mean = score_sum_L / count_L.clamp(min=1)
        old = self.score_mean_L.to(mean.device)
        fresh = torch.where(old > 0, _DECAY * old + (1 - _DECAY) * mean, mean)
        self.score_mean_L = torch.where((count_L > 0) & (mean > 0), fresh, old)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state of this rank."""
        return {
            "step": self._step,
            "calls_in_step": self._calls_in_step,
            "calls": self._calls,
            "score_mean": self.score_mean_L.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            ConfigError: a field is missing, or the state belongs to a layer with another number of local experts;
                nothing is changed then.
        """
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise ConfigError(f"state of layer {self.layer} lacks {', '.join(missing)}")
        mean = torch.tensor(state["score_mean"], dtype=torch.float64, device="cpu")
        if mean.shape != self.score_mean_L.shape:
            raise ConfigError(
                f"score_mean holds {mean.numel()} experts: layer {self.layer} has "
                f"{self.score_mean_L.numel()} on this rank"
            )
        self.score_mean_L = mean
        self._step, self._calls_in_step = int(state["step"]), int(state["calls_in_step"])
        self._calls = int(state["calls"])
