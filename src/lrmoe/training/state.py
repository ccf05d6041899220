"""What a trainer puts into a checkpoint and takes out of it.

model/<name>                     weights, frozen ones too (the float32 masters where they exist), and persistent buffers
model/<name>/expert/<id>         one expert's rows of an experts parameter
optim/<name>/<moment>[/expert/<id>]
state.json                       counters, totals, corpus, configuration, model, controllers of the layers
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrmoe.checkpoint import Checkpoint, Content, ExpertTensor, agreed, open_latest, save
from lrmoe.checkpoint.hf.outline import model_fields
from lrmoe.checkpoint.layers import gather_layers, layers_of
from lrmoe.checkpoint.manifest import MANIFEST, STATE
from lrmoe.checkpoint.save import expert_key
from lrmoe.distributed import Comm
from lrmoe.distributed.sharded import gather_homes
from lrmoe.errors import CheckpointError, LRMoEError
from lrmoe.training.model import fill_shards
from lrmoe.training.optim import MOMENTS
from lrmoe.training.resume import refuse_changes
from lrmoe.training.totals import Totals

if TYPE_CHECKING:
    from lrmoe.training.loop import Trainer
    from lrmoe.training.optim import Entry

log = logging.getLogger(__name__)
# state.json: name -> type
FIELDS: dict[str, type] = {
    "steps_done": int,
    "steps_skipped": int,
    "totals": dict,
    "updates": int,
    "corpus": dict,
    "config": dict,
    "model": dict,
    "layers_by_rank": list,
}


def checkpoint_root(trainer: Trainer) -> Path:
    """The folder of a run's checkpoints."""
    return trainer.config.folder / "checkpoints"


def save_trainer(trainer: Trainer) -> Path:
    """Write a checkpoint of the trainer's present state, or with `train.checkpoint_async` begin to."""
    dense: dict[str, Tensor] = dict(_fixed(trainer))
    experts: dict[str, ExpertTensor] = {}
    for key, entry, tensor in saved_tensors(trainer):
        if entry.span is None:
            dense[key] = tensor
        else:
            experts[key] = _whole_experts(trainer, entry, tensor)
    content = Content(dense=dense, experts=experts, state=trainer_state(trainer))
    root, train = checkpoint_root(trainer), trainer.config.train
    protect = () if trainer.resumed_from is None else (trainer.resumed_from,)
    if train.checkpoint_async:
        return trainer.background.start(
            root, trainer.steps_done, content, keep_last=train.keep_last, protect=protect
        )
    return save(
        root, trainer.steps_done, content, group=trainer.group, keep_last=train.keep_last, protect=protect
    )


def _whole_experts(trainer: Trainer, entry: Entry, tensor: Tensor) -> ExpertTensor:
    """This rank's part of an experts tensor as checkpoints hold it, whatever the storage: its home experts."""
    assert entry.span is not None
    if entry.cut is None:
        return ExpertTensor(values=tensor, first=entry.span[0])
    values = gather_homes(Comm(trainer.group), tensor, entry.cut)
    return ExpertTensor(values=values, first=trainer.rank * values.shape[0])


def load_trainer(trainer: Trainer) -> int:
    """Bring a trainer to the state of the newest usable checkpoint of its run."""
    root = checkpoint_root(trainer)
    trainer.background.wait()
    checkpoint = open_latest(root, group=trainer.group, check=lambda found: _check_whole(trainer, found))
    agreed(trainer.group, lambda: _check_same(trainer, checkpoint))
    agreed(trainer.group, lambda: _check_corpus(trainer, checkpoint))
    agreed(trainer.group, lambda: _read_tensors(trainer, checkpoint))
    agreed(trainer.group, lambda: _read_layers(trainer, checkpoint))
    state = checkpoint.state
    trainer.steps_done, trainer.steps_skipped = state["steps_done"], state["steps_skipped"]
    trainer.resumed_from = trainer.steps_done
    trainer.totals = Totals(**state["totals"])
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


def saved_tensors(trainer: Trainer) -> Iterator[tuple[str, Entry, Tensor]]:
    """(key, entry, this rank's tensor) of all parameters and of what the optimizer keeps."""
    for entry in (*trainer.parameters.entries, *trainer.parameters.frozen):
        yield f"model/{entry.name}", entry, entry.master
    for entry, name, tensor in trainer.optimizer.moments():
        yield f"optim/{entry.name}/{name}", entry, tensor


def trainer_state(trainer: Trainer) -> dict[str, Any]:
    """The JSON state of a checkpoint; every rank calls it."""
    return {
        "steps_done": trainer.steps_done,
        "steps_skipped": trainer.steps_skipped,
        "totals": trainer.totals.state_dict(),
        "updates": trainer.optimizer.updates,
        "corpus": {"name": trainer.corpus.name, "sha256": trainer.corpus.fingerprint},
        "config": trainer.config.to_dict(),
        "model": model_fields(trainer.model.config),
        "layers_by_rank": gather_layers(trainer.group, trainer.handle.state_dict),
    }


