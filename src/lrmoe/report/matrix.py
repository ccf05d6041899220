"""Tables and words of a comparison of several cells: time to each target, per seed and over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lrmoe.report.data import Run, SystemRun
from lrmoe.report.matrix_cases import (
    PARTS,
    Case,
    Row,
    called,
    cases,
    mean,
    paired,
    point,
    words,
)
from lrmoe.report.numbers import even, number, percent, plain, seconds, size, with_error
from lrmoe.report.tables import Table, fairness
from lrmoe.statistics import standard_error


def _fine(share: float | None) -> str:
    """A share, often a small one, as a percentage."""
    return "-" if share is None else f"{number(100 * share)}%"


_Shown = Sequence[tuple[str, str, Callable[[float | None], str]]]
_TOLD = 3  # cases in one sentence
# of a row: name, heading, how it is written; those of _RATIOS also as a ratio
_SHOWN: _Shown = (
    ("critical_s", "time, critical path", seconds),
    ("wall_s", "time, wall", seconds),
    ("steps", "steps", number),
    ("wire_bytes", "wire", size),
    ("buffer_peak_bytes", "buffers", size),
    ("kept_share", "kept", percent),
    ("dropped_energy", "energy dropped", _fine),
    ("added_variance", "variance added", _fine),
)
_RATIOS = ("critical_s", "wall_s", "steps")
_BRIEF = 3  # of _SHOWN, where there is little room


def tables(run: Run, *, brief: bool = False) -> list[Table]:
    """The headline, then every case, every seed, and what the systems were given.

    Args:
        brief: times and steps only, for a terminal; the rest is on the page and in rows.csv.
    """
    first, *given = summary(run, brief=brief)
    return [first, *parts(run, brief=brief), *given]


def summary(run: Run, *, brief: bool = False) -> list[Table]:
    """The headline, and what the systems were given."""
    return [headline(run), *_fairness(run, brief)]


def parts(run: Run, *, brief: bool = False) -> list[Table]:
    """Every case, and every seed."""
    shown = _SHOWN[:_BRIEF] if brief else _SHOWN
    return [*(_case_table(run, case, shown) for case in cases(run)), per_seed(run, shown)]


def headline(run: Run) -> Table:
    """Time to loss of each system in each case, as a ratio to the chosen system's where there is one."""
    found, names = cases(run), called(run)
    rows = [(names[system], *(_headline_cell(run, case, system) for case in found)) for system in names]
    columns: Sequence[str] = ("", *(case.name for case in found))
    if len(found) > len(names):
        columns, *rows = zip(columns, *rows, strict=True)
    title = "MoE-layer time on the critical path"
    title += " to the loss" if run.summary["targets"] else f" of {run.summary['max_steps']} steps"
    base = run.summary["against"]
    if base is not None:
        title += f", against {names[base]}"
    return Table(title=title, columns=columns, rows=rows, note=_note(run, found))


def _note(run: Run, found: Sequence[Case]) -> str:
    seeds = sorted({row["seed"] for row in run.summary["rows"]})
    text = f"Mean over {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
    text += " +- its standard error. " if len(seeds) > 1 else ". "
    if run.summary["against"] is not None:
        text += "Ratios are paired by seed, below 1 is faster; in brackets the time itself. "
    same = [words(run, found[0].key, [i]) for i in range(len(PARTS)) if len({c.key[i] for c in found}) == 1]
    return text + f"The same for all: {', '.join(same)}."


def _headline_cell(run: Run, case: Case, system: str) -> str:
    arrived, asked = case.arrived(system), case.rows.get(system, ())
    if not arrived:
        return "not reached" if asked else "-"
    text = _spread([row["critical_s"] for row in arrived], seconds)
    ratio = _ratio(run, case, system, "critical_s")
    if ratio is not None:
        text = f"{ratio} ({seconds(mean([row['critical_s'] for row in arrived]))})"
    return text if len(arrived) == len(asked) else f"{text}, {len(arrived)} of {len(asked)} seeds"


def _case_table(run: Run, case: Case, shown: _Shown) -> Table:
    names, base = called(run), run.summary["against"]
    columns = ["", "arrived"]
    for name, heading, _ in shown:
        columns.append(heading)
        if base is not None and name in _RATIOS:
            columns.append(f"/ {names[base]}'s")
    rows = [(names[system], *_case_cells(run, case, system, shown)) for system in case.rows]
    budgets = {row["budget"] for rows_ in case.rows.values() for row in rows_}
    note = f"Budget of every system: {', '.join(plain(b) for b in budgets)}." if budgets != {None} else ""
    return Table(title=case.title, columns=columns, rows=rows, note=note)


