"""The handle in Transformers' Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lrmoe.errors import ConfigError
from lrmoe.integrations.transformers._compat import ExportableState, TrainerCallback
from lrmoe.integrations.transformers._handle import Handle, find_handle
from lrmoe.integrations.transformers._summary import figures
from lrmoe.telemetry.layers import layer_histograms
from lrmoe.telemetry.live import Reporter


class LRMoECallback(TrainerCallback, ExportableState):
    """Steps the clock after every optimizer step and adds `lrmoe/...` figures to the Trainer's logs.

    Figures are means over layers since the last log, and the worst layer's, on the first rank. Clock and controllers
    ride in `trainer_state.json`, so that a resumed run goes on where it was (under expert parallelism the score history
    of other ranks' experts starts anew).

    The Trainer calls reporters named in `report_to` before callbacks given to it, and they would not see the figures.
    To have them in TensorBoard, pass `report_to="none"` and either `callbacks=[LRMoECallback(handle),
    TensorBoardCallback()]`, or `callbacks=[LRMoECallback(handle, [lrmoe.telemetry.TensorBoard(folder)])]`, which shows
    histograms too.

    Args:
        handle: from `enable`; left out, it is found on the Trainer's model when training begins.
        reporters: get every log with the figures in it, and histograms, on the first process.
    """

    def __init__(self, handle: Handle | None = None, reporters: Sequence[Reporter] = ()) -> None:
        self.handle = handle
        self.reporters = reporters
        self.saved: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """What the Trainer stores with its own state."""
        saved = self.handle.state_dict() if self.handle is not None else None
        return {"args": {}, "attributes": {"saved": saved}}

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

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One optimizer step was done; an attached optimizer has counted it already."""
        if self.handle is not None and self.handle.enabled and not self.handle.attached:
            self.handle.step()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Add the figures to this log, for the reporters, later callbacks and the history."""
        if self.handle is None or not self.handle.enabled or logs is None or "loss" not in logs:
            return
        records = self.handle.telemetry.drain()
        if not state.is_world_process_zero:
            return
        found = figures(records)
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)
        for reporter in self.reporters:
            reporter.write(state.global_step, logs, layer_histograms([records]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing more comes for the reporters."""
        for reporter in self.reporters:
            reporter.close()
