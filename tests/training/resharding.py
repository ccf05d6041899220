"""A run that is saved in one layout of ranks and storage and goes on in another: the pieces, for tests and benchmark.

    save_in(folder, ranks, storages)        two steps, save, evaluate, the third step: what an unbroken run does
    load_in(folder, saved, ranks, storages) the same third step from every checkpoint that was saved
    compare(through, found)                 losses, weights and moments of both

Everything is in float64, nothing is dropped, and the text of a step does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.distributed import Comm
from lrmoe.distributed.sharded import gather_homes
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from lrmoe.training.state import saved_tensors
from tests.training.tiny import SHAPE, float64_model, tiny_config, whole_state

ROWS, STEPS = 8, 2  # sequences of a step over all ranks; steps before saving
ODD = {"hidden_size": 30, "moe_intermediate_size": 15}  # no number of ranks divides an expert evenly
Layout = tuple[int, str]  # ranks, storage
EXACT = {"max_drop": 0.0, "warmup_steps": 0, "policy": "laer", "replica_slots": 1}


@dataclass(frozen=True, kw_only=True)
class Went:
    """One rank's part of where a run went: losses of all ranks, and its part of all tensors with a mark of experts."""

    losses: tuple[float, float]  # of evaluation after STEPS, of the step after them
    tensors: dict[str, Any]


def config_of(folder: Path, layout: Layout, experts: int = 8, **lrmoe: Any) -> TrainConfig:
    """The run of a layout, in a folder of its own."""
    ranks, storage = layout
    shape = {**SHAPE, **ODD, "num_experts": experts, "num_hidden_layers": 1}
    slots = {"replica_slots": min(1, experts - experts // ranks)}
    return tiny_config(
        folder,
        model={"overrides": shape},
        lrmoe={**EXACT, **slots, "storage": storage, **lrmoe},
        optim={"warmup_steps": 0, "clip_norm": 0.2},
        train={"batch_size": ROWS // ranks, "eval_batches": 1, "name": f"{storage}-{ranks}"},
    )


def trainer_of(config: TrainConfig) -> Trainer:
    """In the group of all ranks, or alone."""
    group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    return Trainer(config, group, model=float64_model(config, group))


def tensors_of(trainer: Trainer) -> dict[str, Any]:
    """Name -> (tensor, mark of experts): masters and moments, shards as this rank's home experts."""
    found: dict[str, Any] = {}
    for name, entry, tensor in saved_tensors(trainer):
        if entry.cut is not None:
            found[name] = (gather_homes(Comm(trainer.group), tensor, entry.cut).detach().clone(), "home")
        else:
            found[name] = (tensor.detach().clone(), entry.span)
    return found


def go_on(trainer: Trainer) -> Went:
    """Evaluate, and one more step."""
    losses = (trainer.evaluate(), trainer.step().loss)
    return Went(losses=losses, tensors=tensors_of(trainer))


def save_in(folder: Path, ranks: int, storages: Sequence[str], **lrmoe: Any) -> dict[str, Went]:
    """Worker: a run of each storage that is saved after STEPS and then goes on."""
    found = {}
    for storage in storages:
        trainer = trainer_of(config_of(folder, (ranks, storage), **lrmoe))
        for _ in range(STEPS):
            trainer.step()
        trainer.save()
        found[storage] = go_on(trainer)
    return found


def load_in(
    folder: Path, saved: Sequence[Layout], ranks: int, storages: Sequence[str], **lrmoe: Any
) -> dict[tuple[Layout, str], Went]:
    """Worker: every checkpoint goes on here, in every storage."""
    found = {}
    for storage in storages:
        trainer = trainer_of(config_of(folder, (ranks, storage), **lrmoe))
        for layout in saved:  # one after the other: nothing of the last may stay
            name = config_of(folder, layout).train.name
            trainer.config = trainer.config.replace(train={"name": name})
            assert trainer.resume() == STEPS
            found[layout, storage] = go_on(trainer)
    return found


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a run that went on in another layout is from the unbroken one.

    Attributes:
        worst: largest difference of a number over the largest number of its tensor (losses: over themselves).
        where: of which tensor or loss. bitwise: whether nothing differs at all.
    """

    worst: float
    where: str
    bitwise: bool


def compare(through: Sequence[Went], found: Sequence[Went]) -> Difference:
    """Of all ranks of both runs, whichever layouts they have."""
    wanted, got = (
        {**whole_state([went.tensors for went in ranks]), **_losses(ranks)} for ranks in (through, found)
    )
    assert wanted.keys() == got.keys()
    apart = {name: _apart(wanted[name], got[name]) for name in wanted}
    where = max(apart, key=lambda name: apart[name])
    same = all(torch.equal(wanted[name], got[name]) for name in wanted)
    return Difference(worst=apart[where], where=where, bitwise=same)


def _losses(ranks: Iterable[Went]) -> dict[str, Tensor]:
    (losses,) = {went.losses for went in ranks}  # the same on all ranks
    return {
        f"loss of {name}": torch.tensor(value).double()
        for name, value in zip(("evaluation", "step"), losses, strict=True)
    }


def _apart(wanted: Tensor, got: Tensor) -> float:
    assert wanted.shape == got.shape
    most = float(wanted.abs().max())
    apart = float((wanted - got).abs().max())
    return apart / most if most else apart
