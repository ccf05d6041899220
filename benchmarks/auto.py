"""Whether `drop="auto"` chooses well: its time to a loss beside those of fixed drops.

Trains `qwen3-moe-micro` with drops of 0 to 0.8 and with `drop="auto"` under max_drop=0.9, in two regimes, planned as on
8 ranks, and counts the steps to a loss; executes recorded layer calls at EP 8 with every drop in turn (auto_times.py).

    time to loss = steps to the loss x layer time at what each step left out

Steps, memorise: to a loss of 0.05, mean of 10 steps. Continued, where batches differ in loss by far more than a drop
changes it: the paired difference to the exact run, mean of the last 100 steps, over the slope of a straight line
through the exact runs' losses (all seeds together, without the first quarter), added to three quarters of the steps.

    python benchmarks/auto.py --json

Names: auto.<regime>.time_to_loss_over_best_fixed (the best fixed drop is that of least mean time; exit code 1 above
1.05), .chosen_drop, .drop<d>.{time_to_loss_over_exact, steps_over_exact, layer_time_over_exact, added_variance},
.noise_share (NOISE_SHARE of planning/auto.py as these fixed drops give it), auto.<activations>.{ratio, choosing}.
What runs/auto holds is not run again.

Expected duration on 2 cores: 12 to 18 minutes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import auto_times
import command_line
import numpy as np
from auto_times import RECOMPUTE, STASH, Times
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from lrmoe.config import LRMoEConfig
from lrmoe.experiments.trajectories.regimes import (
    START_STEPS,
    get_regime,
    regime_config,
    start_is_made,
    start_model,
)
from lrmoe.experiments.trajectories.trajectory import Trajectory, TrajectoryJob, run_trajectory
from lrmoe.experiments.workers import Job, run_jobs
from lrmoe.experiments.workers_display import Display
from lrmoe.planning.auto import NOISE_SHARE
from lrmoe.statistics import standard_error
from lrmoe.telemetry import figure
from lrmoe.training.config import TrainConfig

FOLDER = Path("runs") / "auto"
MODEL = "qwen3-moe-micro"
REGIMES = ("memorise", "continued")
DROPS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8)
MOST = 0.9  # max_drop of auto
LIMIT = 1.05  # of auto's time to loss over that of the best fixed drop
_LAST = 100  # steps at the end of which paired differences are averaged

FloatArray = NDArray[np.float64]


def base() -> TrainConfig:
    """What all runs share."""
    return TrainConfig.from_dict({"model": {"preset": MODEL}})


def job_of(regime: str, seed: int, drop: float | None) -> TrajectoryJob:
    """A training run at a fixed drop, or None: auto. Calls are recorded of what auto_times.py executes."""
    rule: dict[str, Any] = {"drop": "auto", "max_drop": MOST} if drop is None else {"max_drop": drop}
    config = regime_config(dataclasses.replace(base(), lrmoe=LRMoEConfig(**rule)), regime, seed)
    name = f"auto-share{NOISE_SHARE:g}" if drop is None else f"drop{drop:g}"
    executed = drop == 0 and seed == 0
    return TrajectoryJob(
        config=config,
        folder=FOLDER / "trajectories" / f"{regime}-seed{seed}-{name}",
        record_every=10 if executed else 0,
    )


def start(report: Callable[[int], None]) -> None:
    """Train the start checkpoint that both regimes share; a worker's job."""
    start_model(base(), progress=lambda step, _: report(step))


def train(regime: str, seed: int, drop: float | None, report: Callable[[int], None]) -> None:
    """Train one run; a worker's job."""
    run_trajectory(job_of(regime, seed, drop), report)


