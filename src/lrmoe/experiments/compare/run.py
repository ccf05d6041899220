"""Run the same training under several systems, their steps interleaved in the same processes.

parent: compare(experiment) -- run_workers --> rank 0 .. R-1: contest(experiment)
    one racer per training run; round i: every one that has not arrived does step i, each leading in turn
    a step's loss and records are the same on all ranks, so all agree on who has arrived; rank 0 writes
parent: summary.json
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import IO, Any

import torch.distributed as dist

from lrmoe.checkpoint import agreed
from lrmoe.errors import LRMoEError
from lrmoe.experiments.compare.config import Experiment
from lrmoe.experiments.compare.cost import LINK_RULE, link_speed
from lrmoe.experiments.compare.lane import Lane
from lrmoe.experiments.compare.live import Place, Progress
from lrmoe.experiments.compare.racers import Racer, lanes_of, make_racers, turns
from lrmoe.experiments.writing import json_text
from lrmoe.report.data import BASELINE
from lrmoe.telemetry.figures import environment, finite
from lrmoe.training.data import Corpus
from lrmoe.training.folder import METRICS, SUMMARY, check_free, claim
from lrmoe.training.kinds import MATRIX
from lrmoe.training.launch import run_workers
from lrmoe.training.traces import TraceLog, about_model, wanted

_STATED = "Link speed: as stated in the configuration."
_NO_LINK = f"No link speed, so no critical path: it needs {BASELINE}, or compare.link_bytes_per_s."
SAME_LOSS = 1e-5  # relative: first losses of systems that started from the same weights and data


def compare(experiment: Experiment, *, overwrite: bool = False, place: Place | None = None) -> dict[str, Any]:
    """Run a comparison and write its folder: config.toml, metrics.jsonl, trace.parquet, summary.json.

    Args:
        overwrite: replace an earlier run of the same name.
        place: which of several comparisons it is, for the display.

    Returns:
        The summary. `reached` is false for a system that does not reach the target within `max_steps`, or without a
        target for one whose loss left the finite numbers.

    Raises:
        ConfigError: the folder cannot be written, or holds an earlier run and `overwrite` is not set.
        LRMoEError: a worker failed.
    """
    check_free(experiment.train, overwrite=overwrite, kinds=("compare", MATRIX))
    begin = time.monotonic()
    found = run_workers("lrmoe.experiments.compare.run:contest", experiment.compare.ep, (experiment, place))[
        0
    ]
    summary = {**_header(experiment), **found, "total_s": time.monotonic() - begin}
    (experiment.folder / SUMMARY).write_text(json_text(summary), encoding="utf-8")
    return summary


def _header(experiment: Experiment) -> dict[str, Any]:
    c = experiment.compare
    return {
        "kind": "compare",
        "preset": experiment.preset,
        "target_loss": c.aims[-1] if c.aims else None,
        "targets": list(c.aims),
        "against": c.base,
        "regime": c.regime,
        "router_aux_loss": experiment.train.train.router_aux_loss,
        "smoothing": {"kind": "mean of the last steps", "steps": c.smoothing_steps},
        "max_steps": c.max_steps,
        "world_size": c.ep,
        "seed": experiment.train.train.seed,
        "model": experiment.train.to_dict()["model"],
        "context": environment(),
    }


def contest(experiment: Experiment, place: Place | None = None) -> dict[str, Any]:
    """What every rank runs; returns the measured part of the summary."""
    c, group = experiment.compare, dist.group.WORLD
    corpus = agreed(group, lambda: Corpus.load(experiment.train.data))
    racers = make_racers(experiment, group, corpus)
    lanes = lanes_of(racers, experiment)
    link = _Link(experiment, racers)
    with ExitStack() as stack:
        main = dist.get_rank() == 0
        agreed(group, lambda: claim(experiment.train, experiment.write, fresh=True) if main else None)
        out, progress = _outputs(experiment, lanes, stack, place) if main else (None, None)
        trace = stack.enter_context(_trace(experiment, racers[0])) if main else None
        for i in range(c.max_steps):
            for racer in turns(racers, i):
                racer.step(out, trace)
            if i == 0:
                _check_same_start(lanes)
            link.settle()
            if progress is not None:
                progress.update(i + 1, link.bytes_per_s)
            racers = [racer for racer in racers if racer.running]
            if not racers:
                break
        link.settle(final=True)
    return {
        "link_bytes_per_s": link.bytes_per_s,
        "link_rule": link.rule,
        "common_loss": common_loss(lanes),
        "systems": {lane.system.name: lane.summary(link.bytes_per_s, common_loss(lanes)) for lane in lanes},
    }


def common_loss(lanes: Sequence[Lane]) -> float | None:
    """The lowest smoothed loss that every system that fits its budget reached at some step, or None without one."""
    loss = max((lane.lowest for lane in lanes if "infeasible" not in lane.extra), default=math.inf)
    return finite(loss)


def _outputs(
    experiment: Experiment, lanes: Sequence[Lane], stack: ExitStack, place: Place | None
) -> tuple[IO[str], Progress]:
    """metrics.jsonl and the display, on rank 0."""
    c = experiment.compare
    out = stack.enter_context((experiment.folder / METRICS).open("w", encoding="utf-8"))
    every = experiment.train.train.log_every
    target = c.aims[-1] if c.aims else None
    progress = Progress(lanes, target_loss=target, max_steps=c.max_steps, every=every, place=place)
    return out, stack.enter_context(progress)


def _trace(experiment: Experiment, racer: Racer) -> AbstractContextManager[TraceLog | None]:
    if not wanted(experiment.train.train.trace):
        return nullcontext()
    return TraceLog(experiment.folder, about=about_model(racer.trainer.model.config))


class _Link:
    """The speed of the link: stated, or taken once from the first steps of fixed ownership."""

    def __init__(self, experiment: Experiment, racers: Sequence[Racer]) -> None:
        self.bytes_per_s = experiment.compare.link_bytes_per_s
        self.rule = _STATED if self.bytes_per_s is not None else LINK_RULE
        self._skip, self._steps = experiment.compare.link_skip_steps, experiment.compare.link_steps
        lanes = [lane for racer in racers for lane in (*racer.lanes, *racer.unlisted)]
        self._lane = next((lane for lane in lanes if lane.system.name == BASELINE), None)
        if self._lane is None and self.bytes_per_s is None:
            self.rule = _NO_LINK

    def settle(self, final: bool = False) -> None:
        """Take the speed as soon as the steps are in; at the end from the steps there are."""
        if self.bytes_per_s is not None or self._lane is None:
            return
        costs = [line.cost for line in self._lane.lines]
        if len(costs) >= self._skip + self._steps:
            self.bytes_per_s = link_speed(costs[self._skip : self._skip + self._steps])
        elif final and costs:
            self.bytes_per_s = link_speed(costs[self._skip :] or costs)


def _check_same_start(lanes: Sequence[Lane]) -> None:
    """The first loss is computed before any update: it differs only if weights or data do."""
    losses = [lane.lines[0].loss for lane in lanes if lane.lines]
    if losses and max(losses) - min(losses) > SAME_LOSS * abs(losses[0]):
        raise LRMoEError(f"the systems did not start from the same weights and data: first losses {losses}")
