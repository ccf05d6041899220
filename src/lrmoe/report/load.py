"""Load what a command left: a run folder, or a file of `lrmoe plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError
from lrmoe.report import files, headline, replay
from lrmoe.report.data import Run, SystemRun
from lrmoe.report.files import MADE_BY, Line
from lrmoe.report.names import readable, renamed, styles
from lrmoe.report.steps import compare_systems, train_system, unfinished_entry

CAPACITY, HEADLINE = "capacity.csv", "headline.jsonl"


def load_run(path: Path) -> Run:
    """Read a run folder, or a file that `lrmoe plan` wrote: its CSV table or its JSON lines.

    A run that wrote no summary (it was stopped, or goes on) is loaded from its steps; `unfinished` then says so.

    Raises:
        ConfigError: not there, not a run, or a file of it cannot be read.
    """
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        raise ConfigError(f"run={str(path)!r}: no such folder or file; give one that {MADE_BY} wrote")
    if (path / HEADLINE).is_file():
        return _headline(path / HEADLINE)
    summary = path / "summary.json"
    if summary.is_file():
        return _folder(path, files.json_object(files.read_text(summary), str(summary)))
    if (path / CAPACITY).is_file():
        return _capacity(path / CAPACITY)
    return _unfinished(path)


def _folder(folder: Path, summary: dict[str, Any]) -> Run:
    kind = summary.get("kind") or ("compare" if isinstance(summary.get("systems"), dict) else "train")
    if kind not in _LOADERS:
        raise ConfigError(
            f"{folder / 'summary.json'}: kind={kind!r} is not one that this version shows ({', '.join(_LOADERS)})"
        )
    try:
        return _LOADERS[kind](folder, summary)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        where = f"{folder / 'metrics.jsonl'} or summary.json" if kind in _STEPPED else folder / "summary.json"
        raise ConfigError(f"{where}: not as this version writes them ({error!r})") from error


def _name(folder: Path) -> str:
    return folder.resolve().name


def _stepped(folder: Path, summary: dict[str, Any]) -> Run:
    """A comparison or a training run: a summary, steps and a configuration."""
    lines = files.json_lines(folder / "metrics.jsonl")
    return _of_lines(folder, summary, lines, files.toml(folder / "config.toml"))


def _of_lines(
    folder: Path, summary: dict[str, Any], lines: Sequence[Line], config: dict[str, Any], unfinished: str = ""
) -> Run:
    compared = isinstance(summary.get("systems"), dict)
    systems = compare_systems(summary, lines) if compared else (train_system(summary, lines, config),)
    kind = "compare" if compared else "train"
    return Run(
        name=_name(folder), kind=kind, summary=summary, config=config, systems=systems, unfinished=unfinished
    )


def _unfinished(folder: Path) -> Run:
    """A run without a summary, from the steps that it wrote."""
    config = files.toml(folder / "config.toml")
    if not config and not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"run={str(folder)!r}: no summary.json there; give a folder that {MADE_BY} wrote")
    if (folder / "cells").is_dir():
        raise ConfigError(
            f"run={str(folder)!r}: this run of several parts has no summary.json: it goes on, or was stopped. The same "
            f"command goes on with it; whole runs below {folder / 'cells'} can be shown by themselves"
        )
    lines = files.json_lines(folder / "metrics.jsonl", cut=True)
    if not lines:
        raise ConfigError(
            f"run={str(folder)!r}: this run has no summary.json and no step in metrics.jsonl: it stopped before its "
            "first step ended, or has just begun. There is nothing to show yet; what stopped it is on its terminal"
        )
    try:
        return _of_lines(folder, *_stopped(folder, lines, config))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{folder / 'metrics.jsonl'}: not as this version writes it ({error!r})") from error


def _stopped(
    folder: Path, lines: Sequence[Line], config: dict[str, Any]
) -> tuple[dict[str, Any], Sequence[Line], dict[str, Any], str]:
    """Summary, steps, configuration and what is missing, of a run without a summary."""
    last = max(int(line["step"]) for line in lines)
    missing = f"This run did not finish: it has no summary, and {last} steps were written."
    lanes: dict[str, list[Line]] = {}
    for line in lines:
        lanes.setdefault(str(line.get("system", "")), []).append(line)
    if "" in lanes:
        return {"name": _name(folder), **unfinished_entry(lines)}, lines, config, missing
    compare = config.get("compare", {})
    summary = {
        "kind": "compare",
        "target_loss": compare.get("target_loss"),
        "world_size": compare.get("ep"),
        "link_bytes_per_s": compare.get("link_bytes_per_s"),
        "systems": {name: unfinished_entry(lane, reached=False) for name, lane in lanes.items()},
    }
    return summary, lines, config, missing


def _simulation(folder: Path, summary: dict[str, Any]) -> Run:
    """A simulation has its figures in the summary alone; systems are those of its first cluster."""
    keys = list(summary["scenarios"][0]["systems"])
    called = readable(keys)
    shown = renamed(summary, called)
    first = shown["scenarios"][0]["systems"]
    systems = tuple(
        SystemRun(
            name=called[key],
            key=key,
            figures={**first[called[key]], "fairness": shown["fairness"][called[key]]},
        )
        for key in keys
    )
    return Run(name=_name(folder), kind="simulate", summary=shown, config={}, systems=systems)


def _replay(folder: Path, summary: dict[str, Any]) -> Run:
    called = readable(list(summary["systems"]))
    shown = renamed(summary, called)
    drawn = styles(called)
    systems = tuple(
        SystemRun(
            name=replay.title(called[key]),
            key=key,
            figures=found,
            phase_ms=replay.phase_ms(found),
            memory=replay.memory_parts(found),
            colour=drawn[key][0],
        )
        for key, found in ((key, shown["systems"][called[key]]) for key in called)
    )
    return Run(name=_name(folder), kind="replay", summary=shown, config={}, systems=systems)


def _plain(folder: Path, summary: dict[str, Any]) -> Run:
    """A run that has all its figures in the summary."""
    if not summary["rows"]:
        raise ConfigError(f"{folder / 'summary.json'}: no rows there: nothing was finished yet")
    return Run(name=_name(folder), kind=summary["kind"], summary=summary, config={}, systems=())


def _headline(path: Path) -> Run:
    lines = files.json_lines(path)
    if not lines or not all({"name", "value"} <= set(line) for line in lines):
        raise ConfigError(f"{path}: not the figures that `make headline` writes")
    beside = path.with_name("headline.json")
    more = files.json_object(files.read_text(beside), str(beside)) if beside.is_file() else {}
    summary = {
        "rows": [],
        "fairness": {},
        "context": _environment(lines[0].get("context", {})),
        **more,
        "figures": lines,
    }
    run = Run(name=_name(path.parent), kind="headline", summary=summary, config={}, systems=())
    try:
        return replace(run, systems=headline.systems(run))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{beside}: not as this version writes it ({error!r})") from error


def _file(path: Path) -> Run:
    """A file that `lrmoe plan` wrote."""
    if path.suffix == ".csv":
        return _capacity(path)
    lines = files.json_lines(path) if path.suffix in (".json", ".jsonl") else []
    found = next((line for line in lines if str(line.get("name", "")).startswith("plan.")), None)
    if found is None:
        raise ConfigError(
            f"run={str(path)!r}: a file must be what `lrmoe plan` wrote: its .csv, or its --json in a .jsonl file; of "
            "other commands give the folder"
        )
    context = found.get("context", {})
    if "report" not in context:
        raise ConfigError(f"{path}: figures of a sweep; give its CSV file, or the folder that holds it")
    summary = {"figures": lines, "report": context["report"], "context": _environment(context)}
    return Run(name=path.stem, kind="plan", summary=summary, config={}, systems=())


def _environment(context: Mapping[str, Any]) -> dict[str, Any]:
    return {name: context[name] for name in ("command", "versions", "hardware", "date") if name in context}


def _capacity(path: Path) -> Run:
    rows = files.csv_rows(path)
    missing = [name for name in ("model", "hardware", "gpus", "fits") if name not in rows[0]]
    if missing:
        raise ConfigError(f"{path}: not a table of `lrmoe plan`: it has no column {missing[0]!r}")
    return Run(name=_name(path.parent), kind="plan", summary={"rows": rows}, config={}, systems=())


_STEPPED = ("compare", "train")
_LOADERS: Mapping[str, Callable[[Path, dict[str, Any]], Run]] = {
    "compare": _stepped,
    "train": _stepped,
    "simulate": _simulation,
    "replay": _replay,
    "matrix": _plain,
    "ablate": _plain,
}
