"""What every rank of the stage does: step by step, layer by layer, each system in turn.

Shape letters: T tokens of a rank, H hidden, S steps, R ranks, E experts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.errors import LRMoEError
from lrmoe.experiments.compare.executor import LIMIT, differs_by
from lrmoe.experiments.compare.racers import turns
from lrmoe.experiments.stage.inputs import Routed, Rows, StageSize, draw_weights
from lrmoe.experiments.stage.lanes import Actor, Weights, reference_of
from lrmoe.experiments.stage.lines import Call, append, measured
from lrmoe.experiments.stage.run import Block, Step
from lrmoe.experiments.trajectories.trajectory import RecordedTokens, Trajectory
from lrmoe.planning.problem import IntArray
from lrmoe.training.records import gather_records

SAY_EVERY_S = 20.0


def execute(steps: Sequence[Step], size: StageSize, out: Path) -> None:
    """Execute steps, block by block; every rank calls it, rank 0 writes.

    Before a block's first step its calls run once uncounted: caches and buffers are warm then, and systems that learn
    from scores have seen some.
    """
    progress = _Progress(steps) if dist.get_rank() == 0 else None
    for _, group in groupby(steps, key=lambda step: step.block):
        theirs = list(group)
        scene = Scene(theirs[0], size)
        everybody = tuple(dict.fromkeys(name for step in theirs for name in step.systems))
        scene.play(Step(block=theirs[0].block, number=theirs[0].number, systems=everybody, balanced=True), 0)
        for turn, step in enumerate(theirs):
            calls = scene.play(step, turn)
            if progress is not None:
                append(out, calls)
                progress.advance(step)


class Scene:
    """A block on this rank: its trajectories, weights and systems."""

    def __init__(self, first: Step, size: StageSize) -> None:
        block = first.block
        self._block, self._size = block, size
        loaded = {folder: Trajectory.load(folder) for folder in dict.fromkeys(block.folders.values())}
        self._of = {name: loaded[block.folders[name]] for name in block.last_step}
        self._first = some = next(iter(self._of.values()))
        self._calls: dict[tuple[int, int], dict[int, RecordedTokens]] = {}
        self._layers = sorted({call.layer for call in some.calls(first.number)})
        counts_SRE = shared_by(some.counts(self._layers[0]), size.ranks)
        self._experts, self._pairs = counts_SRE.shape[2], int(counts_SRE[0, 0].sum())
        self._repeats = size.repeats(self._pairs)
        self._rank = dist.get_rank()
        self._weights = {layer: self._draw(layer) for layer in self._layers}
        self._actors = {name: self._actor(name, name) for name in self._of}
        references = dict.fromkeys(reference_of(name) for name in self._of)
        self._references = {name: self._actor(name, name.partition(":")[2]) for name in references}

    def play(self, step: Step, turn: int) -> list[Call]:
        """Execute one step: what every system's calls took, on all ranks alike."""
        self._calls.clear()
        found: dict[str, list[Call]] = {}
        for place, layer in enumerate(self._layers):
            rows = self._rows(step.number, layer)
            results: list[tuple[str, tuple[Tensor, Tensor]]] = []
            names = turns(self._names(step, layer), turn * len(self._layers) + place)
            for name in names:
                actor = self._references.get(name) or self._actors[name]
                routed = self._routed(actor, step.number, layer)
                dist.barrier()  # what the rig does before is not to be waited for under the clock
                result = actor.run(step.number, layer, routed, rows, self._weights[layer])
                if actor.exact and not actor.balanced:
                    results.append((name, result))
            if step.balanced:  # not at every step: comparing takes a tenth of a call
                _agree(results, self._block, step.number, layer)
        for name in (*step.systems, *(self._references if step.balanced else ())):
            actor = self._references.get(name) or self._actors[name]
            records = gather_records(actor.end_step(), dist.group.WORLD, torch.device("cpu"))
            about = dict(zip(("model", "aux", "seed", "activations"), self._block.place, strict=True))
            found[name] = measured(about, name, step.number, records)
        return [call for calls in found.values() for call in calls]

    def _names(self, step: Step, layer: int) -> list[str]:
        """Who runs a layer of a step; balanced counts are the same in all layers, so one of them is enough."""
        references = self._references if step.balanced and layer == self._layers[0] else ()
        return [*step.systems, *references]

    def _actor(self, name: str, system: str) -> Actor:
        trajectory = self._of.get(system, self._first)
        counts: Mapping[int, IntArray] = {
            n: shared_by(trajectory.counts(n), self._size.ranks) * self._repeats for n in self._layers
        }
        return Actor(
            name, self._layers, self._experts, size=self._size, pairs=self._pairs * self._repeats,
            seed=self._block.seed, counts_SRE=counts, group=dist.group.WORLD, activations=self._block.activations,
        )  # fmt: skip

    def _draw(self, layer: int) -> Weights:
        size = self._size
        local = self._experts // size.ranks
        return draw_weights(local, size.hidden, size.width, self._block.seed, layer, self._rank)

    def _rows(self, step: int, layer: int) -> Rows:
        tokens = len(self._recorded(self._first, step, layer).ids_TK) // self._size.ranks * self._repeats
        return Rows.draw(tokens, self._size.hidden, self._block.seed, layer, self._rank, step)

    def _recorded(self, trajectory: Trajectory, step: int, layer: int) -> RecordedTokens:
        """A layer's call of the step; a step is read once."""
        key = (id(trajectory), step)
        if key not in self._calls:
            self._calls[key] = {call.layer: call for call in trajectory.calls(step)}
        return self._calls[key][layer]

    def _routed(self, actor: Actor, step: int, layer: int) -> Routed:
        call = self._recorded(self._of.get(actor.system.name, self._first), step, layer)
        whole = Routed(ids_TK=call.ids_TK, alpha_TK=call.alpha_TK, grad_norm_T=call.grad_norm_T)
        mine = whole.of_rank(self._rank, self._size.ranks, self._repeats)
        return mine.balanced(self._experts, step * self._size.ranks + self._rank) if actor.balanced else mine


