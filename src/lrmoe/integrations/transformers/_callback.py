"""The handle in Transformers' Trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lrmoe.checkpoint import BackgroundSaver, save
from lrmoe.checkpoint.places import try_root
from lrmoe.errors import ConfigError, did_you_mean
from lrmoe.integrations.transformers._compat import ExportableState, TrainerCallback
from lrmoe.integrations.transformers._handle import Handle, find_handle
from lrmoe.integrations.transformers._summary import figures, short_figures
from lrmoe.integrations.transformers._training import Running, world
from lrmoe.telemetry import CallRecord
from lrmoe.telemetry.layers import layer_histograms
from lrmoe.telemetry.live import Reporter

_LOGS = ("totals", "layers")
_OPTIONS = ("log", "checkpoints", "every", "keep_last", "checkpoint_async")


class LRMoECallback(TrainerCallback, ExportableState):
    """Steps the clock after every optimizer step and adds `lrmoe/...` figures to the Trainer's logs.

    Figures are of the calls since the last log, on the first rank: about a dozen with `log="totals"`; with
    `log="layers"` also every other one, the mean over layers and the worst layer's. Clock and controllers ride in
    `trainer_state.json`, so that a resumed run goes on where it was (under expert parallelism the score history of
    other ranks' experts starts anew).

    With `checkpoints` it saves the whole run itself, for models that the Trainer cannot resume: those spread by a
    `DistributedConfig`, expert-parallel ones among them. Give the Trainer `save_strategy="no"`, and start it, for the
    first time and again, with `trainer.train(resume_from_checkpoint=lrmoe_hf.resume(trainer))`.

    The Trainer calls reporters named in `report_to` before callbacks given to it, and they would not see the figures.
    To have them in TensorBoard, pass `report_to="none"` and either `callbacks=[LRMoECallback(handle),
    TensorBoardCallback()]`, or `callbacks=[LRMoECallback(handle, [lrmoe.telemetry.TensorBoard(folder)])]`, which shows
    histograms too.

    Args:
        handle: from `enable`; left out, it is found on the Trainer's model when training begins.
        reporters: get every log with the figures in it, and histograms, on the first process.
        log: "totals" or "layers"; docs/telemetry.md names the figures of both.
        checkpoints: folder for them, on a file system that all ranks share; None saves nothing. Frozen weights are
            saved like others.
        every: optimizer steps from one checkpoint to the next; the end of training saves too.
        keep_last: checkpoints to keep.
        checkpoint_async: write them in a thread of each rank, from copies in host memory, while training goes on. One
            appears at the first step that begins after every rank has written its part; what kept a rank from writing
            is raised there, on all ranks.

    Raises:
        ConfigError: `log` is neither; `checkpoints` and `every` are not given together; a number below 1.
    """

    def __init__(
        self,
        handle: Handle | None = None,
        reporters: Sequence[Reporter] = (),
        *,
        log: str = "totals",
        checkpoints: str | Path | None = None,
        every: int | None = None,
        keep_last: int = 2,
        checkpoint_async: bool = False,
    ) -> None:
        if log not in _LOGS:
            raise ConfigError(
                f"log={log!r}{did_you_mean(str(log), _LOGS)}: must be one of {', '.join(_LOGS)}"
            )
        if (checkpoints is None) is not (every is None):
            raise ConfigError(f"checkpoints={checkpoints!r} and every={every!r}: must be given together")
        for name, number in (("every", 1 if every is None else every), ("keep_last", keep_last)):
            if type(number) is not int or number < 1:
                raise ConfigError(f"{name}={number!r}: must be an integer of at least 1")
        self.handle = handle
        self.reporters = reporters
        self.log = log
        self.checkpoints = None if checkpoints is None else str(checkpoints)
        self.every = every
        self.keep_last = keep_last
        self.checkpoint_async = checkpoint_async
        self._steps = _StepTimes()
        self._saver = _Saver(self)
        self._restore: Callable[[Handle], None] | None = None
        self._ended: Callable[[], None] | None = None
        self.saved: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """What the Trainer stores with its own state."""
        saved = self.handle.state_dict() if self.handle is not None else None
        options = {name: getattr(self, name) for name in _OPTIONS}
        return {"args": options, "attributes": {"saved": saved}}

    def going_on(self, restore: Callable[[Handle], None], ended: Callable[[], None]) -> None:
        """Say that the run goes on from a checkpoint; `resume` does.

        Args:
            restore: puts clock and controllers back. ended: is called when training ends.
        """
        self._restore, self._ended = restore, ended

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
        self._saver.begin(state.global_step)
        if self._restore is not None:
            self._restore(self.handle)
            self._restore = None
            return
        if state.global_step == 0:
            return
        stored = state.stateful_callbacks.get(type(self).__name__)
        saved = self.saved or (stored["attributes"]["saved"] if isinstance(stored, dict) else None)
        self.saved = None
        if saved is not None and self.handle.first_rank:
            self.handle.load_state_dict(saved)
        else:
            self.handle.restart_at(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """An optimizer step begins, with its first micro-batch."""
        self._saver.save(state, rest)
        self._saver.look()
        self._steps.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """One optimizer step was done; an attached optimizer has counted it already."""
        self._steps.end()
        if self.handle is not None and self.handle.enabled and not self.handle.attached:
            self.handle.step()
        if not (control.should_log or control.should_evaluate):
            self._saver.save(state, rest)

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """An evaluation was done, which may have drawn random numbers: what is saved now comes after it."""
        self._saver.save(state, rest)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """An epoch ends; there may have been nothing to log after its last step."""
        self._saver.save(state, rest)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **rest: Any
    ) -> None:
        """Add the figures to this log, for the reporters, later callbacks and the history."""
        if self.handle is None or not self.handle.enabled or logs is None or "loss" not in logs:
            return
        records, step_ms = self.handle.telemetry.drain(), self._steps.take()
        if state.is_world_process_zero:
            self._report(state, logs, records, step_ms)
        if not control.should_evaluate:
            self._saver.save(state, rest)

    def _report(self, state: Any, logs: dict[str, float], records: list[CallRecord], step_ms: float) -> None:
        found = short_figures(records, step_ms)
        if self.log == "layers":
            found = {**figures(records), **found}
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)
        for reporter in self.reporters:
            reporter.write(state.global_step, logs, layer_histograms([records]))

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Save the last step; nothing more comes for the reporters."""
        self._saver.save(state, rest, last=True)
        if self._ended is not None:
            self._ended()
            self._ended = None
        for reporter in self.reporters:
            reporter.close()


class _Saver:
    """Saves each step that is due once, after what the Trainer still does in it: logging, evaluation."""

    def __init__(self, callback: LRMoECallback) -> None:
        self._callback = callback
        self._newest = 0
        self._background: BackgroundSaver | None = None

    def begin(self, step: int) -> None:
        """Training begins after `step` optimizer steps, of which there is a checkpoint or none is needed.

        Raises:
            CheckpointError: no checkpoint could be written; raised on every rank.
        """
        self._newest = step
        if self._callback.checkpoints is None:
            return
        if self._background is not None:
            self._background.drop()  # of training that ended by an error
        self._background = BackgroundSaver(world())
        try_root(Path(self._callback.checkpoints), world())

    def look(self) -> None:
        """Publish what has been written by now; every rank calls it."""
        if self._background is not None:
            self._background.poll()

    def save(self, state: Any, given: dict[str, Any], *, last: bool = False) -> None:
        """Save the step that is done if it is due, or the last one; every rank calls it."""
        callback, step = self._callback, state.global_step
        if self._background is None or callback.every is None or callback.handle is None:
            return
        if step != self._newest and (last or step % callback.every == 0):
            self._newest = step
            self._write(state, given)
        if last:
            self._background.wait()

    def _write(self, state: Any, given: dict[str, Any]) -> None:
        callback, background = self._callback, self._background
        assert callback.handle is not None, "found when training began"
        assert callback.checkpoints is not None, "nothing is saved without"
        assert background is not None, "made when training began"
        running = Running(
            model=given["model"],
            optimizer=given["optimizer"],
            schedule=given.get("lr_scheduler"),
            handle=callback.handle,
        )
        root, content = Path(callback.checkpoints), running.content(state)
        if callback.checkpoint_async:
            background.start(root, state.global_step, content, keep_last=callback.keep_last)
        else:
            save(root, state.global_step, content, group=world(), keep_last=callback.keep_last)


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