def train_all(seeds: Sequence[int], workers: int | None) -> None:
    """Train what is not there."""
    if not start_is_made(base()):
        _run("start checkpoint", [Job(name="start", target="auto:start", args=(), steps=START_STEPS)], 1)
    jobs = [
        Job(
            name=f"{regime}, seed {seed}, {'auto' if drop is None else f'drop {drop:g}'}",
            target="auto:train",
            args=(regime, seed, drop),
            steps=int(get_regime(regime).tables["train"]["steps"]),
        )
        for seed in seeds
        for regime in REGIMES
        for drop in (*DROPS, None)
        if not job_of(regime, seed, drop).finished
    ]
    if jobs:
        _run("runs", jobs, workers)


def _run(title: str, jobs: Sequence[Job], workers: int | None) -> None:
    with Display(title, jobs=len(jobs), steps=sum(job.steps for job in jobs), done=0) as display:
        run_jobs(jobs, workers=workers, display=display)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One run up to the loss.

    Attributes:
        steps: to the loss, not always whole; infinite where it was not reached.
        dropped: share of pairs left out in each of these steps. added: added over own variance, their mean.
    """

    steps: float
    dropped: FloatArray
    added: float

    @classmethod
    def of(cls, found: Trajectory, steps: float) -> Run:
        """The run cut at the steps, or whole."""
        count = len(found.losses) if math.isinf(steps) else min(max(round(steps), 1), len(found.losses))
        return cls(
            steps=steps,
            dropped=1 - found.kept_share[:count],
            added=float(found.added_variance[:count].mean()),
        )

    def time(self, times: Times) -> float:
        """To the loss, in layer times of an exact step."""
        return self.steps * float(np.mean(times.at(self.dropped)))


Runs = Mapping[float | None, Sequence[Run]]  # by drop, None: auto; by seed


def memorised(found: Mapping[float | None, Sequence[Trajectory]], target: float) -> Runs:
    """Runs up to a smoothed loss."""
    return {
        drop: [Run.of(one, math.inf if (steps := one.steps_to(target)) is None else steps) for one in runs]
        for drop, runs in found.items()
    }


def continued(found: Mapping[float | None, Sequence[Trajectory]]) -> tuple[Runs, float]:
    """Runs up to what the exact one reaches at three quarters of its steps; the slope of its trend, loss per step."""
    exact = [one.losses for one in found[0.0]]
    total = len(exact[0])
    steps = np.arange(1, total + 1)
    slope = float(np.polyfit(steps[total // 4 :], np.mean(exact, axis=0)[total // 4 :], 1)[0])
    runs = {
        drop: [
            Run.of(one, 0.75 * total + float((one.losses - base)[-_LAST:].mean()) / -slope)
            for one, base in zip(of_drop, exact, strict=True)
        ]
        for drop, of_drop in found.items()
    }
    return runs, slope


def noise_share(runs: Runs) -> float:
    """The s of steps(d) / steps(0) = 1 + s * added(d): least squares over fixed runs that reached the loss."""
    pairs = [
        (run.added, run.steps / exact.steps - 1)
        for drop, of_drop in runs.items()
        if drop
        for run, exact in zip(of_drop, runs[0.0], strict=True)
        if math.isfinite(run.steps)
    ]
    return sum(a * more for a, more in pairs) / sum(a * a for a, _ in pairs)


Figure = Callable[..., dict[str, Any]]


def figures(regime: str, runs: Runs, times: Times, **context: Any) -> list[dict[str, Any]]:
    """Figures of one regime. A drop with a run that did not reach the loss has no time; `not_reached` counts them."""
    fixed = {drop: of_drop for drop, of_drop in runs.items() if drop is not None}
    spent = {drop: [run.time(times) for run in of_drop] for drop, of_drop in runs.items()}
    best = min(fixed, key=lambda drop: statistics.fmean(spent[drop]))
    found = [
        _figure(
            f"auto.{regime}.time_to_loss_over_best_fixed",
            _over(spent[None], spent[best]),
            best_fixed_drop=best,
            **context,
        ),
        _figure(
            f"auto.{regime}.chosen_drop",
            [float(run.dropped.mean()) for run in runs[None]],
            last=[round(float(run.dropped[-1]), 4) for run in runs[None]],
            **context,
        ),
        figure(f"auto.{regime}.noise_share", round(noise_share(runs), 4), "ratio", "lower", **context),
    ]
    for drop, of_drop in runs.items():
        if drop == 0:
            continue
        name = f"auto.{regime}.{'chosen' if drop is None else f'drop{drop:g}'}"
        missed = sum(math.isinf(run.steps) for run in of_drop)
        if not missed:
            steps = _over([r.steps for r in of_drop], [r.steps for r in runs[0.0]])
            found.append(
                _figure(f"{name}.time_to_loss_over_exact", _over(spent[drop], spent[0.0]), **context)
            )
            found.append(_figure(f"{name}.steps_over_exact", steps, **context))
        found.append(
            _figure(f"{name}.added_variance", [r.added for r in of_drop], not_reached=missed, **context)
        )
        if drop is not None:
            error = round(times.errors[drop], 4)
            found.append(
                figure(
                    f"{name}.layer_time_over_exact",
                    round(times.over_exact[drop], 4),
                    "ratio",
                    "lower",
                    standard_error=error,
                    **context,
                )
            )
    return found


def _over(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(values, others, strict=True)]


def _figure(name: str, values: Sequence[float], **context: Any) -> dict[str, Any]:
    """The mean over seeds, with the seeds' values and the standard error."""
    error = standard_error(values)
    return figure(
        name,
        round(statistics.fmean(values), 4),
        "ratio",
        "lower",
        by_seed=[round(value, 4) for value in values],
        standard_error=None if error is None else round(error, 4),
        **context,
    )


