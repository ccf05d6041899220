"""The handle that `enable` returns: the clock, what was measured, saving, and the way back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lrmoe.config import LRMoEConfig
from lrmoe.errors import CheckpointError, ConfigError
from lrmoe.integrations.transformers._summary import SummedTelemetry, figures
from lrmoe.layer import MoELayer, StepClock

_STATE_VERSION = 1


class Handle:
    """An enabled model's controls. Made by `enable`.

    Attributes:
        config: the configuration in force.
        layers: one layer per experts module, by the module's name.
        telemetry: records of the calls of this rank.
        clock: optimizer steps done.
        group: the expert-parallel group, None where every rank holds all experts.
    """

    def __init__(
        self,
        *,
        config: LRMoEConfig,
        layers: dict[str, MoELayer],
        telemetry: SummedTelemetry,
        clock: StepClock,
        group: ProcessGroup | None,
        undo: list[Callable[[], None]],
    ) -> None:
        self.config = config
        self.layers = layers
        self.telemetry = telemetry
        self.clock = clock
        self.group = group
        self._undo = undo
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None

    @property
    def enabled(self) -> bool:
        """False after `disable`."""
        return bool(self._undo)

    @property
    def first_rank(self) -> bool:
        """Whether this rank is the first of its expert-parallel group, or holds all experts itself."""
        return self.group is None or dist.get_rank(self.group) == 0

    @property
    def attached(self) -> bool:
        """Whether an optimizer that still exists steps the clock."""
        return self._optimizer is not None and self._optimizer() is not None

    def step(self) -> None:
        """Say that one optimizer step was done. Call it once per step, not per micro-batch."""
        self.clock.advance()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the clock after every `optimizer.step()`; neither keeps the other alive.

        Attaching the same optimizer again does nothing.

        Raises:
            ConfigError: another optimizer is attached already, its steps would count twice; or the handle is disabled.
        """
        if not self.enabled:
            raise ConfigError("handle: it is disabled; call enable again and attach the new handle")
        if self.attached:
            if self._optimizer is not None and self._optimizer() is optimizer:
                return
            raise ConfigError(
                "optimizer: the handle is attached to another optimizer; with several optimizers call handle.step() "
                "once per training step instead"
            )
        handle = weakref.ref(self)

        def stepped(*_: Any) -> None:
            alive = handle()
            if alive is not None and alive.enabled:
                alive.step()

        hook = optimizer.register_step_post_hook(stepped)
        self._optimizer = weakref.ref(optimizer)
        self._undo.append(hook.remove)

    def state_dict(self) -> dict[str, Any]:
        """Clock and controllers of this rank, as JSON-able values. Under expert parallelism every rank has its own."""
        return {
            "version": _STATE_VERSION,
            "step": self.clock.step,
            "layers": {name: layer.state_dict() for name, layer in self.layers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            CheckpointError: another version, or other layers; nothing is changed then.
        """
        if state.get("version") != _STATE_VERSION:
            raise CheckpointError(f"handle state version {state.get('version')!r}: valid is {_STATE_VERSION}")
        saved = state.get("layers", {})
        if saved.keys() != self.layers.keys():
            odd = sorted(saved.keys() ^ self.layers.keys())
            raise CheckpointError(f"handle state is of another model: MoE layers {odd} are only on one side")
        for name, layer in self.layers.items():
            layer.load_state_dict(saved[name])
        self.restart_at(int(state["step"]))

    def restart_at(self, step: int) -> None:
        """Set the clock to `step` optimizer steps done."""
        self.clock.step = step
        self.clock.expected = self.clock.expected or step > 0

    def summary(self) -> dict[str, Any]:
        """What happened so far in training calls of this rank, as JSON-able values.

        Returns:
            `step`, `layers`, `calls`, `drop_reasons` (calls by reason); `kept_share` of all pairs; means over calls of
            `forward_peak` and `backward_peak` (most loaded rank over mean load), `dropped_energy`, `added_variance`
            (shares), `moe_layer_ms` (wall); sums `wire_bytes` and `nonfinite_scores`; `buffer_peak_bytes`. With
            `observe=True` also `observed`: means of what pruning would have saved.
        """
        return {"step": self.clock.step, "layers": len(self.layers), **self.telemetry.totals().summary()}

    def figures(self) -> dict[str, float]:
        """`lrmoe/...` figures for a logger, over the calls since they were last asked for: mean and worst layer.

        Empty where there was no training call. Drains `telemetry`.
        """
        return figures(self.telemetry.drain())

    def disable(self) -> None:
        """Give every experts module back the implementation it had, and take all hooks off. Safe to call twice."""
        while self._undo:
            self._undo.pop()()
        self._optimizer = None
        for layer in self.layers.values():
            layer.release()


def find_handle(model: nn.Module) -> Handle | None:
    """The handle of an enabled model, None where it is not enabled."""
    for module in model.modules():
        owner: Handle | None = getattr(getattr(module, "_lrmoe", None), "owner", None)
        if owner is not None:
            return owner
    return None
