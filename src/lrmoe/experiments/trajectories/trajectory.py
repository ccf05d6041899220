"""A training run in one process, planned as if over several ranks, with what others need to execute it again.

    run_trajectory(job) --> folder/config.toml    the resolved configuration
                                   steps.jsonl    loss, kept share, energy, variance: a line a step
                                   counts.npz     pairs from each source to each expert, of every step and layer
                                   calls-N.npz    ids, routing weights, gradient norms of recorded steps
                                   DONE           the job, when all else is there

A folder with DONE is not run again; one without is begun anew.

Shape letters: S steps, R ranks, E experts, T tokens of the batch, K experts per token.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lrmoe.errors import ConfigError
from lrmoe.experiments.trajectories.recorder import Recorder
from lrmoe.experiments.trajectories.regimes import corpus_of
from lrmoe.experiments.trajectories.smoothing import LossWindow
from lrmoe.experiments.trajectories.virtual import QUOTA_RULES, ExecutionSize, by_count, spread
from lrmoe.experiments.writing import write_whole
from lrmoe.integrations.transformers import watch_layers
from lrmoe.layer import MoELayer
from lrmoe.planning.policies import Policy, get_policy
from lrmoe.planning.problem import IntArray
from lrmoe.telemetry.figures import finite
from lrmoe.telemetry.layers import over_all
from lrmoe.training.config import TrainConfig
from lrmoe.training.loop import Trainer
from lrmoe.training.metrics import StepMetrics

CONFIG, STEPS, COUNTS, DONE = "config.toml", "steps.jsonl", "counts.npz", "DONE"
SMOOTHING = 10  # steps of the smoothed loss
RECORD_EVERY = 10  # steps between those whose calls are recorded
_FINAL_SHARE, _FINAL_LEAST = 0.1, 20  # of the steps, whose mean is the final loss

FloatArray = NDArray[np.float64]
Report = Callable[[int], None]  # of the step that is done


@dataclass(frozen=True, kw_only=True)
class TrajectoryJob:
    """What is trained, planned and recorded.

    Attributes:
        config: the run; one micro-batch a step, of as many sequences for every rank.
        folder: where it goes.
        size: of the layers in execution: ranks that quotas are planned for, and what copies cost there.
        record_every: steps between those whose calls are recorded; 0 records none.
        quota_rule: "variance", as the policy learns from scores, or "count": every expert the same share.
    """

    config: TrainConfig
    folder: Path
    size: ExecutionSize = field(default_factory=ExecutionSize)
    record_every: int = RECORD_EVERY
    quota_rule: str = "variance"

    def __post_init__(self) -> None:
        train, ranks = self.config.train, self.size.ranks
        if train.batch_size % ranks:
            raise ConfigError(
                f"train.batch_size={train.batch_size}: must be a multiple of the {ranks} ranks that are planned for"
            )
        if train.accumulate != 1:
            raise ConfigError(
                f"train.accumulate={train.accumulate}: a trajectory has one batch a step; valid: 1"
            )
        if self.quota_rule not in QUOTA_RULES:
            raise ConfigError(f"quota_rule={self.quota_rule!r}: must be one of {', '.join(QUOTA_RULES)}")

    def described(self) -> dict[str, Any]:
        """All that decides the result, as plain values."""
        tables = self.config.to_dict()
        train = {
            key: value for key, value in tables["train"].items() if key not in ("name", "runs", "log_every")
        }
        return {
            **tables,
            "train": train,
            "size": asdict(self.size),
            "record_every": self.record_every,
            "quota_rule": self.quota_rule,
        }

    @property
    def finished(self) -> bool:
        """Whether the folder holds this very trajectory, complete."""
        try:
            return bool(json.loads((self.folder / DONE).read_text(encoding="utf-8")) == self.described())
        except (OSError, ValueError):
            return False

    def policy(self, pairs: int) -> Policy:
        """Plans one rank's call as the ranks' together; `pairs` of each rank."""
        config = self.config.lrmoe
        policy = get_policy(config.policy)
        if self.quota_rule == "count":
            policy = by_count(policy)
        return spread(policy, self.size.ranks, config.replica_slots, self.size.prices(config, pairs))


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedTokens:
    """One layer's call in a recorded step, tokens in batch order (rank 0's first).

    Attributes:
        layer: its index. ids_TK: int64 (T, K). alpha_TK: fp32 (T, K). grad_norm_T: fp32 (T,), norm of the gradient at
            the layer's output.
    """

    layer: int
    ids_TK: Tensor
    alpha_TK: Tensor
    grad_norm_T: Tensor


def run_trajectory(job: TrajectoryJob, report: Report | None = None) -> None:
    """Train to `config.train.steps` and record; returns at once where that was done before.

    Args:
        report: told each step that is done.
    """
    if job.finished:
        return
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    job.config.write(job.folder / CONFIG)
    trainer, watch = _prepared(job)
    window = LossWindow(SMOOTHING)
    with ExitStack() as stack:
        out = stack.enter_context((job.folder / STEPS).open("w", encoding="utf-8"))
        for step in range(1, job.config.train.steps + 1):
            watch.recording = bool(job.record_every) and step % job.record_every == 0
            metrics = trainer.step()
            out.write(json.dumps(_line(metrics, window.add(metrics.loss)), allow_nan=False) + "\n")
            watch.end_step(job.folder / f"calls-{step:05d}.npz")
            if report is not None:
                report(step)
    watch.save_counts(job.folder / COUNTS)
    write_whole(job.folder / DONE, json.dumps(job.described()) + "\n")


def _prepared(job: TrajectoryJob) -> tuple[Trainer, _Watch]:
    config = job.config
    from lrmoe.training.model import read_config

    slots = int(read_config(config.model).num_experts_per_tok)
    pairs = config.train.batch_size * config.data.seq_len * slots // job.size.ranks
    trainer = Trainer(config, corpus=corpus_of(config), policy=job.policy(pairs))
    watch = _Watch(job.size.ranks)
    watch_layers(trainer.model, watch)
    return trainer, watch


def _line(metrics: StepMetrics, smoothed: float | None) -> dict[str, Any]:
    values = {
        "loss": metrics.loss,
        "smoothed_loss": math.nan if smoothed is None else smoothed,
        "kept_share": metrics.kept_share,
        "dropped_energy": over_all(metrics.records_by_rank, "energy_dropped"),
        "added_variance": over_all(metrics.records_by_rank, "variance_added"),
    }
    return {"step": metrics.step, **{name: finite(value) for name, value in values.items()}}


class _Watch:
    """Makes every layer call; counts its pairs by source and expert, and records the whole where asked."""

    def __init__(self, ranks: int) -> None:
        self.recording = False
        self._ranks = ranks
        self._recorder = Recorder()
        self._counts: dict[int, list[IntArray]] = {}

    def __call__(self, layer: MoELayer, x: Tensor, ids: Tensor, *tensors: Tensor, training: bool) -> Tensor:
        if training:
            self._counts.setdefault(layer.layer, []).append(self._count(ids, layer.shape.experts))
        if self.recording:
            return self._recorder(layer, x, ids, *tensors, training=training)
        return layer(x, ids, *tensors, training=training)

    def _count(self, ids: Tensor, experts: int) -> IntArray:
        """int64 (R, E): tokens are split evenly over the sources, in order."""
        by_source = ids.reshape(self._ranks, -1) + experts * torch.arange(self._ranks)[:, None]
        return torch.bincount(by_source.flatten(), minlength=self._ranks * experts).view(-1, experts).numpy()

    def end_step(self, path: Path) -> None:
        """Write what was recorded of the step, if anything."""
        if not self.recording:
            return
        arrays: dict[str, Any] = {}
        for call in self._recorder.take():
            number = call.layer.layer
            arrays[f"ids_{number}"] = call.ids.numpy().astype(np.int16)
            arrays[f"alpha_{number}"] = call.alpha.float().numpy()
            arrays[f"grad_norm_{number}"] = torch.linalg.vector_norm(call.upstream.float(), dim=-1).numpy()
        np.savez(path, **arrays)

    def save_counts(self, path: Path) -> None:
        """Write the counts of all steps: int32 (S, R, E) by layer."""
        arrays: dict[str, Any] = {
            f"layer_{number}": np.stack(counts).astype(np.int32) for number, counts in self._counts.items()
        }
        np.savez_compressed(path, **arrays)


class Trajectory:
    """A finished trajectory, read from its folder.

    Attributes:
        losses, smoothed: float64 (S,); NaN where the loss was not finite, or the mean of the last 10 steps is not yet
            known.
        kept_share, dropped_energy, added_variance: float64 (S,), shares over all layers.
        layers: indices of the MoE layers.
        recorded: steps whose calls were recorded, from 1.
    """

    def __init__(
        self, folder: Path, lines: Sequence[Mapping[str, Any]], counts: Mapping[int, IntArray]
    ) -> None:
        self.folder = folder
        self.losses = _column(lines, "loss")
        self.smoothed = _column(lines, "smoothed_loss")
        self.kept_share = _column(lines, "kept_share")
        self.dropped_energy = _column(lines, "dropped_energy")
        self.added_variance = _column(lines, "added_variance")
        self.layers = sorted(counts)
        self.recorded = sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("calls-*.npz"))
        self._counts = counts

    @classmethod
    def load(cls, folder: Path) -> Trajectory:
        """Read a folder.

        Raises:
            ConfigError: it holds no finished trajectory.
        """
        if not (folder / DONE).is_file():
            raise ConfigError(f"{folder}: no finished trajectory there (it has no file {DONE})")
        lines = [json.loads(line) for line in (folder / STEPS).read_text(encoding="utf-8").splitlines()]
        with np.load(folder / COUNTS) as stored:
            counts = {int(name.rpartition("_")[2]): stored[name].astype(np.int64) for name in stored.files}
        return cls(folder, lines, counts)

    def counts(self, layer: int) -> IntArray:
        """Pairs from each source to each expert in every step, int64 (S, R, E)."""
        return self._counts[layer]

    def calls(self, step: int) -> list[RecordedTokens]:
        """The calls of a recorded step, by layer.

        Raises:
            ConfigError: the step was not recorded.
        """
        path = self.folder / f"calls-{step:05d}.npz"
        if not path.is_file():
            raise ConfigError(f"{self.folder}: step {step} was not recorded; recorded are {self.recorded}")
        with np.load(path) as stored:
            return [
                RecordedTokens(
                    layer=number,
                    ids_TK=torch.from_numpy(stored[f"ids_{number}"].astype(np.int64)),
                    alpha_TK=torch.from_numpy(stored[f"alpha_{number}"]),
                    grad_norm_T=torch.from_numpy(stored[f"grad_norm_{number}"]),
                )
                for number in self.layers
            ]

    def steps_to(self, loss: float) -> int | None:
        """The first step, from 1, whose smoothed loss is at most `loss`; None where none is."""
        reached = np.flatnonzero(self.smoothed <= loss)
        return int(reached[0]) + 1 if reached.size else None

    @property
    def final_loss(self) -> float:
        """Mean loss of the last tenth of the steps, at least 20; NaN where one of them was not finite."""
        last = max(_FINAL_LEAST, int(_FINAL_SHARE * len(self.losses)))
        return float(self.losses[-last:].mean())


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> FloatArray:
    return np.array([math.nan if line[name] is None else line[name] for line in lines], dtype=np.float64)
