"""Load run folders: summary.json, metrics.jsonl and config.toml."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError
from lrmoe.report.data import BASELINE, LayerRows, Run, Series, SystemRun
from lrmoe.report.plot import DASHES, SERIES_COLOURS

_Line = Mapping[str, Any]
_PHASE = "lrmoe/ms_"
SMOOTHING = 10  # steps of the running mean that a training run is drawn with


def load_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ConfigError: not a run folder, or summary.json or metrics.jsonl cannot be read.
    """
    summary = _read_summary(folder)
    if summary.get("kind") == "simulate":
        return _simulation(folder, summary)
    if summary.get("kind") == "replay":
        return Run(name=folder.resolve().name, kind="replay", summary=summary, config={}, systems=())
    lines = _read_lines(folder / "metrics.jsonl")
    config = _read_config(folder / "config.toml")
    kind = "compare" if isinstance(summary.get("systems"), dict) else "train"
    try:
        systems = (
            _compare_systems(summary, lines)
            if kind == "compare"
            else (_train_system(summary, lines, config),)
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{folder / 'metrics.jsonl'} or summary.json: not as this version writes them ({error!r})"
        ) from error
    return Run(name=folder.resolve().name, kind=kind, summary=summary, config=config, systems=systems)


def _simulation(folder: Path, summary: dict[str, Any]) -> Run:
    """A simulation has its figures in the summary alone; systems are those of its first cluster."""
    try:
        first = summary["scenarios"][0]["systems"]
        systems = tuple(
            SystemRun(name=str(name), figures={**figures, "fairness": summary["fairness"][name]})
            for name, figures in first.items()
        )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{folder / 'summary.json'}: not as this version writes them ({error!r})"
        ) from error
    return Run(name=folder.resolve().name, kind="simulate", summary=summary, config={}, systems=systems)


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.is_file():
        raise ConfigError(
            f"run={str(folder)!r}: no summary.json there; give a folder that train, compare, simulate or replay wrote"
        )
    return _as_object(path.read_text(encoding="utf-8"), str(path))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = path.read_text(encoding="utf-8").splitlines()
    return [_as_object(row, f"{path}, line {i}") for i, row in enumerate(rows, 1) if row.strip()]


def _as_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from error


