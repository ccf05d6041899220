"""What `lrmoe plan` wrote: one plan (its JSON lines) or a table of many (its CSV file)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lrmoe.planning.calibration import PHASES
from lrmoe.report import bars
from lrmoe.report.data import LayerSteps, Memory, Run, SystemRun
from lrmoe.report.heat import heat
from lrmoe.report.memory import PARTS, stack
from lrmoe.report.numbers import number, percent, size
from lrmoe.report.plot import Plot, label
from lrmoe.report.tables import Table

_Row = Mapping[str, str]
_WRITTEN: Mapping[str, Callable[[float], str]] = {
    "bytes": size,
    "boolean": lambda value: "yes" if value else "no",
}
_ON_THE_LINK = ("dispatch", "combine", "exchange", "return")
_TOLD = 5  # cases that do not fit, with their reasons


def verdict(run: Run) -> str:
    """Whether it fits, or how many cases of a sweep do."""
    if "rows" in run.summary:
        rows = run.summary["rows"]
        fit = [row for row in rows if row["fits"] == "yes"]
        return f"{len(fit)} of {len(rows)} cases fit their device."
    report = run.summary["report"]
    need, have = report["limits"]["device"]["needed"], report["limits"]["device"]["available"]
    fits = all(limit["needed"] <= limit["available"] for limit in report["limits"].values())
    said = "fits" if fits else "does not fit"
    return f"{report['described']}: {said}, {size(need)} of {size(have)} on the fullest rank."


def method(run: Run) -> str:
    """What the figures take for granted."""
    if "rows" in run.summary:
        kinds = " and ".join(
            dict.fromkeys(row.get("kind", "") for row in run.summary["rows"] if row.get("kind"))
        )
        return f"Planned, nothing was run; memory and times are {kinds or 'modelled'}."
    return " ".join(["Planned, nothing was run.", *run.summary["report"]["assumptions"]])


def tables(run: Run) -> Sequence[Table]:
    """The table of cases, or memory and figures of the one plan."""
    if "rows" in run.summary:
        return [_cases(run.summary["rows"])]
    return [_figures(run), _memory(run), *_advice(run)]


def plots(run: Run) -> list[Plot]:
    """Memory against the device, and of one plan its loads and times."""
    if "rows" in run.summary:
        return _sweep_plots(run.summary["rows"])
    planned = _planned(run)
    phases = bars.phases(planned)
    caption = (
        "Forward and backward of one MoE layer call, the slowest rank of each phase, no overlap; modelled."
    )
    made = [_stack(run), heat(planned), replace(phases, caption=caption) if phases is not None else None]
    return [plot for plot in made if plot is not None]


def _figures(run: Run) -> Table:
    rows = [
        (_called(figure), _value(figure), "" if figure["unit"] in _WRITTEN else str(figure["unit"]))
        for figure in run.summary["figures"]
        if ".bytes." not in figure["name"]
    ]
    report = run.summary["report"]
    return Table(
        title="Figures of the plan", columns=("figure", "value", "unit"), rows=rows, note=report["described"]
    )


def _called(figure: Mapping[str, Any]) -> str:
    return (
        str(figure["name"]).rpartition("gpus")[2].partition(".")[2].replace("_", " ").replace("ms.", "time, ")
    )


def _value(figure: Mapping[str, Any]) -> str:
    write = _WRITTEN.get(figure["unit"])
    return number(figure["value"], 4) if write is None else write(figure["value"])


def _memory(run: Run) -> Table:
    report = run.summary["report"]
    columns = {
        f"{what}, {side}": report[what][side]
        for what in ("call", "model")
        for side in ("forward", "backward")
    }
    rows = [
        (title, *(size(parts.get(part, 0)) for parts in columns.values()))
        for part, title in PARTS.items()
        if any(parts.get(part) for parts in columns.values())
    ]
    rows.append(("MoE", *(size(sum(parts.values())) for parts in columns.values())))
    rows.append(("not MoE", "", "", *([size(sum(report["reserved"].values()))] * 2)))
    note = f"Activations: {report['mode']}."
    return Table(title="Bytes of the fullest rank", columns=("part", *columns), rows=rows, note=note)


def _advice(run: Run) -> list[Table]:
    rows = [(one["change"], str(one["largest_micro_batch"])) for one in run.summary["report"]["advice"]]
    table = Table(title="What would fit", columns=("change", "largest micro-batch"), rows=rows, text=True)
    return [table] if rows else []


def _stack(run: Run) -> Plot:
    report = run.summary["report"]
    other = {"reserved": sum(report["reserved"].values())}
    found = Memory(
        stacks={side: {**parts, **other} for side, parts in report["model"].items()},
        budget=report["limits"]["device"]["available"],
        budget_name="device",
        what="the whole model",
    )
    return stack(
        {"plan": found},
        name="memory",
        title="Memory against the device",
        caption="Bytes of the fullest rank, modelled.",
    )


def _planned(run: Run) -> Run:
    """The planned call as a system with one step."""
    report = run.summary["report"]
    layer = LayerSteps(
        layer=0,
        step=(1,),
        forward_SR=(tuple(report["forward_load"]),),
        backward_SR=(tuple(report["backward_load"]),),
        counts_SE=(tuple(report["counts"]),),
        quota_SE=(tuple(report["quotas"]),),
    )
    sides = report["ms"].values()
    phase_ms = {phase: sum(side.get(phase, 0.0) for side in sides) for phase in PHASES}
    phase_ms["wire"] = sum(phase_ms.pop(phase) for phase in _ON_THE_LINK)
    system = SystemRun(name="plan", layers=(layer,), phase_ms={p: ms for p, ms in phase_ms.items() if ms})
    return Run(name=run.name, kind="plan", summary={}, config={}, systems=(system,))


def _swept(rows: Sequence[_Row]) -> list[str]:
    """Columns that the cases differ in, without the answers, and without those that follow from another."""
    asked = list(rows[0])[: list(rows[0]).index("fits")]
    found: list[str] = []
    for name in (name for name in asked if len({row[name] for row in rows}) > 1):
        known = {tuple(row[other] for other in found) for row in rows}
        if len({(*(row[other] for other in found), row[name]) for row in rows}) > len(known):
            found.append(name)
    return found


def _case(row: _Row, swept: Sequence[str]) -> str:
    words = [
        row[name] if name in ("model", "hardware", "policy") else f"{name.replace('_', '-')} {row[name]}"
        for name in swept
    ]
    return ", ".join(words) or row["model"]


def _cases(rows: Sequence[_Row]) -> Table:
    swept = _swept(rows)
    columns = ("case", "fits", "largest micro-batch", "device need", "device", "kept", "layer ms")
    body = [
        (
            _case(row, swept),
            row["fits"],
            row["largest_micro_batch"],
            size(_number(row, "device_bytes")),
            size(_number(row, "device_available")),
            percent(_number(row, "kept_share")),
            number(_number(row, "layer_ms"), 4),
        )
        for row in rows
    ]
    asked = list(rows[0])[: list(rows[0]).index("fits")]
    same = [
        f"{name} {rows[0][name]}" for name in asked if len({row[name] for row in rows}) == 1 and rows[0][name]
    ]
    notes = [f"The same for all: {', '.join(same)}."] if len(rows) > 1 and same else []
    why = [f"{_case(row, swept)}: {row['why']}" for row in rows if row.get("why")]
    notes += (
        [f"Do not fit: {'; '.join(why[:_TOLD])}{'; and others' if len(why) > _TOLD else ''}."] if why else []
    )
    return Table(title="Capacity", columns=columns, rows=body, note=" ".join(notes))


def _number(row: _Row, name: str) -> float | None:
    try:
        return float(row[name])
    except (KeyError, ValueError):
        return None


def _sweep_plots(rows: Sequence[_Row]) -> list[Plot]:
    swept = _swept(rows)
    found = [(_case(row, swept), row) for row in rows if _number(row, "device_bytes") is not None]
    if not found:
        return []
    memory = _bars(
        found,
        "memory",
        "Memory of the fullest rank against the device",
        "GiB",
        ("device_bytes", "device_available"),
        2**30,
    )
    times = _bars(found, "time", "Time of a layer call", "ms", ("layer_ms",), 1)
    return [memory, times]


_BARS = {
    "device_bytes": ("needed", "var(--series-1)"),
    "device_available": ("available", "var(--forward)"),
    "layer_ms": ("layer call", "var(--series-1)"),
}


def _bars(
    found: Sequence[tuple[str, _Row]], name: str, title: str, unit: str, fields: Sequence[str], scale: float
) -> Plot:
    values = {field: [(_number(row, field) or 0.0) / scale for _, row in found] for field in fields}
    names = [case for case, _ in found]
    rows = [(case, *(number(values[field][i], 4) for field in fields)) for i, case in enumerate(names)]
    return Plot(
        name=name,
        title=title,
        caption="One bar per case that could be planned; modelled.",
        label=f"{title}: " + "; ".join(f"{row[0]} {' of '.join(row[1:])} {unit}" for row in rows),
        traces=[
            {"type": "bar", "orientation": "h", "name": _BARS[field][0], "y": [label(case) for case in names]}
            | {"x": values[field], "marker": {"color": _BARS[field][1]}}
            for field in fields
        ],
        layout={
            "barmode": "group",
            "xaxis": {"title": unit, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "showgrid": False},
        },
        table=Table(
            title=title, columns=("case", *(f"{_BARS[field][0]}, {unit}" for field in fields)), rows=rows
        ),
        height=130 + (30 if len(fields) == 1 else 38) * len(found),
    )
