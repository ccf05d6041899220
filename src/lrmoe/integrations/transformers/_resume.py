"""Going on where a Trainer's run was, from checkpoints that `LRMoECallback(checkpoints=...)` wrote.

The Trainer decides how many batches to skip before it calls any callback, from a folder with a trainer_state.json. So
it gets one, and is told by attributes of its own to read everything else from the checkpoint.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lrmoe.checkpoint import find_steps, gathered, open_latest
from lrmoe.errors import ConfigError, UnsupportedError
from lrmoe.integrations.transformers._training import Saved, check_saved, refuse_other_wrappers, world

if TYPE_CHECKING:
    from lrmoe.integrations.transformers._callback import LRMoECallback

log = logging.getLogger(__name__)
TRAINER_STATE = "trainer_state.json"
_ASKED = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")
_EPOCH = "_run_epoch"  # of the Trainer, which does a step in every epoch that it begins


def resume(trainer: Any) -> str | None:
    """What to give to `trainer.train(resume_from_checkpoint=...)`: it then goes on from the newest usable checkpoint.

        trainer = Trainer(model, args, callbacks=[LRMoECallback(handle, checkpoints="checkpoints", every=100)], ...)
        trainer.train(resume_from_checkpoint=lrmoe_hf.resume(trainer))

    The same lines start a run where there is no checkpoint yet. Model (at any EP size), optimizer, schedule, loss
    scale, controllers, random generators and the position in the data come back: with the same layout the run ends with
    the bits it would have ended with. Every rank calls it.

    Args:
        trainer: a Transformers Trainer with an `LRMoECallback` that has `checkpoints`.

    Returns:
        A folder for the next `trainer.train` alone, which removes it; None where there is no checkpoint.

    Raises:
        ConfigError: the trainer has no such callback.
        CheckpointError: there are checkpoints and none is usable; the same on every rank.
        UnsupportedError: this Trainer reads checkpoints in another way, or others wrap its model.
    """
    callback = _callback(trainer)
    refuse_other_wrappers(trainer)
    lacking = [name for name in _ASKED if not callable(getattr(trainer, name, None))]
    if lacking:
        raise UnsupportedError(f"trainer: a {type(trainer).__name__} without {lacking[0]} cannot be resumed")
    assert callback.checkpoints is not None
    root, group = Path(callback.checkpoints), world()
    if not gathered(group, lambda: find_steps(root))[0]:
        return None
    checkpoint = open_latest(root, group=group, check=lambda found: check_saved(found, trainer.model))
    saved = Saved(checkpoint=checkpoint)
    folder = _trainer_folder(saved.state["trainer"])
    _Answers(trainer, saved, folder).install()
    if group is None or dist.get_rank() == 0:
        log.info("resuming from %s", checkpoint.folder)
    return folder


def _callback(trainer: Any) -> LRMoECallback:
    from lrmoe.integrations.transformers._callback import LRMoECallback

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, LRMoECallback) and callback.checkpoints is not None:
            return callback
    raise ConfigError(
        "trainer: has no LRMoECallback with checkpoints; pass callbacks=[LRMoECallback(handle, checkpoints=folder, "
        "every=steps)] to it"
    )


def _trainer_folder(state: dict[str, Any]) -> str:
    folder = tempfile.mkdtemp(prefix="lrmoe-resume-")
    (Path(folder) / TRAINER_STATE).write_text(json.dumps(state), encoding="utf-8")
    return folder


class _Answers:
    """Stands in for the Trainer's own ways to read a checkpoint, for one folder and one call of `train`."""

    def __init__(self, trainer: Any, saved: Saved, folder: str) -> None:
        self._trainer, self._saved, self._folder = trainer, saved, folder

    def install(self) -> None:
        """Put the answers before the Trainer's own methods."""
        own = (self._model, self._optimizer, self._scaler, self._random)
        for name, answer in zip(_ASKED, own, strict=True):
            vars(self._trainer).pop(name, None)  # of an earlier call that did not end
            setattr(self._trainer, name, self._before(getattr(self._trainer, name), answer))
        vars(self._trainer).pop(_EPOCH, None)
        if callable(stock := getattr(self._trainer, _EPOCH, None)):
            setattr(self._trainer, _EPOCH, self._unless_done(stock))

    def remove(self) -> None:
        """Take them out again."""
        for name in (*_ASKED, _EPOCH):
            vars(self._trainer).pop(name, None)

    def _unless_done(self, stock: Callable[..., None]) -> Callable[..., None]:
        """A run that was finished must not be trained one step further each time it is started again."""

        def epoch(*args: Any, **kwargs: Any) -> None:
            state = self._trainer.state
            if state.global_step >= state.max_steps:
                self._trainer.control.should_training_stop = True
                return
            stock(*args, **kwargs)

        return epoch

    def _before(self, stock: Callable[..., Any], answer: Callable[[], None]) -> Callable[..., Any]:
        def ask(checkpoint: str | None, *args: Any, **kwargs: Any) -> Any:
            return answer() if checkpoint == self._folder else stock(checkpoint, *args, **kwargs)

        return ask

    def _model(self) -> None:
        self._saved.load_model(self._trainer.model)

    def _optimizer(self) -> None:
        trainer = self._trainer
        shutil.rmtree(self._folder, ignore_errors=True)  # its state is read; the rest goes by its name
        self._saved.load_optimizer(trainer.model, trainer.optimizer, trainer.lr_scheduler)
        # Only now: the Trainer may have made its callbacks anew when it read its own state.
        _callback(trainer).going_on(self._saved.load_controllers, self.remove)

    def _scaler(self) -> None:
        self._saved.load_scaler(self._trainer.accelerator.scaler)

    def _random(self) -> None:
        self._saved.load_random()
