"""The handle that `enable` returns: the clock, what was measured, saving, and the way back."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lrmoe.config import LRMoEConfig
from lrmoe.errors import CheckpointError, ConfigError
from lrmoe.integrations.transformers._report import report
from lrmoe.integrations.transformers._summary import SummedTelemetry, figures
from lrmoe.layer import MoELayer, StepClock, release_scratch

_STATE_VERSION = 1
_LOOK_STEPS = 50  # between looks at the dropped energy where nobody reads the records
_IDLE_STEPS = 2  # optimizer steps in a row without a training call: one may be a warm-up of the optimizer


class Handle:
    """An enabled model's controls. Made by `enable`.

    Attributes:
        config: the configuration in force.
        layers: one layer per experts module, by the module's name.
        telemetry: records of the calls of this rank.
        clock: optimizer steps done.
        group: the expert-parallel group, None where every rank holds all experts.
        steps_skipped: optimizer steps that `agree_on_overflow` had skipped.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        config: LRMoEConfig,
        layers: dict[str, MoELayer],
        telemetry: SummedTelemetry,
        clock: StepClock,
        group: ProcessGroup | None,
        undo: list[Callable[[], None]],
    ) -> None:
        self._model = weakref.ref(model)  # which keeps the handle alive
        self.config = config
        self.layers = layers
        self.telemetry = telemetry
        self.clock = clock
        self.group = group
        self.steps_skipped = 0
        self._undo = undo
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._calls_before = 0
        self._idle_steps = 0
        self._warned_idle = False

    @property
    def enabled(self) -> bool:
        """False after `disable`."""
        return bool(self._undo)

    @property
    def model(self) -> nn.Module:
        """The model that was enabled.

        Raises:
            ConfigError: it is gone.
        """
        model = self._model()
        if model is None:
            raise ConfigError("handle: the model it was made for is gone; give the model itself")
        return model

    @property
    def first_rank(self) -> bool:
        """Whether this rank is the first of its expert-parallel group, or holds all experts itself."""
        return self.group is None or dist.get_rank(self.group) == 0

    @property
    def attached(self) -> bool:
        """Whether an optimizer that still exists steps the clock."""
        return self._optimizer is not None and self._optimizer() is not None

    def step(self) -> None:
        """Say that one optimizer step was done. Call it once per step, not per micro-batch.

        Warns once where steps pass in which no MoE layer trained.
        """
        self.clock.advance()
        if self.telemetry.watch is not None and self.clock.step % _LOOK_STEPS == 0:
            self.telemetry.look()
        idle, self._calls_before = self.telemetry.calls == self._calls_before, self.telemetry.calls
        self._idle_steps = self._idle_steps + 1 if idle else 0
        if self._idle_steps == _IDLE_STEPS and not self._warned_idle:
            self._warned_idle = True
            warnings.warn(
                f"lrmoe: {_IDLE_STEPS} optimizer steps passed without a training call of an MoE layer, so nothing was "
                "left out. Call model.train() (from_pretrained returns a model in evaluation mode), and train the "
                "model that was enabled: a copy of it is not.",
                stacklevel=2,
            )

    def skip(self, *, counted: bool = False) -> None:
        """Count an optimizer step that is skipped on all ranks; `agree_on_overflow` calls it.

        Args:
            counted: the optimizer is called all the same, so that an attached handle hears of the step by itself.
        """
        self.steps_skipped += 1
        if self.attached and not counted:
            self.step()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the clock after every `optimizer.step()`; neither keeps the other alive.

        Attaching the same optimizer again does nothing.

        Raises:
            ConfigError: `optimizer` is not one; another is attached already, its steps would count twice; or the
                handle is disabled.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer: got a {type(optimizer).__name__}; valid is a torch.optim.Optimizer, the one whose step() "
                "trains the model; with any other kind call handle.step() after each step"
            )
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
        self.clock.expected = True

    def state_dict(self) -> dict[str, Any]:
        """Clock and controllers of this rank, as JSON-able values. Under expert parallelism every rank has its own."""
        return {
            "version": _STATE_VERSION,
            "step": self.clock.step,
            "steps_skipped": self.steps_skipped,
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
        if not isinstance(state.get("step"), int):
            raise CheckpointError(f"handle state has step {state.get('step')!r}: must be an integer")
        skipped = state.get("steps_skipped", 0)  # earlier versions did not count them
        if not isinstance(skipped, int):
            raise CheckpointError(f"handle state has steps_skipped {skipped!r}: must be an integer")
        before = {name: layer.state_dict() for name, layer in self.layers.items()}
        try:
            for name, layer in self.layers.items():
                layer.load_state_dict(saved[name])
        except ConfigError as error:
            for name, layer in self.layers.items():
                layer.load_state_dict(before[name])
            raise CheckpointError(f"handle state does not fit: {error}") from error
        self.steps_skipped = skipped
        self.restart_at(state["step"])

    def restart_at(self, step: int) -> None:
        """Set the clock to `step` optimizer steps done."""
        self.clock.step = step
        self.clock.expected = self.clock.expected or step > 0

    def summary(self) -> dict[str, Any]:
        """What happened so far in training calls of this rank, as JSON-able values.

        Returns:
            `step`, `steps_skipped`, `layers`, `calls`, `drop_reasons` (calls by reason); `kept_share` of all pairs;
            means over calls of `forward_peak` and `backward_peak` (most loaded rank over mean load), `dropped_energy`,
            `added_variance` (shares), `moe_layer_ms` (wall), `replicas` (copies of experts over all ranks); sums
            `wire_bytes`, `wire_bytes_row_per_pair` (what one row per pair would have sent) and `nonfinite_scores`;
            `buffer_peak_bytes`. With `check_every` also `check`: `calls` compared, means `cosine` and `relative_error`,
            `cosine_worst`. With `observe=True` also `observed`: what pruning would have saved, by drop share ("0.1",
            ...): the mean `backward_peak`, the sums `rows_saved` and `bytes_saved`, the share `added_variance`.
            docs/telemetry.md has the units.
        """
        counted = {
            "step": self.clock.step,
            "steps_skipped": self.steps_skipped,
            "layers": len(self.layers),
        }
        return {**counted, **self.telemetry.totals().summary()}

    def report(self) -> str:
        """`summary()` as a few lines for a reader; `print(handle)` shows the same."""
        return report(self.summary(), ranks=1 if self.group is None else self.group.size())

    __str__ = report

    def figures(self) -> dict[str, float]:
        """`lrmoe/...` figures for a logger over this rank's calls since they were last asked for: the mean over layers
        under a quantity's name, and the worst layer's as `<name>_worst`.

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
        release_scratch()


def find_handle(model: nn.Module) -> Handle | None:
    """The handle of an enabled model, None where it is not enabled."""
    for module in model.modules():
        owner: Handle | None = getattr(getattr(module, "_lrmoe", None), "owner", None)
        if owner is not None:
            return owner
    return None
