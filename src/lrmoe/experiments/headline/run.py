"""The headline: time to the same loss against every system, from nothing to figures, resumable everywhere.

    start checkpoints -> trajectories (exact, and one for each pruning system) -> stage -> figures
                      -> ablation of rules for the kept set                             /

Everything lies in one folder: `trajectories/`, `stage.jsonl`, `ablate/`, `headline.json` (rows and how they came
about), `headline.jsonl` (figures), `rows.csv`. What is there is not made again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lrmoe.experiments.ablate.command import lines
from lrmoe.experiments.ablate.rules import Ablation, get_preset, with_seeds
from lrmoe.experiments.ablate.run import ablate
from lrmoe.experiments.compare.cost import LINK_RULE
from lrmoe.experiments.headline.jobs import EXACT, Task
from lrmoe.experiments.headline.question import SELDOM, Headline, is_exact
from lrmoe.experiments.headline.rows import PUBLISHED, Outcome, Row, figures, rows_of
from lrmoe.experiments.stage import lines as stage_lines
from lrmoe.experiments.stage import run as stage
from lrmoe.experiments.stage.lanes import BALANCED, system_config
from lrmoe.experiments.stage.lines import STASH, Call
from lrmoe.experiments.stage.run import Block, Stage
from lrmoe.experiments.systems.fairness import EXECUTES, TRAINS, fairness
from lrmoe.experiments.systems.registry import get_system
from lrmoe.experiments.trajectories.regimes import START_STEPS, get_regime
from lrmoe.experiments.trajectories.trajectory import Trajectory
from lrmoe.experiments.workers import Job, run_jobs
from lrmoe.experiments.workers_display import Display
from lrmoe.experiments.writing import csv_text, json_text, write_whole
from lrmoe.report.data import BASELINE
from lrmoe.telemetry.figures import environment

STAGE = "stage.jsonl"
_JOBS = "lrmoe.experiments.headline.jobs"

Say = Callable[[str], None]


def to_stderr(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def run(headline: Headline, *, workers: int | None = None, say: Say = to_stderr) -> dict[str, Any]:
    """Do what is left to do; the summary that headline.json holds.

    Args:
        workers: processes that train; None: one per core.

    Raises:
        LRMoEError: a trajectory or the stage failed; what is done stays.
    """
    headline.folder.mkdir(parents=True, exist_ok=True)
    train(headline, workers=workers, say=say)
    blocks = blocks_of(headline)
    staged = Stage(blocks=blocks, out=headline.folder / STAGE, size=headline.size)
    layers = len(_some(headline).layers)
    steps = stage.run(staged, layers)
    say(f"stage: {steps} steps executed" if steps else "stage: done before")
    summary = finish(headline, staged)
    if headline.ablated_seeds:
        summary["figures"] += ablated(headline, workers)
        _write_lines(headline.folder / "headline.jsonl", summary["figures"])
    return summary


def ablated(headline: Headline, workers: int | None) -> list[dict[str, Any]]:
    """Figures of the rules for the kept set, in all regimes, on the first model; what is finished is not run again."""
    parts = with_seeds(get_preset("full"), headline.ablated_seeds)
    rules = Ablation(parts=parts, model=headline.models[0], folder=headline.folder / "ablate")
    return [json.loads(line) for line in lines(ablate(rules, workers=workers))]


def train(headline: Headline, *, workers: int | None = None, say: Say = to_stderr) -> None:
    """Start checkpoints, then trajectories, on worker processes of one thread each."""
    tasks = list(_trajectories(headline))
    missing = [task for task in tasks if not task.finished]
    if not missing:
        say(f"trajectories: all {len(tasks)} done before")
        return
    stage_lines.forget(headline.folder / STAGE, {(task.model, task.aux, task.seed) for task in missing})
    starts = [
        Job(name=f"start {m}, aux {a:g}", target=f"{_JOBS}:start", args=(m, a), steps=START_STEPS)
        for m, a in dict.fromkeys((task.model, task.aux) for task in missing)
        if get_regime(headline.regime).continues
    ]
    for title, todo, whole in (
        ("start checkpoints", starts, len(starts)),
        ("trajectories", [_job(headline, task) for task in missing], len(tasks)),
    ):
        if not todo:
            continue
        total = sum(job.steps for job in todo)
        with Display(title, jobs=whole, steps=total, done=whole - len(todo)) as display:
            run_jobs(todo, workers=workers, display=display)


def _job(headline: Headline, task: Task) -> Job:
    """The same for the workers."""
    steps = headline.steps or int(get_regime(headline.regime).tables["train"]["steps"])
    return Job(name=task.folder.name, target=f"{_JOBS}:train", args=(task,), steps=steps)


def _trajectories(headline: Headline) -> Iterator[Task]:
    for model, aux, seed, systems in headline.places():
        for kind in dict.fromkeys(EXACT if is_exact(system) else system for system in systems):
            yield Task(
                model=model,
                aux=aux,
                seed=seed,
                system=kind,
                regime=headline.regime,
                folder=headline.trajectory(model, aux, seed, systems[0] if kind == EXACT else kind),
                steps=headline.steps,
                size=headline.size.execution,
            )


def _some(headline: Headline) -> Trajectory:
    model, aux, seed, systems = next(headline.places())
    return Trajectory.load(headline.trajectory(model, aux, seed, systems[0]))


def blocks_of(headline: Headline) -> list[Block]:
    """What the stage executes: every system to the step at which its trajectory reached the target."""
    main, stashed = [], []
    for model, aux, seed, systems in headline.places():
        folders = {name: headline.trajectory(model, aux, seed, name) for name in systems}
        loaded = {folder: Trajectory.load(folder) for folder in dict.fromkeys(folders.values())}
        last = {folder: _last_step(found, headline.target) for folder, found in loaded.items()}
        last_step = {name: last[folder] for name, folder in folders.items()}
        block = Block(
            model=model,
            aux=aux,
            seed=seed,
            folders=folders,
            last_step=last_step,
            stride=dict.fromkeys(headline.others, SELDOM),
        )
        main.append(block)
        if headline.stashed and headline.is_first(aux, seed):
            stashed.append(_stashed(block, headline.stashed))
    return main + stashed


def _stashed(block: Block, systems: Sequence[str]) -> Block:
    """The same with stashed activations."""
    return replace(
        block,
        folders={name: block.folders[name] for name in systems},
        last_step={name: block.last_step[name] for name in systems},
        activations=STASH,
        stride=dict.fromkeys(systems, SELDOM),
    )


def _last_step(found: Trajectory, target: float) -> int:
    """Steps to the target, or all; at least to the first recorded one."""
    reached = found.steps_to(target)
    return max(found.recorded[0], len(found.losses) if reached is None else reached)


def finish(headline: Headline, staged: Stage) -> dict[str, Any]:
    """Rows and figures from what lies in the folder; written there, and returned."""
    calls = stage_lines.read(staged.out)
    rows = rows_of(list(_outcomes(headline)), calls)
    about = {"command": headline.command, "target_loss": headline.target, "size": asdict(headline.size)}
    summary = {
        "kind": "headline",
        **about,
        "regime": headline.regime,
        "seeds": list(headline.seeds),
        "every": staged.every,
        "pairs_per_rank": calls[0].pairs // headline.size.ranks if calls else 0,
        "published": list(PUBLISHED),
        "link_rule": LINK_RULE,
        "links": _links(calls),
        "fairness": {name: _given(name) for name in dict.fromkeys(row.system for row in rows)},
        "rows": [row.as_dict() for row in rows],
        "context": environment(),
    }
    found = figures(rows, headline.regime, **about)
    write_whole(headline.folder / "headline.json", json_text(summary))
    _write_lines(headline.folder / "headline.jsonl", found)
    write_whole(headline.folder / "rows.csv", _table(rows))
    return {**summary, "figures": found}


def _links(calls: Sequence[Call]) -> dict[str, dict[str, float]]:
    """Bytes per second by model and activations."""
    found: dict[str, dict[str, float]] = {}
    for (model, activations), speed in stage_lines.link_of(calls, f"{BALANCED}:{BASELINE}").items():
        found.setdefault(model, {})[activations] = speed
    return found


def _outcomes(headline: Headline) -> Iterator[Outcome]:
    for model, aux, seed, systems in headline.places():
        exact = Trajectory.load(headline.trajectory(model, aux, seed, EXACT))
        for system in systems:
            found = Trajectory.load(headline.trajectory(model, aux, seed, system))
            yield Outcome(
                model=model,
                aux=aux,
                seed=seed,
                system=system,
                steps=found.steps_to(headline.target),
                final_loss=found.final_loss,
                exact_loss=exact.final_loss,
            )


def _given(name: str) -> dict[str, Any]:
    """A system's column of the fairness table."""
    system = get_system(name)
    return fairness(system, system_config(system, 0), EXECUTES if is_exact(name) else TRAINS)


def _write_lines(path: Path, found: Sequence[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in found))


def _table(rows: Sequence[Row]) -> str:
    """CSV with one line per system and seed; phases and ratios as columns of their own."""
    flat = [
        {
            **{name: value for name, value in row.as_dict().items() if not isinstance(value, dict)},
            **{f"over_{name}": value for name, value in row.over.items()},
            **{f"ms_{name}": value for name, value in row.phases.items()},
            **{f"balanced_ms_{name}": value for name, value in row.balanced.items()},
        }
        for row in rows
    ]
    return csv_text(list(dict.fromkeys(name for line in flat for name in line)), flat)