def _case_cells(run: Run, case: Case, system: str, shown: _Shown) -> Iterator[str]:
    arrived = case.arrived(system)
    yield f"{len(arrived)} of {len(case.rows[system])}"
    for name, _, write in shown:
        yield _spread([row[name] for row in arrived], write)
        if run.summary["against"] is not None and name in _RATIOS:
            yield _ratio(run, case, system, name) or "-"


def per_seed(run: Run, shown: _Shown = _SHOWN) -> Table:
    """Every row as it is, or some of its figures."""
    names = called(run)
    rows = [
        (names[row["system"]], case.name, str(row["seed"]), _yes(row), *_figures(row, shown))
        for case in cases(run)
        for system_rows in case.rows.values()
        for row in system_rows
    ]
    columns = ("system", "case", "seed", "arrived", *(heading for _, heading, _ in shown))
    return Table(title="Every seed", columns=columns, rows=rows, note="The same rows stand in rows.csv.")


def _yes(row: Row) -> str:
    return "yes" if row["reached"] else "NO"


def _figures(row: Row, shown: _Shown) -> Iterator[str]:
    for name, _, write in shown:
        yield write(row[name])


def _fairness(run: Run, brief: bool) -> list[Table]:
    """What each system was given: a table per model, as slots hold experts of its size."""
    names, made = called(run), []
    for model, given in run.summary["fairness"].items():
        systems = tuple(
            SystemRun(name=names[key], figures={"fairness": entry}) for key, entry in given.items()
        )
        table = fairness(replace(run, systems=systems), brief=brief)
        made.append(replace(table, title=f"{table.title}, {model}"))
    return made


def verdict(run: Run) -> str:
    """The fastest system of each case in a sentence, and what is missing."""
    base, names, parts = run.summary["against"], called(run), []
    done, asked = run.summary["cells_finished"], run.summary["cells_asked"]
    if done < asked:
        parts.append(f"{done} of {asked} cells are finished.")
    found = cases(run)
    for case in found[:_TOLD]:
        points = [(p[0], s) for s in names if s != base and (p := point(run, case, s)) is not None]
        if points:
            parts.append(_fastest(run, case, min(points)[1]))
    if len(found) > _TOLD:
        parts.append(f"The table has all {len(found)} cases.")
    missed = sum(not row["reached"] for row in run.summary["rows"])
    if missed:
        parts.append(f"{missed} of {len(run.summary['rows'])} runs did not arrive.")
    return " ".join(parts)


def _fastest(run: Run, case: Case, system: str) -> str:
    base, names = run.summary["against"], called(run)
    value, error = point(run, case, system) or (0.0, None)
    took = with_error(value, error)
    if base is None:
        return f"{case.name}: {names[system]} was fastest, {took} s."
    return f"{case.name}: {names[system]} took {took} of {names[base]}'s MoE-layer time."


def method(run: Run) -> str:
    """What the figures are."""
    steps, smoothed = f"{run.summary['max_steps']} steps", run.summary["smoothing"]["steps"]
    end = f"at most {steps}" if run.summary["targets"] else steps
    return (
        f"Every cell is a comparison of its own over {run.summary['world_size']} processes, {end}; its folder is shown "
        f"by lrmoe report as well. A system has reached a loss when the mean of its last {smoothed} training losses is "
        "at or below it. Critical path: per layer call and phase the largest thread CPU time of any rank, summed, plus "
        "the bytes of the rank that sends most over a modelled link, the same for all systems of a cell. Wall: what "
        "the clock of this machine saw. Standard errors are over seeds; ratios are taken per seed before they are "
        "averaged."
    )


def _ratio(run: Run, case: Case, system: str, quantity: str) -> str | None:
    found = paired(run, case, system, quantity)
    if found is None:
        return None
    return with_error(found["ratio_mean"], found["standard_error"])


def _spread(values: Sequence[float | None], write: Callable[[float | None], str]) -> str:
    """Mean, and its standard error over it where it is a time, a number or a size; "-" where there is none."""
    known = [value for value in values if value is not None]
    middle, error = mean(known), standard_error(known)
    text = write(middle)
    if not middle or not error or write in (percent, _fine):
        return text
    return f"{text} +- {even(100 * error / middle, 2)}%"
