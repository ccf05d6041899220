"""Load run folders: summary.json, metrics.jsonl and config.toml."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError
from lrmoe.report.data import LayerRows, Run, Series, SystemRun

_Line = Mapping[str, Any]


def load_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ConfigError: not a run folder, or summary.json or metrics.jsonl cannot be read.
    """
    summary = _read_summary(folder)
    lines = _read_lines(folder / "metrics.jsonl")
    config = _read_config(folder / "config.toml")
    kind = "compare" if isinstance(summary.get("systems"), dict) else "train"
    systems = _compare_systems(summary, lines) if kind == "compare" else (_train_system(folder, summary, lines, config),)
    return Run(name=folder.resolve().name, kind=kind, summary=summary, config=config, systems=systems)


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.is_file():
        raise ConfigError(f"run={str(folder)!r}: no summary.json there; give a folder that train or compare wrote")
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
            )
        )
    return tuple(runs)


def _compare_series(lines: Sequence[_Line], link: float | None) -> Series:
    critical = [_critical_s(line, link) for line in lines] if link else []
    return Series(
        step=tuple(int(line["step"]) for line in lines),
        loss=tuple(line.get("loss") for line in lines),
        smoothed=tuple(line.get("smoothed_loss") for line in lines),
        critical_s=tuple(accumulate(critical)),
        wall_s=tuple(accumulate(float(line["wall_s"]) for line in lines)),
        kept_share=tuple(line.get("kept_share") for line in lines),
    )


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
        LayerRows(layer=layer, forward_R=_means(entries, "forward_R"), backward_R=_means(entries, "backward_R"))
        for layer, entries in sorted(rows.items())
    )


def _means(entries: Sequence[_Line], name: str) -> tuple[float, ...]:
    return tuple(sum(column) / len(entries) for column in zip(*(entry[name] for entry in entries), strict=True))
