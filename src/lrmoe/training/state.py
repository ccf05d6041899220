"""What a trainer puts into a checkpoint and takes out of it.

model/<name>                     weights (the float32 masters where they exist) and persistent buffers
model/<name>/expert/<id>         one expert's rows of an experts parameter
optim/<name>/<moment>[/expert/<id>]
state.json                       counters, totals, corpus, configuration, controllers of the layers
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrmoe.checkpoint import Checkpoint, Content, ExpertTensor, agreed, gathered, open_latest, save
from lrmoe.errors import CheckpointError
from lrmoe.training.resume import refuse_changes
from lrmoe.training.totals import Totals

if TYPE_CHECKING:
    from lrmoe.training.loop import Trainer
    from lrmoe.training.optim import Entry

log = logging.getLogger(__name__)


def checkpoint_root(trainer: Trainer) -> Path:
    """The folder of a run's checkpoints."""
    return trainer.config.folder / "checkpoints"


def save_trainer(trainer: Trainer) -> Path:
    """Write a checkpoint of the trainer's present state."""
    dense: dict[str, Tensor] = dict(_fixed(trainer))
    experts: dict[str, ExpertTensor] = {}
    for key, entry, tensor in _trained(trainer):
        if entry.span is None:
            dense[key] = tensor
        else:
            experts[key] = ExpertTensor(values=tensor, first=entry.span[0])
    content = Content(dense=dense, experts=experts, state=_state(trainer))
    return save(
        checkpoint_root(trainer),
        trainer.steps_done,
        content,
        group=trainer.group,
        keep_last=trainer.config.train.keep_last,
        protect=() if trainer.resumed_from is None else (trainer.resumed_from,),
    )


def load_trainer(trainer: Trainer) -> int:
    """Bring a trainer to the state of the newest usable checkpoint of its run."""
    checkpoint = open_latest(checkpoint_root(trainer), group=trainer.group)
    agreed(trainer.group, lambda: _check_corpus(trainer, checkpoint))
    agreed(trainer.group, lambda: _read_tensors(trainer, checkpoint))
    state = checkpoint.state
    trainer.steps_done, trainer.steps_skipped = state["steps_done"], state["steps_skipped"]
    trainer.resumed_from = trainer.steps_done
    trainer.totals = Totals(**state["totals"])
    trainer.handle.load_state_dict(reshard(state["layers_by_rank"], trainer.rank, trainer.world_size))
    trainer.parameters.publish()
    trainer.parameters.zero_grad()
    if trainer.rank == 0:
        _announce(trainer, checkpoint)
    return trainer.steps_done


def _fixed(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Persistent buffers."""
    model = trainer.model
    saved = set(model.state_dict())
    yield from ((f"model/{name}", buffer) for name, buffer in model.named_buffers() if name in saved)


def _trained(trainer: Trainer) -> Iterator[tuple[str, Entry, Tensor]]:
    for entry in trainer.parameters.entries:
        yield f"model/{entry.name}", entry, entry.master
    for entry, name, tensor in trainer.optimizer.moments():
        yield f"optim/{entry.name}/{name}", entry, tensor


def _state(trainer: Trainer) -> dict[str, Any]:
    return {
        "steps_done": trainer.steps_done,
        "steps_skipped": trainer.steps_skipped,
        "totals": trainer.totals.state_dict(),
        "updates": trainer.optimizer.updates,
        "corpus": {"name": trainer.corpus.name, "sha256": trainer.corpus.fingerprint},
        "config": trainer.config.to_dict(),
        "layers_by_rank": gathered(trainer.group, trainer.handle.state_dict),
    }


def reshard(states: Sequence[Any], rank: int, world_size: int) -> Any:
    """State of the layers' controllers for one of `world_size` ranks, from the states of the ranks that saved.

    A list has one value per expert of its rank: joined in rank order it covers all experts, and each rank takes its
    part. Everything else is the same on all ranks.
    """
    if len(states) == world_size:
        return states[rank]
    first = states[0]
    if isinstance(first, dict):
        return {key: reshard([state[key] for state in states], rank, world_size) for key in first}
    if isinstance(first, list):
        joined = [value for state in states for value in state]
        count = len(joined) // world_size
        return joined[rank * count : (rank + 1) * count]
    return first


def _check_corpus(trainer: Trainer, checkpoint: Checkpoint) -> None:
    saved, corpus = checkpoint.state["corpus"], trainer.corpus
    if saved["sha256"] == corpus.fingerprint:
        return
    refuse_changes(checkpoint.state["config"]["data"], trainer.config.to_dict()["data"], "data")
    raise CheckpointError(
        f"{checkpoint.folder}: was trained on another corpus ({saved['name']}, SHA-256 {saved['sha256'][:12]}) "
        f"than the one given ({corpus.name}, {corpus.fingerprint[:12]})"
    )


def _announce(trainer: Trainer, checkpoint: Checkpoint) -> None:
    before, now = checkpoint.manifest.world_size, trainer.world_size
    ranks = "" if before == now else f", saved by {before} ranks, now {now}"
    log.info("resumed from step %d%s", trainer.steps_done, ranks)


@torch.no_grad()
def _read_tensors(trainer: Trainer, checkpoint: Checkpoint) -> None:
    with checkpoint.reader() as reader:

        def fill(key: str, target: Tensor, span: tuple[int, int] | None) -> None:
            values = reader.dense(key) if span is None else reader.experts(key, span[0], target.shape[0])
            if values.shape != target.shape:
                raise CheckpointError(
                    f"{checkpoint.folder}: {key} has shape {tuple(values.shape)}, the model's is {tuple(target.shape)}"
                )
            target.copy_(values)

        for key, buffer in _fixed(trainer):
            fill(key, buffer, None)
        for entry in trainer.parameters.entries:
            fill(f"model/{entry.name}", entry.master, entry.span)
        for entry, name, tensor in trainer.optimizer.restore(checkpoint.state["updates"]):
            fill(f"optim/{entry.name}/{name}", tensor, entry.span)
