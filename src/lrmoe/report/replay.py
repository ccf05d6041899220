"""Tables, plots and words of a replay: every system's measured call beside fixed ownership's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lrmoe.planning.calibration import PHASES
from lrmoe.report import bars
from lrmoe.report.data import Memory, Run
from lrmoe.report.memory import stack
from lrmoe.report.numbers import even, number, percent, size
from lrmoe.report.plot import Plot, label, line
from lrmoe.report.tables import Table

TITLES = {"drop0.5": "lrmoe, drop 0.5"}


def title(name: str) -> str:
    """A system as tables name it."""
    return TITLES.get(name, name)


def _systems(run: Run) -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = run.summary["systems"]
    return found


def times(run: Run) -> Table:
    """Peaks, time of both passes and how many times as fast as fixed ownership."""
    columns = ("system", "fwd peak", "bwd peak", "kept", "fwd ms", "bwd ms", "bwd x", "layer x")
    rows = [
        (
            title(name),
            even(f["forward_peak"], 4),
            even(f["backward_peak"], 4),
            percent(f["kept_share"]),
            even(f["forward_ms"], 4),
            even(f["backward_ms"], 4),
            even(f["backward_speedup"]),
            even(f["layer_speedup"]),
        )
        for name, f in _systems(run).items()
    ]
    note = "Peak: rows of the most loaded rank over the mean load with nothing dropped. Times: the slowest rank of "
    note += f"each phase, measured, plus the exchange, modelled ({link(run)}). x: megatron's time over the system's."
    return Table(title="Time of one layer call", columns=columns, rows=rows, note=note)


def memory(run: Run) -> Table:
    """Bytes of the fullest rank in both passes."""
    columns = ("system", "fwd MiB", "less", "bwd MiB", "less", "bwd, all", "copies")
    rows = [
        (
            title(name),
            _mib(f["forward_subtotal"]),
            percent(f["forward_subtotal_reduction"]),
            _mib(f["backward_subtotal"]),
            percent(f["backward_subtotal_reduction"]),
            _mib(f["backward_memory"]),
            number(f["replicas"]),
        )
        for name, f in _systems(run).items()
    ]
    note = "Measured on the fullest rank: experts, replicas and token buffers, and how much less than megatron; all: "
    note += "every allocation, scratch of the products included. Copies: foreign experts on all ranks."
    return Table(title="Memory of one layer call", columns=columns, rows=rows, note=note)


def _mib(value: float) -> str:
    return even(value / 2**20, 4)


def phases(run: Run) -> Table:
    """Milliseconds of every phase of both passes, measured and modelled together."""
    names = [(side, p) for side in ("forward", "backward") for p in PHASES if _any(run, side, p)]
    rows = [
        (title(name), *(even(_ms(f, side, phase)) for side, phase in names))
        for name, f in _systems(run).items()
    ]
    columns = ("system", *(f"{'f' if side == 'forward' else 'b'}: {phase}" for side, phase in names))
    note = "f: forward, b: backward; ms of the slowest rank, measured, plus bytes over the link, modelled."
    return Table(title="By phase", columns=columns, rows=rows, note=note)


def _ms(figures: Mapping[str, Any], side: str, phase: str) -> float:
    return float(sum(figures["phases"][side][kind].get(phase, 0.0) for kind in ("measured", "modelled")))


def _any(run: Run, side: str, phase: str) -> bool:
    return any(_ms(f, side, phase) > 0 for f in _systems(run).values())


def tables(run: Run) -> Sequence[Table]:
    """All tables, in order."""
    return times(run), memory(run), phases(run)


def phase_ms(figures: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of both passes by phase as measured; "wire" is all that was modelled."""
    sides = figures["phases"].values()
    found = {phase: sum(side["measured"].get(phase, 0.0) for side in sides) for phase in PHASES}
    wire = sum(sum(side["modelled"].values()) for side in sides)
    return {**{phase: ms for phase, ms in found.items() if ms}, **({"wire": wire} if wire else {})}


def memory_parts(figures: Mapping[str, Any]) -> Memory | None:
    """Bytes by part of both passes, where the summary has them."""
    parts = figures.get("parts")
    return Memory(stacks=parts, what="one layer call, forward and backward") if parts else None


def plots(run: Run) -> list[Plot]:
    """Peaks, time by phase, and memory by part of every system."""
    memory = {system.name: system.memory for system in run.systems if system.memory is not None}
    caption = f"Both passes of the call, the slowest rank of each phase; bytes on the link are modelled: {link(run)}."
    stacked = bars.phases(run)
    made = [
        peaks([(s.name, s.figures["forward_peak"], s.figures["backward_peak"]) for s in run.systems]),
        replace(stacked, caption=caption) if stacked is not None else None,
        stack(memory, name="memory", title="Memory by part", caption="Bytes of the fullest rank.")
        if memory
        else None,
    ]
    return [plot for plot in made if plot is not None]


def peaks(found: Sequence[tuple[str, float, float]]) -> Plot:
    """Forward and backward peak of every system, side by side."""
    sides = (("forward", 1), ("backward", 2))
    rows = [(name, even(ahead, 4), even(back, 4)) for name, ahead, back in found]
    ends = "; ".join(f"{name} {ahead} forward, {back} backward" for name, ahead, back in rows)
    return Plot(
        name="peak",
        title="Peak load by system",
        caption="Rows of the most loaded rank over the mean load with nothing dropped. 1 is even.",
        label=f"Peak over mean load: {ends}",
        traces=[
            {
                "type": "bar",
                "name": side,
                "x": [label(row[0]) for row in found],
                "y": [row[i] for row in found],
            }
            | {"marker": {"color": f"var(--{side})"}}
            for side, i in sides
        ],
        layout={
            "barmode": "group",
            "yaxis": {"title": "peak / mean", "rangemode": "tozero"},
            "shapes": [line(1.0)],
        },
        table=Table(title="Peak load", columns=("system", "forward", "backward"), rows=rows),
    )


def verdict(run: Run) -> str:
    """One sentence: lrmoe beside fixed ownership."""
    ours = _systems(run).get("lrmoe")
    if ours is None:
        return "Every system's time is compared with fixed ownership's."
    saved = ours["backward_subtotal_reduction"]
    return (
        f"lrmoe's backward takes {number(1 / ours['backward_speedup'])} of fixed ownership's time (measured compute, "
        f"modelled link) and {percent(abs(saved))} {'less' if saved >= 0 else 'more'} memory on the fullest rank."
    )


def link(run: Run) -> str:
    """The link in words."""
    settings = run.summary["settings"]
    speed = f"{size(settings['link_bytes_per_s'])}/s per rank"
    return f"{speed}, given" if settings["link"] == "given" else f"{speed}, at which {settings['link']}"


def method(run: Run) -> str:
    """What was measured, what was modelled, at which sizes."""
    s = run.summary["settings"]
    return (
        f"Measured: {run.summary['measured']}. Modelled: {run.summary['modelled']} ({link(run)}). {s['call']}: "
        f"{s['ranks']} ranks, {s['experts']} experts, top-{s['top_k']}, {s['pairs']:,} pairs, fixed ownership's peak "
        f"{number(s['fixed_peak'], 4)}, {s['history']} calls of history. Rows of {s['hidden']} and experts of "
        f"{s['expert_width']}, {s['dtype']}, {s['wire']}. "
        f"Activations: {s['activations']} ({s['activations_mean']}). {s['slots']} weight slots per rank "
        f"beyond the home experts; estimator {s['estimator']}, score {s['score']}. megatron and lrmoe ran "
        f"{s['repeats']} times (median), others once."
    )
