"""Lines of metrics.jsonl as systems of a run: curves, loads and memory of a comparison or of a training run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from lrmoe.report.data import LayerRows, LayerSteps, Memory, Series, SystemRun
from lrmoe.report.files import Line
from lrmoe.report.memory import ALL_LAYERS
from lrmoe.report.names import own, readable, styles
from lrmoe.sizes import parse_size

SMOOTHING = 10  # steps of the running mean that a training run is drawn with
MOST_STEPS, LEAST_STEPS = 60, 8  # steps of loads on a page
MOST_NUMBERS = 400_000  # of loads on a page; each takes some five bytes
_PHASE, _MEMORY = "lrmoe/ms_", "lrmoe/mem_"
PARTS = ("weights", "grads", "replicas", "dispatched", "stash", "backward", "outputs", "optimizer")


def compare_systems(summary: Mapping[str, Any], lines: Sequence[Line]) -> tuple[SystemRun, ...]:
    """The systems of a comparison."""
    link, named = summary.get("link_bytes_per_s"), summary["systems"]
    called, drawn = readable(list(named)), styles(named)
    every = _every(lines)
    runs = []
    for key, figures in named.items():
        lane = [line for line in lines if line.get("system") == key]
        colour, dash = drawn[key]
        runs.append(
            SystemRun(
                name=called[key],
                key=str(key),
                figures=_with_file(key, figures),
                series=_compare_series(lane, link),
                loads=_loads(lane),
                layers=_layers(lane, every),
                memory=_model_memory(figures.get("memory") or {}),
                phase_ms=figures.get("call_ms", {}),
                config=figures.get("config", {}),
                colour=colour,
                dash=dash,
            )
        )
    return tuple(runs)


def _with_file(key: str, figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """The figures; the fairness table of a user's policy says where it is from."""
    if not own(key):
        return figures
    return {**figures, "fairness": {**figures.get("fairness", {}), "policy_from": key}}


def _compare_series(lines: Sequence[Line], link: float | None) -> Series:
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
        dropped_energy=tuple(_scored(line, "dropped_energy") for line in lines),
        added_variance=tuple(_scored(line, "added_variance") for line in lines),
        forward_peak=tuple(_peak(line, "forward_R") for line in lines) if known else (),
        backward_peak=tuple(_peak(line, "backward_R") for line in lines) if known else (),
    )


def _scored(line: Line, name: str) -> float | None:
    """A share of the scores' energy; None where nothing was left out."""
    kept = line.get("kept_share", line.get("lrmoe/kept_share"))
    return line.get(name, line.get(f"lrmoe/{name}")) if kept is not None and kept < 1 else None


def _peak(line: Line, side: str) -> float:
    """Rows of the most loaded rank over the mean of the complete forward, worst layer."""
    return float(max(max(e[side]) * len(e["forward_R"]) / max(1, sum(e["forward_R"])) for e in line["loads"]))


def _critical_s(line: Line, link: float) -> float:
    return float(sum(line["phase_ms"].values())) / 1e3 + float(line["critical_bytes"]) / link


def _loads(lines: Iterable[Line]) -> tuple[LayerRows, ...]:
    """Mean rows per rank and layer over the pruned steps, or over all steps where none was pruned."""
    lines = list(lines)
    pruned = [line for line in lines if (line.get("kept_share") or 1.0) < 1.0] or lines
    rows: dict[int, list[Line]] = {}
    for line in pruned:
        for entry in line.get("loads", ()):
            rows.setdefault(int(entry["layer"]), []).append(entry)
    return tuple(
        LayerRows(
            layer=layer, forward_R=_means(entries, "forward_R"), backward_R=_means(entries, "backward_R")
        )
        for layer, entries in sorted(rows.items())
    )


def _means(entries: Sequence[Line], name: str) -> tuple[float, ...]:
    return tuple(
        sum(column) / len(entries) for column in zip(*(entry[name] for entry in entries), strict=True)
    )


def _every(lines: Sequence[Line]) -> int:
    """Of how many steps of a system one is kept with its loads, for a page of a bounded size."""
    lanes: dict[Any, int] = {}
    for line in lines:
        lanes[line.get("system")] = lanes.get(line.get("system"), 0) + 1
    if not lanes:
        return 1
    longest = max(lanes.values())
    sizes = (
        sum(len(v) for v in entry.values() if isinstance(v, list)) for entry in lines[0].get("loads", ())
    )
    most = MOST_NUMBERS // max(1, sum(sizes) * len(lanes))
    return -(-longest // min(MOST_STEPS, max(LEAST_STEPS, most)))


def _layers(lines: Sequence[Line], every: int) -> tuple[LayerSteps, ...]:
    picked = [line for i, line in enumerate(lines) if i % every == 0 or i == len(lines) - 1]
    entries: dict[int, list[tuple[int, Line]]] = {}
    for line in picked:
        for entry in line.get("loads", ()):
            entries.setdefault(int(entry["layer"]), []).append((int(line["step"]), entry))
    return tuple(_layer(layer, found) for layer, found in sorted(entries.items()))


def _layer(layer: int, found: Sequence[tuple[int, Line]]) -> LayerSteps:
    def all_of(name: str) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(entry[name]) for _, entry in found)

    known = all("counts_E" in entry and "quota_E" in entry for _, entry in found)
    return LayerSteps(
        layer=layer,
        step=tuple(step for step, _ in found),
        forward_SR=all_of("forward_R"),
        backward_SR=all_of("backward_R"),
        counts_SE=all_of("counts_E") if known else (),
        quota_SE=all_of("quota_E") if known else (),
    )