def _compare_systems(summary: Mapping[str, Any], lines: Sequence[_Line]) -> tuple[SystemRun, ...]:
    link = summary.get("link_bytes_per_s")
    runs = []
    others = [name for name in summary["systems"] if name != BASELINE]
    for name, figures in summary["systems"].items():
        own = [line for line in lines if line.get("system") == name]
        runs.append(
            SystemRun(
                name=str(name),
                figures=figures,
                series=_compare_series(own, link),
                loads=_loads(own),
                phase_ms=figures.get("call_ms", {}),
                config=figures.get("config", {}),
                # Colours repeat beyond the first few systems: another dash tells them apart.
                dash=DASHES[others.index(name) // SERIES_COLOURS % len(DASHES)]
                if name in others
                else DASHES[0],
            )
        )
    return tuple(runs)


def _compare_series(lines: Sequence[_Line], link: float | None) -> Series:
    critical = [_critical_s(line, link) for line in lines] if link else []
    known = all(line.get("loads") for line in lines)
    return Series(
        step=tuple(int(line["step"]) for line in lines),
        loss=tuple(line.get("loss") for line in lines),
        smoothed=tuple(line.get("smoothed_loss") for line in lines),
        critical_s=tuple(accumulate(critical)),
        critical_bytes=tuple(accumulate(float(line["critical_bytes"]) for line in lines)) if link else (),
        wall_s=tuple(accumulate(float(line["wall_s"]) for line in lines)),
        kept_share=tuple(line.get("kept_share") for line in lines),
        forward_peak=tuple(_peak(line, "forward_R") for line in lines) if known else (),
        backward_peak=tuple(_peak(line, "backward_R") for line in lines) if known else (),
    )


def _peak(line: _Line, side: str) -> float:
    """Rows of the most loaded rank over the mean of the complete forward, worst layer."""
    return float(max(max(e[side]) * len(e["forward_R"]) / max(1, sum(e["forward_R"])) for e in line["loads"]))


def _critical_s(line: _Line, link: float) -> float:
    return float(sum(line["phase_ms"].values())) / 1e3 + float(line["critical_bytes"]) / link


def _loads(lines: Iterable[_Line]) -> tuple[LayerRows, ...]:
    """Mean rows per rank and layer over the pruned steps, or over all steps where none was pruned."""
    lines = list(lines)
    pruned = [line for line in lines if (line.get("kept_share") or 1.0) < 1.0] or lines
    rows: dict[int, list[_Line]] = {}
    for line in pruned:
        for entry in line.get("loads", ()):
            rows.setdefault(int(entry["layer"]), []).append(entry)
    return tuple(
        LayerRows(
            layer=layer, forward_R=_means(entries, "forward_R"), backward_R=_means(entries, "backward_R")
        )
        for layer, entries in sorted(rows.items())
    )


def _means(entries: Sequence[_Line], name: str) -> tuple[float, ...]:
    return tuple(
        sum(column) / len(entries) for column in zip(*(entry[name] for entry in entries), strict=True)
    )


def _train_system(summary: Mapping[str, Any], lines: Sequence[_Line], config: Mapping[str, Any]) -> SystemRun:
    series = Series(
        step=tuple(int(line["step"]) for line in lines),
        loss=tuple(line.get("loss") for line in lines),
        smoothed=_running_mean([line.get("loss") for line in lines]),
        eval_loss=tuple(line.get("eval_loss") for line in lines),
        wall_s=tuple(accumulate(float(line["moe_ms_wall"]) / 1e3 for line in lines)),
        kept_share=tuple(line.get("lrmoe/kept_share") for line in lines),
        forward_peak=tuple(
            line["lrmoe/forward_peak_worst"] for line in lines if "lrmoe/forward_peak_worst" in line
        ),
        backward_peak=tuple(
            line["lrmoe/backward_peak_worst"] for line in lines if "lrmoe/backward_peak_worst" in line
        ),
    )
    return SystemRun(
        name=str(summary.get("name", "training")),
        figures={**summary, **_series_figures(series)},
        series=series,
        phase_ms=_train_phases(lines),
        config=config.get("lrmoe", {}),
    )


def _series_figures(series: Series) -> dict[str, float]:
    """Figures of a training run that only its lines have."""
    evaluated = [loss for loss in series.eval_loss if loss is not None]
    figures = {"eval_loss": evaluated[-1]} if evaluated else {}
    for name, peaks in (("forward_peak", series.forward_peak), ("backward_peak", series.backward_peak)):
        if peaks:
            figures[name] = sum(peaks) / len(peaks)
    return figures


def _running_mean(losses: Sequence[float | None]) -> tuple[float | None, ...]:
    """Mean of the last SMOOTHING losses; None while they fill or where one is missing."""
    means: list[float | None] = []
    for end in range(1, len(losses) + 1):
        window = [loss for loss in losses[max(0, end - SMOOTHING) : end] if loss is not None]
        means.append(sum(window) / SMOOTHING if len(window) == SMOOTHING else None)
    return tuple(means)


def _train_phases(lines: Sequence[_Line]) -> dict[str, float]:
    """Mean milliseconds of a layer call per phase, slowest rank; phases that never ran are left out."""
    names = {key for line in lines for key in line if key.startswith(_PHASE) and not key.endswith("_worst")}
    means = {
        name.removeprefix(_PHASE): sum(line.get(name, 0.0) for line in lines) / len(lines) for name in names
    }
    return {phase: ms for phase, ms in sorted(means.items()) if ms > 0}
