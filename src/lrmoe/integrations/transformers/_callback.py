"""The handle in Transformers' Trainer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import nn

from lrmoe.errors import ConfigError, did_you_mean
from lrmoe.integrations.transformers._compat import ExportableState, TrainerCallback
from lrmoe.integrations.transformers._handle import Handle, find_handle
from lrmoe.integrations.transformers._summary import figures, short_figures
from lrmoe.telemetry.layers import layer_histograms
from lrmoe.telemetry.live import Reporter

_LOGS = ("totals", "layers")


class LRMoECallback(TrainerCallback, ExportableState):
    """Steps the clock after every optimizer step and adds `lrmoe/...` figures to the Trainer's logs.

    Figures are of the calls since the last log, on the first rank: about a dozen with `log="totals"`; with
    `log="layers"` also every other one, the mean over layers and the worst layer's. Clock and controllers ride in
    `trainer_state.json`, so that a resumed run goes on where it was (under expert parallelism the score history of
    other ranks' experts starts anew).

    The Trainer calls reporters named in `report_to` before callbacks given to it, and they would not see the figures.
    To have them in TensorBoard, pass `report_to="none"` and either `callbacks=[LRMoECallback(handle),
    TensorBoardCallback()]`, or `callbacks=[LRMoECallback(handle, [lrmoe.telemetry.TensorBoard(folder)])]`, which shows
    histograms too.

    Args:
        handle: from `enable`; left out, it is found on the Trainer's model when training begins.
        reporters: get every log with the figures in it, and histograms, on the first process.
        log: "totals" or "layers"; docs/telemetry.md names the figures of both.

    Raises:
        ConfigError: `log` is neither.
    """

    def __init__(
        self, handle: Handle | None = None, reporters: Sequence[Reporter] = (), *, log: str = "totals"
    ) -> None:
        if log not in _LOGS:
            raise ConfigError(
                f"log={log!r}{did_you_mean(str(log), _LOGS)}: must be one of {', '.join(_LOGS)}"
            )
        self.handle = handle
        self.reporters = reporters
        self.log = log
        self._steps = _StepTimes()
        self.saved: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """What the Trainer stores with its own state."""
        saved = self.handle.state_dict() if self.handle is not None else None
        return {"args": {"log": self.log}, "attributes": {"saved": saved}}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        """Find the handle where none was given; after a resume, restore it."""
        if self.handle is None and model is not None:
            self.handle = find_handle(model)
        if self.handle is None:
            raise ConfigError(
                "handle: LRMoECallback got none and the Trainer's model is not enabled; call enable first"
            )
        self.handle.clock.expected = True
        if state.global_step == 0:
            return
        stored = state.stateful_callbacks.get(type(self).__name__)
        saved = self.saved or (stored["attributes"]["saved"] if isinstance(stored, dict) else None)
        self.saved = None
        if saved is not None and self.handle.first_rank:
            self.handle.load_state_dict(saved)
        else:
            self.handle.restart_at(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An optimizer step begins, with its first micro-batch."""
        self._steps.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One optimizer step was done; an attached optimizer has counted it already."""
        self._steps.end()
        if self.handle is not None and self.handle.enabled and not self.handle.attached:
            self.handle.step()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Add the figures to this log, for the reporters, later callbacks and the history."""
        if self.handle is None or not self.handle.enabled or logs is None or "loss" not in logs:
            return
        records, step_ms = self.handle.telemetry.drain(), self._steps.take()
        if not state.is_world_process_zero:
            return
        found = short_figures(records, step_ms)
        if self.log == "layers":
            found = {**figures(records), **found}
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)
        for reporter in self.reporters:
            reporter.write(state.global_step, logs, layer_histograms([records]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing more comes for the reporters."""
        for reporter in self.reporters:
            reporter.close()


class _StepTimes:
    """Wall milliseconds of optimizer steps, without what the Trainer does between them."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._total = 0.0

    def begin(self) -> None:
        self._since = time.perf_counter()

    def end(self) -> None:
        if self._since is not None:
            self._total += 1e3 * (time.perf_counter() - self._since)
        self._since = None

    def take(self) -> float:
        """The total since the last call."""
        total, self._total = self._total, 0.0
        return total
