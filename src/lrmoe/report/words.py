"""What a page of systems that were trained says in words: the sentence on top, the tiles, and how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from lrmoe.report import tables
from lrmoe.report.data import Run, SystemRun
from lrmoe.report.names import OURS, own
from lrmoe.report.numbers import even, number

MOST_NAMED = 3  # systems in one sentence


def verdict(run: Run) -> str:
    """One sentence: what the run showed, or that it did not finish or did not reach its target."""
    if run.unfinished:
        ends = (f"{s.name} is at loss {number(s.number('final_loss'), 4)}" for s in run.systems)
        return f"{run.unfinished} {'; '.join(ends)}."
    if run.kind == "train":
        return f"One training run, final loss {number(run.systems[0].number('final_loss'), 4)}."
    missed = [system.name for system in run.systems if not system.figures.get("reached")]
    if run.target_loss is None:
        return _verdict_of_steps(run, missed)
    target = number(run.target_loss)
    if missed:
        return f"Target loss {target} was not reached by {', '.join(missed)}; times are not comparable."
    if run.baseline is None or len(run.systems) == 1:
        return f"Every system reached training loss {target}."
    others = [s for s in run.systems if s is not run.baseline]
    return f"Every system reached loss {target}. MoE-layer time to it: {_all_needed(others, run.baseline)}."


def _verdict_of_steps(run: Run, missed: Sequence[str]) -> str:
    """The verdict of a comparison that ends after a number of steps."""
    steps = max((system.number("steps") or 0 for system in run.systems), default=0)
    if missed:
        return f"{', '.join(missed)} did not do all {steps:.0f} steps with a finite loss."
    if run.baseline is None or len(run.systems) == 1:
        return f"Every system did {steps:.0f} steps."
    others = [system for system in run.systems if system is not run.baseline]
    if len(others) > MOST_NAMED:
        ratios = [(_ratio(system, run.baseline, "moe_time_critical_s"), system) for system in others]
        others = [
            system for _, system in sorted(((r, s) for r, s in ratios if r is not None), key=itemgetter(0))
        ]
        others = others[:MOST_NAMED]
    first = "" if len(others) == len(run.systems) - 1 else ", the shortest"
    return f"Every system did {steps:.0f} steps. MoE-layer time for them{first}: {_all_needed(others, run.baseline)}."


def _all_needed(systems: Sequence[SystemRun], base: SystemRun) -> str:
    """The first with what its figures are, the others in short."""
    first, *others = systems
    parts = [_needed(first, base)]
    for system in others:
        critical, wall = (_ratio(system, base, name) for name in ("moe_time_critical_s", "moe_time_wall_s"))
        beside = "" if critical is None else f" (wall {even(wall)})"
        parts.append(f"{system.name} {even(wall if critical is None else critical)}{beside}")
    return "; ".join(parts)


def _needed(system: SystemRun, base: SystemRun) -> str:
    """The modelled ratio with the wall ratio beside it, or the wall ratio alone where no link is stated."""
    critical, wall = (_ratio(system, base, name) for name in ("moe_time_critical_s", "moe_time_wall_s"))
    first, kind = (wall, "wall") if critical is None else (critical, "critical path, modelled link")
    beside = "" if critical is None else f"; wall {even(wall)}"
    return f"{system.name} needed {even(first)} of {base.name}'s time ({kind}{beside})"


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """(figure, value, explanation) of the system that the run is about, where it and the baseline arrived."""
    base, ours = run.baseline, subject(run)
    if base is None or ours is None or not (base.figures.get("reached") and ours.figures.get("reached")):
        return []
    end = "in all steps" if run.target_loss is None else "to the target loss"
    names = (
        ("MoE-layer time", "moe_time_critical_s", f"critical path, modelled link, {end}"),
        ("MoE-layer time, wall", "moe_time_wall_s", "as the clock on this machine saw it"),
        ("bytes on the wire", "wire_bytes", "all ranks, whole run"),
        ("layer buffers", "buffer_peak_bytes", "peak of the most loaded rank"),
        ("steps", "steps", f"optimizer steps {end}"),
    )
    return [
        (title, f"{ratio:.2f}", f"{explanation}, {ours.name} / {base.name}")
        for title, name, explanation in names
        if (ratio := _ratio(ours, base, name)) is not None
    ]


def subject(run: Run) -> SystemRun | None:
    """The system that a comparison is about: the user's own, else lrmoe, else the first beside the baseline."""
    others = [system for system in run.systems if system is not run.baseline]
    mine = [system for system in others if own(system.key)]
    named = [system for system in others if system.name == OURS]
    return next(iter([*mine, *named, *others]), None)


def method(run: Run) -> str:
    """How the times were taken, with the link speed that was stated."""
    if run.kind == "train":
        return "MoE-layer time is wall time of the layer on the slowest rank."
    compared, trained = (
        run.config.get("compare", {}),
        run.config.get("train", {}),
    )  # of a run that did not finish
    smoothing = run.summary.get("smoothing", {}).get("steps", compared.get("smoothing_steps", "?"))
    ranks = run.summary.get("world_size", compared.get("ep", "?"))
    seed = run.summary.get("seed", trained.get("seed", "?"))
    parts = [
        tables.critical_path(run),
        str(run.summary.get("link_rule", "")),
        f"Smoothed loss: mean of the last {smoothing} steps.",
        f"World size {ranks}, seed {seed}.",
    ]
    return " ".join(part for part in parts if part)


def _ratio(ours: SystemRun, base: SystemRun, name: str) -> float | None:
    value, other = ours.number(name), base.number(name)
    return value / other if value is not None and other else None