def _check_whole(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that nothing could resume from, whatever the files' hashes say. Changes nothing."""
    _check_state(checkpoint)
    if _differences(trainer, checkpoint):  # which have an error of their own
        return
    found, needed = checkpoint.manifest.file_of(), dict(_needed(trainer, checkpoint.state["updates"]))
    missing = [key for key in needed if key not in found]
    if missing:
        raise CheckpointError(f"{checkpoint.folder / MANIFEST}: incomplete: lists no tensor {missing[0]!r}")
    with checkpoint.reader() as reader:
        for key, shape in needed.items():
            if reader.shape(key) != shape:
                raise CheckpointError(
                    f"{checkpoint.folder}: {key} has shape {reader.shape(key)}, the model's is {shape}"
                )
    before = trainer.handle.state_dict()
    _read_layers(trainer, checkpoint)
    trainer.handle.load_state_dict(before)


def _check_state(checkpoint: Checkpoint) -> None:
    state, manifest, path = checkpoint.state, checkpoint.manifest, checkpoint.folder / STATE
    for name, kind in FIELDS.items():
        if type(state.get(name)) is not kind:
            raise CheckpointError(f"{path}: {name}={state.get(name)!r}: must be of type {kind.__name__}")
    if state["steps_done"] != manifest.step:
        raise CheckpointError(f"{path}: steps_done={state['steps_done']}: the manifest says {manifest.step}")
    if not 0 <= state["updates"] <= state["steps_done"]:
        raise CheckpointError(f"{path}: updates={state['updates']}: must be 0 to {state['steps_done']}")
    if len(state["layers_by_rank"]) != manifest.world_size:
        ranks = len(state["layers_by_rank"])
        raise CheckpointError(
            f"{path}: layers_by_rank of {ranks} ranks: the manifest says {manifest.world_size}"
        )
    for name in ("name", "sha256"):
        if not isinstance(state["corpus"].get(name), str):
            raise CheckpointError(f"{path}: corpus.{name}={state['corpus'].get(name)!r}: must be text")
    try:
        Totals(**state["totals"])
    except TypeError as error:
        raise CheckpointError(f"{path}: totals: {error}") from error


def _needed(trainer: Trainer, updates: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys and shapes of all tensors that this rank reads."""
    yield from ((key, tuple(buffer.shape)) for key, buffer in _fixed(trainer))
    for entry in (*trainer.parameters.entries, *trainer.parameters.frozen):
        shape = tuple(entry.master.shape)
        row = shape[1:] if entry.cut is None else (entry.cut.rows, entry.cut.columns)
        trained = updates > 0 and entry.parameter.requires_grad
        moments = [f"optim/{entry.name}/{name}" for name in MOMENTS if trained]
        for key in (f"model/{entry.name}", *moments):
            if entry.span is None:
                yield key, shape
            else:
                first = entry.span[0]
                yield from ((expert_key(key, first + i), row) for i in range(shape[0]))


def _differences(trainer: Trainer, checkpoint: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Name of a field that must be the same -> its values in the checkpoint and in this run, where they differ."""
    saved, now = checkpoint.state["model"], model_fields(trainer.model.config)
    # A field that only one version of transformers knows says nothing of the model.
    both = {f"model.{name}": (saved[name], now[name]) for name in now if name in saved}
    loop = checkpoint.state["config"].get("train")
    seed = loop.get("seed") if isinstance(loop, dict) else None
    pairs = {**both, "train.seed": (seed, trainer.config.train.seed)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _check_same(trainer: Trainer, checkpoint: Checkpoint) -> None:
    for name, (saved, now) in _differences(trainer, checkpoint).items():
        raise CheckpointError(
            f"{checkpoint.folder}: {name} is {saved!r} in the checkpoint and {now!r} in this run; resume with the "
            "same, or start another run"
        )


def _check_corpus(trainer: Trainer, checkpoint: Checkpoint) -> None:
    saved, corpus = checkpoint.state["corpus"], trainer.corpus
    if saved["sha256"] == corpus.fingerprint:
        return
    refuse_changes(checkpoint.state["config"].get("data", {}), trainer.config.to_dict()["data"], "data")
    raise CheckpointError(
        f"{checkpoint.folder}: was trained on another corpus ({saved['name']}, SHA-256 {saved['sha256'][:12]}) "
        f"than the one given ({corpus.name}, {corpus.fingerprint[:12]})"
    )


def _announce(trainer: Trainer, checkpoint: Checkpoint) -> None:
    before, now = checkpoint.manifest.world_size, trainer.world_size
    ranks = "" if before == now else f", saved by {before} ranks, now {now}"
    log.info("resumed from step %d%s", trainer.steps_done, ranks)


def _read_layers(trainer: Trainer, checkpoint: Checkpoint) -> None:
    try:
        own = layers_of(checkpoint.state["layers_by_rank"], trainer.rank, trainer.world_size)
        trainer.handle.load_state_dict(own)
    except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
        said = str(error) if isinstance(error, LRMoEError) else repr(error)
        raise CheckpointError(f"{checkpoint.folder / STATE}: layers_by_rank: {said}") from error


@torch.no_grad()
def _read_tensors(trainer: Trainer, checkpoint: Checkpoint) -> None:
    with checkpoint.reader() as reader:

        def read(key: str, shape: Sequence[int], first: int | None) -> Tensor:
            return reader.dense(key) if first is None else reader.experts(key, first, shape[0])

        def fill(key: str, target: Tensor, entry: Entry) -> None:
            if entry.cut is not None:
                one = (1, entry.cut.rows, entry.cut.columns)
                fill_shards(target, entry.cut, trainer.rank, lambda expert: read(key, one, expert))
            else:
                target.copy_(read(key, target.shape, None if entry.span is None else entry.span[0]))

        for key, buffer in _fixed(trainer):
            buffer.copy_(read(key, buffer.shape, None))
        for entry in (*trainer.parameters.entries, *trainer.parameters.frozen):
            fill(f"model/{entry.name}", entry.master, entry)
        for entry, name, tensor in trainer.optimizer.restore(checkpoint.state["updates"]):
            fill(f"optim/{entry.name}/{name}", tensor, entry)
