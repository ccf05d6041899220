"""U21: the optimizer's state fits every layout and every set of copies; copies own none of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lrmoe.checkpoint import Manifest, folder_of
from lrmoe.planning import LayerPlan, Problem
from lrmoe.planning.policies._layout import home_layout, make_plan, split_evenly
from lrmoe.training.loop import Trainer
from tests.distributed.pool import Pool
from tests.training.resharding import STEPS, Went, compare, config_of, go_on
from tests.training.tiny import float64_model

EXPERTS, LIMIT_S = 4, 60


@dataclasses.dataclass(frozen=True)
class CopyOf:
    """One expert has a copy on every rank, all others are at home."""

    expert: int

    def __call__(self, problem: Problem) -> LayerPlan:
        copies_RE = home_layout(problem.topology)
        copies_RE[:, self.expert] = 1
        return make_plan(problem, copies_RE, split_evenly(problem.counts_RE, copies_RE))


POLICIES: dict[str, Callable[[Problem], LayerPlan] | None] = {
    "a copy of 0": CopyOf(0),
    "a copy of 3": CopyOf(3),
    "no copies": None,
}


def trainer_of(folder: Path, ranks: int, storage: str, copies: str) -> Trainer:
    group = dist.group.WORLD if ranks > 1 else None
    config = config_of(folder, (ranks, storage), EXPERTS, policy="megatron", replica_slots=0)
    config = config.replace(train={"name": "run"})
    return Trainer(config, group, model=float64_model(config, group), policy=POLICIES[copies])


def unbroken(folder: Path, storage: str) -> tuple[Went, list[int]]:
    """Worker: two steps, save, the third; which ranks held how many copies."""
    trainer = trainer_of(folder, 2, storage, "a copy of 0")
    records = [record for _ in range(STEPS) for record in trainer.step().records]
    trainer.save()
    return go_on(trainer), np.sum([record.replicas_R for record in records], axis=0).tolist()


def third_step(folder: Path, ranks: int, storage: str, copies: str) -> Went:
    trainer = trainer_of(folder, ranks, storage, copies)
    assert trainer.resume() == STEPS
    moments = sum(1 for _ in trainer.optimizer.moments())
    assert moments == 2 * len(trainer.parameters.entries), "each parameter its two, copies none"
    return go_on(trainer)


@pytest.mark.distributed
@pytest.mark.parametrize("storage", ["owned", "sharded"])
def test_the_third_step_is_the_unbroken_runs(pool2: Pool, pool4: Pool, tmp_path: Path, storage: str) -> None:
    """With fewer and more ranks, shards of uneven size, another expert's copies and none."""
    ranks = pool2.run(unbroken, tmp_path, storage, limit_s=LIMIT_S)
    through = [went for went, _ in ranks]
    assert all(copies == [0, STEPS] for _, copies in ranks), "the case has copies on the second rank"
    keys = Manifest.read(folder_of(tmp_path / "run" / "checkpoints", STEPS)).file_of()
    owned = [key for key in keys if key.startswith("optim/") and "/expert/" in key]
    assert len(owned) == 2 * 2 * EXPERTS  # projections, moments
    cases: list[tuple[int, str, str]] = [
        (1, storage, "no copies"),
        (2, storage, "a copy of 0"),
        (2, storage, "a copy of 3"),
        (2, storage, "no copies"),
        (4, "owned", "a copy of 0"),
        (4, "sharded", "no copies"),
    ]
    pools: dict[int, Any] = {2: pool2, 4: pool4}
    for size, other, copies in cases:
        if size == 1:
            found = [third_step(tmp_path, 1, other, copies)]
        else:
            found = pools[size].run(third_step, tmp_path, size, other, copies, limit_s=LIMIT_S)
        difference = compare(through, found)
        assert difference.worst <= 1e-10, f"{size} ranks, {other}, {copies}: {difference}"
        if (size, copies) == (2, "a copy of 0"):
            assert difference.bitwise, difference