def evaluated(seeds: Sequence[int], calls: Sequence[auto_times.Timed]) -> list[dict[str, Any]]:
    """All figures, from what lies in the folder."""
    found = []
    context: dict[str, Any] = {"model": MODEL, "seeds": list(seeds), "max_drop": MOST}
    for regime in REGIMES:
        loaded = {
            drop: [Trajectory.load(job_of(regime, seed, drop).folder) for seed in seeds]
            for drop in (*DROPS, None)
        }
        if (target := get_regime(regime).target_loss) is not None:
            runs, about = memorised(loaded, target), {"target_loss": target}
        else:
            runs, slope = continued(loaded)
            about = {"slope": slope}
        times = Times.of([call for call in calls if call.regime == regime], STASH)
        found += figures(regime, runs, times, **context, **about)
    for activations in (STASH, RECOMPUTE):
        of = [Times.of([c for c in calls if c.regime == regime], activations) for regime in REGIMES]
        for name in ("ratio", "choosing"):
            value = round(statistics.fmean(getattr(times, name) for times in of), 4)
            found.append(figure(f"auto.{activations}.{name}", value, "ratio", "lower"))
    return found


def show(found: Sequence[dict[str, Any]]) -> None:
    """The figures on stderr."""
    table = Table(title="auto beside fixed drops")
    for name in ("figure", "value", "standard error"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for row in found:
        error = row["context"].get("standard_error")
        table.add_row(row["name"], f"{row['value']:.4g}", "-" if error is None else f"{error:.2g}")
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json. Exit code 1 where auto is too far from the best fixed drop."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--workers", type=int, help="processes that train; default: one per core")
    args = parser.parse_args(argv)
    seeds = range(args.seeds)
    train_all(seeds, args.workers)
    folders = {regime: job_of(regime, 0, 0.0).folder for regime in REGIMES}
    found = evaluated(seeds, auto_times.measure(folders, FOLDER / "times.jsonl"))
    show(found)
    for row in found if args.json else ():
        print(json.dumps(row))
    judged = [row["value"] for row in found if row["name"].endswith(".time_to_loss_over_best_fixed")]
    return 0 if max(judged) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
