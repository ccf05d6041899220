"""What stands on the page for each kind of run, alone or two side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lrmoe.errors import ConfigError
from lrmoe.report import (
    ablate,
    headline,
    matrix,
    matrix_plots,
    pair,
    plan,
    replay,
    side,
    simulation,
    simulation_pair,
    simulation_plots,
    tables,
    words,
)
from lrmoe.report.bars import load, phases
from lrmoe.report.checks import checks
from lrmoe.report.curves import energy, kept, limited, peaks, variance
from lrmoe.report.data import Run
from lrmoe.report.heat import heat
from lrmoe.report.loss import loss_against_steps, loss_against_time
from lrmoe.report.memory import memory
from lrmoe.report.plot import Plot
from lrmoe.report.tables import Table
from lrmoe.report.targets import targets

MOST_OPEN = 3  # tables of parts that a page shows without being asked
TRAINED = ("compare", "train")
_COMMANDS = {"matrix": "compare"}  # kinds that are not called as their command is


@dataclass(frozen=True, kw_only=True)
class Section:
    """One run on the page, or two side by side: the sentence, tiles, plots and tables.

    `beside` stands next to the headline where there is room; `folded` are closed until a reader opens them, and so is
    the whole section where `closed`.
    """

    anchor: str
    kicker: str
    title: str
    verdict: str
    headline: Table
    plots: Sequence[Plot]
    method: str
    details: Sequence[Table]
    tiles: Sequence[tuple[str, str, str]] = ()
    fairness: Table | None = None
    further: Sequence[Table] = ()
    beside: Table | None = None
    folded: Sequence[Table] = ()
    closed: bool = False


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a run that has all its figures in its summary is shown; `parts` are tables that there may be many of."""

    verdict: Callable[[Run], str]
    tables: Callable[[Run], Sequence[Table]]
    plots: Callable[[Run], Sequence[Plot]]
    method: Callable[[Run], str]
    fairness: Callable[[Run], Table] | None = None
    parts: Callable[[Run], Sequence[Table]] | None = None


KINDS: Mapping[str, Kind] = {
    "simulate": Kind(
        verdict=simulation.verdict,
        tables=simulation.tables,
        plots=simulation_plots.plots,
        method=simulation.method,
        fairness=simulation.fairness,
    ),
    "replay": Kind(verdict=replay.verdict, tables=replay.tables, plots=replay.plots, method=replay.method),
    "matrix": Kind(
        verdict=matrix.verdict,
        tables=matrix.summary,
        parts=matrix.parts,
        plots=matrix_plots.plots,
        method=matrix.method,
    ),
    "ablate": Kind(verdict=ablate.verdict, tables=ablate.tables, plots=ablate.plots, method=ablate.method),
    "plan": Kind(verdict=plan.verdict, tables=plan.tables, plots=plan.plots, method=plan.method),
    "headline": Kind(
        verdict=headline.verdict,
        tables=headline.tables,
        plots=headline.plots,
        method=headline.method,
        fairness=tables.fairness,
    ),
}


def sections_of(runs: Sequence[Run]) -> list[Section]:
    """The sections of a page of one run or two.

    Raises:
        ConfigError: two runs that have nothing to stand side by side.
    """
    if len(runs) == 1:
        return [section(runs[0], "run0")]
    left, right = runs
    if left.kind in TRAINED and right.kind in TRAINED:
        return [_paired(pair.pair(left, right))]
    if left.kind != right.kind:
        raise ConfigError(
            f"runs: {left.name!r} is of {_called(left)} and {right.name!r} of {_called(right)}; two that were trained, "
            "or two of the same kind, can stand side by side"
        )
    if left.kind == "simulate":
        return [_simulated_pair(left, right)]
    return _side_by_side(left, right)


def section(run: Run, anchor: str) -> Section:
    """The section of one run."""
    return _trained(run, anchor) if run.kind in TRAINED else _summarised(run, anchor)


def _summarised(run: Run, anchor: str) -> Section:
    kind = KINDS[run.kind]
    first, *others = kind.tables(run)
    parts = kind.parts(run) if kind.parts is not None else []
    few = len(parts) <= MOST_OPEN
    return Section(
        anchor=anchor,
        kicker=f"lrmoe {_COMMANDS.get(run.kind, run.kind)}",
        title=run.name,
        verdict=kind.verdict(run),
        headline=first,
        further=[*(parts if few else ()), *others],
        folded=() if few else parts,
        plots=kind.plots(run),
        fairness=_fairness(kind, run),
        method=kind.method(run),
        details=_with_rows(tables.environment(run)),
    )