def shared_by(counts_SRE: IntArray, ranks: int) -> IntArray:
    """Counts of a batch that fewer ranks share in the same order, int64 (S, ranks, E).

    Raises:
        LRMoEError: `ranks` does not divide the ranks of the counts.
    """
    steps, recorded, experts = counts_SRE.shape
    if recorded % ranks:
        raise LRMoEError(f"ranks={ranks}: must divide the trajectory's {recorded} ranks")
    return counts_SRE.reshape(steps, ranks, recorded // ranks, experts).sum(axis=2)


def _agree(results: Sequence[tuple[str, tuple[Tensor, Tensor]]], block: Block, step: int, layer: int) -> None:
    """Exact systems that executed the same call gave the same output and input gradient, to rounding.

    Raises:
        LRMoEError: two differ by more.
    """
    for name, tensors in results[1:]:
        for what, found, expected in zip(("output", "input gradient"), tensors, results[0][1], strict=True):
            eps = differs_by(found, expected)
            if not eps <= LIMIT[expected.dtype]:
                raise LRMoEError(
                    f"{block.title}, step {step}, layer {layer}: the {what} of {name!r} differs from that of "
                    f"{results[0][0]!r} by {eps:.3g} eps of its largest entry"
                )


class _Clock(Protocol):
    def __call__(self) -> float: ...


class _Progress:
    """Lines on stderr: what is done, and when the rest will be."""

    def __init__(self, steps: Sequence[Step], clock: _Clock = time.monotonic) -> None:
        self._total = sum(len(step.systems) for step in steps)
        self._done, self._clock = 0, clock
        self._start = self._said = clock()

    def advance(self, step: Step) -> None:
        """A step is written."""
        self._done += len(step.systems)
        now = self._clock()
        if now - self._said < SAY_EVERY_S and self._done < self._total:
            return
        self._said = now
        left = (now - self._start) * (self._total - self._done) / self._done
        print(
            f"stage: {step.block.title}, step {step.number}: {self._done / self._total:.0%} done, "
            f"{now - self._start:.0f} s, {left / 60:.1f} min to go",
            file=sys.stderr,
            flush=True,
        )
