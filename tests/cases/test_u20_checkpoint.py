"""U20: a checkpoint holds every expert once under its global id, whatever ranks wrote it, and gives each rank its own.

tests/cases/test_u20_export.py has the same of exports.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.checkpoint import Manifest, folder_of
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from tests.distributed.pool import Pool
from tests.training.resharding import tensors_of
from tests.training.tiny import tiny_config, whole_state

EXPERTS = 4
STORAGES = ("owned", "sharded")
LIMIT_S = 90


def config_of(folder: Path, ranks: int, storage: str) -> TrainConfig:
    """A run of its own for each layout; copies of experts are placed where there are several ranks."""
    return tiny_config(
        folder,
        lrmoe={"storage": storage, "policy": "laer", "replica_slots": int(ranks > 1), "max_drop": 0.0},
        train={"name": f"{storage}-{ranks}", "batch_size": 4 // ranks},
        optim={"lr": 0.0},
    )


def trainer_of(config: TrainConfig) -> Trainer:
    many = dist.is_initialized() and dist.get_world_size() > 1
    return Trainer(config, dist.group.WORLD if many else None)


@torch.no_grad()
def fill_with_ids(trainer: Trainer) -> None:
    """Every number of an expert is its global id, in weights and moments; padding of shards stays zero."""
    tensors = [(entry, entry.master) for entry in trainer.parameters.entries]
    for entry, tensor in [*tensors, *((entry, moment) for entry, _, moment in trainer.optimizer.moments())]:
        if entry.span is not None:
            count = entry.cut.width(trainer.rank) if entry.cut is not None else None
            for row in range(tensor.shape[0]):
                tensor[row, ..., slice(count)] = entry.span[0] + row


def save_in(folder: Path, ranks: int) -> None:
    """Worker: one step for moments and copies, then ids everywhere."""
    for storage in STORAGES:
        trainer = trainer_of(config_of(folder, ranks, storage))
        replicas = sum(sum(record.replicas_R) for record in trainer.step().records)
        assert (replicas > 0) == (ranks > 1), "copies have to be there, or their absence shows nothing"
        fill_with_ids(trainer)
        trainer.save()


def load_in(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Worker: this rank's tensors from every checkpoint, in every storage."""
    found = []
    for storage in STORAGES:
        trainer = trainer_of(config_of(folder, ranks, storage))
        for before in (1, 2, 4):
            for stored in STORAGES:
                with torch.no_grad():
                    for entry in trainer.parameters.entries:
                        entry.master.fill_(-1.0)
                trainer.config = trainer.config.replace(train={"name": f"{stored}-{before}"})
                assert trainer.resume() == 1
                found.append({k: v for k, v in tensors_of(trainer).items() if ".experts." in k})
    return found


@pytest.fixture(scope="module")
def folder(pool2: Pool, pool4: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of 1, 2 and 4 ranks in both storages."""
    path = tmp_path_factory.mktemp("u20")
    save_in(path, 1)
    pool2.run(save_in, path, 2, limit_s=LIMIT_S)
    pool4.run(save_in, path, 4, limit_s=LIMIT_S)
    return path


@pytest.mark.distributed
def test_every_expert_is_there_once_under_names_that_know_no_rank(folder: Path) -> None:
    names = []
    for storage in STORAGES:
        for ranks in (1, 2, 4):
            root = folder / f"{storage}-{ranks}" / "checkpoints"
            manifest = Manifest.read(folder_of(root, 1))
            assert manifest.world_size == ranks
            names.append(sorted(key for entry in manifest.files for key in entry.keys))
            for entry in manifest.files:
                if match := re.match(r"experts-(\d+)-of-(\d+)", entry.name):
                    rank, each = int(match[1]), EXPERTS // ranks
                    ids = {int(key.rpartition("/expert/")[2]) for key in entry.keys}
                    assert ids == set(range(rank * each, (rank + 1) * each))
    assert all(found == names[0] for found in names)
    assert len(set(names[0])) == len(names[0])
    stems = {key.rpartition("/expert/")[0] for key in names[0] if "/expert/" in key}
    assert len(stems) == 2 * 2 * 3  # layers, projections, weights and two moments
    for stem in stems:
        assert [key for key in names[0] if key.startswith(f"{stem}/")] == [
            f"{stem}/expert/{e}" for e in range(EXPERTS)
        ]


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_expert_e_gets_what_expert_e_had(pool2: Pool, pool4: Pool, folder: Path, ranks: int) -> None:
    pools = {2: pool2, 4: pool4}
    found = [load_in(folder, 1)] if ranks == 1 else pools[ranks].run(load_in, folder, ranks, limit_s=LIMIT_S)
    for parts in zip(*found, strict=True):
        whole = whole_state(list(parts))
        assert len(whole) == 2 * 2 * 3
        for name, tensor in whole.items():
            assert tensor.shape[0] == EXPERTS, name
            for expert in range(EXPERTS):
                assert (tensor[expert] == expert).all(), f"{name}, expert {expert}"
