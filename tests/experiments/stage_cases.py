"""Synthetic trajectories, and cases that every rank of a pool runs: the stage on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lrmoe.experiments.stage import rank as stage_rank
from lrmoe.experiments.stage.inputs import Routed, Rows, StageSize, draw_weights
from lrmoe.experiments.stage.lanes import Actor
from lrmoe.experiments.stage.lines import MAIN
from lrmoe.experiments.stage.run import Block, Step
from lrmoe.experiments.trajectories.trajectory import RecordedTokens

EXPERTS, SLOTS, ROWS, LENGTH, STEPS = 16, 2, 8, 16, 40


class Synthetic:
    """A trajectory of two layers whose popular experts drift; as much of `Trajectory` as the stage reads."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @classmethod
    def load(cls, folder: Path) -> Synthetic:
        """The folder's name is the seed."""
        return cls(int(folder.name))

    def routed(self, step: int, layer: int) -> Routed:
        """The batch of a step."""
        rng = np.random.default_rng([self.seed, layer])
        fond, phase = rng.normal(size=EXPERTS), rng.uniform(0, 6, EXPERTS)
        rng = np.random.default_rng([self.seed, layer, step])
        taste = fond + np.sin(phase + step / 5) + rng.normal(size=(ROWS * LENGTH, EXPERTS))
        ids = np.argsort(-taste, axis=1)[:, :SLOTS].copy()
        alpha = torch.from_numpy(np.take_along_axis(taste, ids, 1)).float().softmax(dim=1)
        norm = torch.from_numpy(np.exp(rng.normal(size=ROWS * LENGTH))).float()
        return Routed(ids_TK=torch.from_numpy(ids), alpha_TK=alpha, grad_norm_T=norm)

    def counts(self, layer: int) -> NDArray[np.int64]:
        """int64 (S, R, E), the batch's rows shared by the ranks in order."""
        ranks = dist.get_world_size() if dist.is_initialized() else 4
        by_rank = [self.routed(step, layer).ids_TK.view(ranks, -1).numpy() for step in range(1, STEPS + 1)]
        return np.array([[np.bincount(ids, minlength=EXPERTS) for ids in step] for step in by_rank])

    def calls(self, step: int) -> list[RecordedTokens]:
        """The recorded calls of a step."""
        return [RecordedTokens(layer=layer, **vars(self.routed(step, layer))) for layer in (0, 1)]


def size() -> StageSize:
    """Small layers for this pool."""
    return StageSize(hidden=16, width=8, ranks=dist.get_world_size(), pairs_over_width=20)


def played(
    systems: tuple[str, ...], numbers: tuple[int, ...], out: str | None = None, activations: str = MAIN
) -> list[Any]:
    """The calls of some steps by these systems; written to `out` instead where given."""
    block = Block(
        model="tiny",
        aux=0.0,
        seed=3,
        folders={name: Path(f"/{1 if name.startswith('lrmoe') else 0}") for name in systems},
        last_step=dict.fromkeys(systems, STEPS),
        activations=activations,
    )
    steps = [Step(block=block, number=n, systems=systems, balanced=n == numbers[0]) for n in numbers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_rank, "Trajectory", Synthetic)
        if out is not None:
            stage_rank.execute(steps, size(), Path(out))
            return []
        scene = stage_rank.Scene(steps[0], size())
        return [call for turn, step in enumerate(steps) for call in scene.play(step, turn)]


def as_if_every_step(name: str, every: int) -> tuple[list[Any], list[Any], list[int], list[int]]:
    """Plans and bytes of experts at every `every`-th step: of a layer that ran each step, and of one that did not."""
    found: list[tuple[list[Any], list[int]]] = []
    for stride in (1, every):
        found.append(_history(name, stride, every))
    return found[0][0], found[1][0], found[0][1], found[1][1]


def _history(name: str, stride: int, every: int) -> tuple[list[Any], list[int]]:
    of, trajectory, layer = size(), Synthetic(0), 0
    repeats = of.repeats(ROWS * LENGTH * SLOTS // of.ranks)
    counts = trajectory.counts(layer) * repeats
    actor = Actor(
        name, [layer], EXPERTS, size=of, pairs=int(counts[0, 0].sum()), seed=0,
        counts_SRE={layer: counts}, group=dist.group.WORLD,
    )  # fmt: skip
    weights = draw_weights(EXPERTS // of.ranks, of.hidden, of.width, dist.get_rank())
    plans, sent = [], []
    for step in range(stride, STEPS + 1, stride):
        routed = trajectory.routed(step, layer).of_rank(dist.get_rank(), of.ranks, repeats)
        actor.run(step, layer, routed, Rows.draw(len(routed.ids_TK), of.hidden, step), weights)
        (record,) = actor.end_step()
        if step % every == 0:
            plans.append((record.forward_load_R, record.backward_load_R, record.replicas_R))
            sent.append(record.bytes.get("replicas", 0))
    return plans, sent