def _fairness(kind: Kind, run: Run) -> Table | None:
    table = kind.fairness(run) if kind.fairness is not None else None
    return table if table is not None and table.rows else None


def _trained(run: Run, anchor: str) -> Section:
    details = [tables.system_settings(run), tables.settings(run), tables.environment(run)]
    if run.kind == "train":
        details.insert(0, tables.train_summary(run))
    fairness = tables.fairness(run)
    return Section(
        anchor=anchor,
        kicker=f"lrmoe {run.kind}",
        title=run.name,
        verdict=words.verdict(run),
        tiles=words.tiles(run),
        headline=tables.headline(run),
        further=[targets(run)] if _several_targets(run) else (),
        plots=plots(run),
        fairness=fairness if fairness.rows else None,
        method=words.method(run),
        details=_with_rows(*details),
    )


def _several_targets(run: Run) -> bool:
    return all(len(system.figures.get("to_target", ())) > 1 for system in run.systems)


def plots(run: Run) -> list[Plot]:
    """All plots that a run of systems that were trained has data for, in the page's order."""
    bars = () if run.kind == "pair" else (load,)
    curves = (kept, energy, variance, limited, checks)
    drawn = (loss_against_time, loss_against_steps, *bars, heat, peaks, phases, memory, *curves)
    made = (draw(run) for draw in drawn)
    return [plot for plot in made if plot is not None]


def _with_rows(*found: Table) -> list[Table]:
    return [table for table in found if table.rows]


def _paired(both: pair.Pair) -> Section:
    first, *others = pair.headlines(both)
    details = [
        replace(tables.settings(run), title=f"Configuration of {title}")
        for title, run in zip(both.titles, both.runs, strict=True)
    ]
    return Section(
        anchor="pair",
        kicker="lrmoe report, two runs",
        title=both.both.name,
        verdict=pair.verdict(both),
        headline=first,
        further=[*others, *_with_rows(pair.differences(both))],
        plots=plots(both.both),
        method=pair.method(both),
        details=_with_rows(*details),
    )


def _simulated_pair(left: Run, right: Run) -> Section:
    titles = pair.call(left, right)
    first, *others = simulation_pair.tables(left, right, titles)
    details = [
        replace(table, title=f"{table.title} ({title})")
        for title, run in zip(titles, (left, right), strict=True)
        for table in (*simulation.tables(run), simulation.fairness(run))
    ]
    return Section(
        anchor="pair",
        kicker="lrmoe report, two simulations",
        title=" and ".join(titles),
        verdict=simulation_pair.verdict(left, right, titles),
        headline=first,
        further=_with_rows(*others),
        plots=simulation_pair.plots(left, right, titles),
        method=" ".join(
            f"{title}: {simulation.method(run)}" for title, run in zip(titles, (left, right), strict=True)
        ),
        details=details,
    )


def _side_by_side(left: Run, right: Run) -> list[Section]:
    """The figures that both have in one table, then each run as it is alone.

    Of runs with many parts the summaries of both come first, side by side; the rest is closed.
    """
    titles = pair.call(left, right)
    alone = [
        replace(section(run, f"run{i}"), title=title)
        for i, (run, title) in enumerate(zip((left, right), titles, strict=True))
    ]
    table, folds = side.table(left, right, titles), KINDS[left.kind].parts is not None
    heads = [replace(one.headline, title=f"{one.title}: {one.headline.title}") for one in alone]
    both = Section(
        anchor="pair",
        kicker=f"lrmoe report, two of lrmoe {_COMMANDS.get(left.kind, left.kind)}",
        title=" and ".join(titles),
        verdict=side.verdict(left, right, titles),
        headline=heads[0] if folds else table,
        beside=heads[1] if folds else None,
        further=_with_rows(side.differences(left, right, titles)),
        folded=[table] if folds else (),
        plots=(),
        method="Each run's own page follows, with what it measured and how.",
        details=(),
    )
    return [both, *(replace(one, closed=folds) for one in alone)]


def _called(run: Run) -> str:
    return "`compare`, several cells" if run.kind == "matrix" else f"`{run.kind}`"