def _model_memory(found: Mapping[str, Any]) -> Memory | None:
    """Of all MoE layers, or under a layer's budget alone of the largest call."""
    if not found.get("measured"):
        return None
    call = found.get("layer_budget") is not None and found.get("memory_budget") is None
    before = "call_" if call else ""
    stacks = {kind: dict(found[f"{before}{kind}"]) for kind in ("measured", "predicted")}
    if not call and found.get("optimizer"):
        stacks = {kind: {**parts, "optimizer": found["optimizer"]} for kind, parts in stacks.items()}
    return Memory(
        stacks={kind: parts for kind, parts in stacks.items() if any(parts.values())},
        budget=found["layer_budget"] if call else found.get("memory_budget"),
        budget_name="layer budget" if call else "memory budget",
        what="one layer call" if call else ALL_LAYERS,
    )


def train_system(summary: Mapping[str, Any], lines: Sequence[Line], config: Mapping[str, Any]) -> SystemRun:
    """The one system of a training run."""
    series = Series(
        step=tuple(int(line["step"]) for line in lines),
        loss=tuple(line.get("loss") for line in lines),
        smoothed=_running_mean([line.get("loss") for line in lines]),
        eval_loss=tuple(line.get("eval_loss") for line in lines),
        wall_s=tuple(accumulate(float(line["moe_ms_wall"]) / 1e3 for line in lines)),
        kept_share=tuple(line.get("kept_share", line.get("lrmoe/kept_share")) for line in lines),
        dropped_energy=tuple(_scored(line, "dropped_energy") for line in lines),
        added_variance=tuple(_scored(line, "added_variance") for line in lines),
        variance_mean=tuple(line.get("lrmoe/variance_mean_worst") for line in lines),
        variance_predicted=tuple(line.get("lrmoe/variance_predicted_worst") for line in lines),
        check_cosine=tuple(line.get("lrmoe/check_cosine") for line in lines),
        check_error=tuple(line.get("lrmoe/check_relative_error") for line in lines),
        check_layer=tuple(line.get("lrmoe/check_layer") for line in lines),
        forward_peak=_present(lines, "lrmoe/forward_peak_worst"),
        backward_peak=_present(lines, "lrmoe/backward_peak_worst"),
    )
    settings = config.get("lrmoe", {})
    return SystemRun(
        name=str(summary.get("name", "training")),
        figures={**summary, **_series_figures(series)},
        series=series,
        loads=_loads(lines),
        layers=_layers(lines, _every(lines)),
        memory=_call_memory(lines, settings),
        phase_ms=_train_phases(lines),
        config=settings,
        colour="var(--series-1)",
    )


def _present(lines: Sequence[Line], name: str) -> tuple[float, ...]:
    return tuple(line[name] for line in lines if name in line)


def _series_figures(series: Series) -> dict[str, float]:
    """Figures of a training run that only its lines have."""
    evaluated = [loss for loss in series.eval_loss if loss is not None]
    figures = {"eval_loss": evaluated[-1]} if evaluated else {}
    for name, checked in (("check_cosine", series.check_cosine), ("check_error", series.check_error)):
        found = [value for value in checked if value is not None]
        if found:
            figures[name] = sum(found) / len(found)
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


def _train_phases(lines: Sequence[Line]) -> dict[str, float]:
    """Mean milliseconds of a layer call per phase, slowest rank; phases that never ran are left out."""
    names = {key for line in lines for key in line if key.startswith(_PHASE) and not key.endswith("_worst")}
    means = {
        name.removeprefix(_PHASE): sum(line.get(name, 0.0) for line in lines) / len(lines) for name in names
    }
    return {phase: ms for phase, ms in sorted(means.items()) if ms > 0}


def _call_memory(lines: Sequence[Line], settings: Mapping[str, Any]) -> Memory | None:
    """The largest of each part over layers, calls and steps."""
    stacks = {}
    for kind in ("measured", "predicted"):
        names = {part: f"{_MEMORY}{part}_{kind}_worst" for part in PARTS}
        found = {
            part: max((line.get(name) or 0 for line in lines), default=0) for part, name in names.items()
        }
        if any(found.values()):
            stacks[kind] = found
    if not stacks:
        return None
    budget = settings.get("layer_budget")
    return Memory(
        stacks=stacks,
        budget=None if budget is None or "%" in str(budget) else parse_size("layer_budget", budget),
        budget_name="layer budget",
        what="one layer call, the largest of each part over layers and steps",
    )


def unfinished_entry(lines: Sequence[Line], **more: Any) -> dict[str, Any]:
    """What the lines of a system say where the run wrote no summary."""
    last = lines[-1]
    pairs, kept = (sum(line.get(name, 0) for line in lines) for name in ("pairs", "kept"))
    shares = [line["lrmoe/kept_share"] for line in lines if "lrmoe/kept_share" in line]
    mean = sum(shares) / len(shares) if shares else None
    walls = (line.get("wall_s", line.get("moe_ms_wall", 0.0) / 1e3) for line in lines)
    return {
        "steps": len(lines),
        "final_loss": last.get("loss"),
        "moe_time_wall_s": sum(walls),
        "wire_bytes": sum(line.get("wire_bytes", 0) for line in lines),
        "kept_share": kept / pairs if pairs else mean,
        **more,
    }
