"""The `compare` command."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrmoe.errors import ConfigError
from lrmoe.experiments.compare.presets import get_preset
from lrmoe.experiments.terminal import open_console, say

if TYPE_CHECKING:
    from rich.console import Console

    from lrmoe.experiments.compare.cells import Cell
    from lrmoe.experiments.compare.config import Experiment

_AIMS = {"target_loss": "targets", "targets": "target_loss"}  # two keys for one thing


def compare(
    *,
    preset: str = "demo",
    systems: Sequence[str] | None = None,
    name: str | None = None,
    target_loss: float | None = None,
    targets: Sequence[float] | None = None,
    ep: int | None = None,
    seed: int | None = None,
    seeds: Sequence[int] | None = None,
    regime: str | None = None,
    models: Sequence[str] | None = None,
    aux: Sequence[float] | None = None,
    against: str | None = None,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    as_json: bool = False,
) -> int:
    """Run the same training under several systems, print the tables, write the run's folder and its page.

    Later settings win: the preset, the regime, the file, `--set`, then the other options. Several seeds, models or
    auxiliary losses are several comparisons, each in a folder of its own below the run's.

    Args:
        preset: a comparison that ships with the package.
        systems: names of systems, or ["all"]; None takes the preset's.
        name: of the run's folder; None takes the preset's name.
        target_loss, targets, ep, seed, seeds, regime, models, aux, against: keys of [compare] and [train]; None keeps
            what the preset or the file says.
        config: a TOML file with table [compare] and those of a training run.
        overrides: "table.key=value".
        overwrite: replace an earlier run of the same name.
        as_json: figures to stdout, one JSON object a line, instead of the tables.

    Returns:
        0, or 1 where a system did not reach the target, or without a target lost its finite loss.

    Raises:
        ConfigError: a bad value, an unknown preset or system, or a name that is taken.
        LRMoEError: training failed.
    """
    _refuse_both(("--target-loss", target_loss), ("--targets", targets))
    _refuse_both(("--seed", seed), ("--seeds", seeds))
    options = {
        "systems": None if systems is None else list(systems),
        "target_loss": target_loss,
        "targets": targets,
        "seeds": seeds,
        "ep": ep,
        "regime": regime,
        "models": models,
        "aux": aux,
        "against": against,
    }
    given = {key: value for key, value in options.items() if value is not None}
    values = tables_of(preset, config, overrides, given)
    train = values.setdefault("train", {})
    train["name"] = name or train.get("name") or preset
    if seed is not None:
        train["seed"] = seed
        values.setdefault("lrmoe", {})["seed"] = seed
        if isinstance(values["compare"], dict):
            values["compare"].pop("seeds", None)
    return _run(preset, values, overwrite, as_json)


def _refuse_both(one: tuple[str, Any], other: tuple[str, Any]) -> None:
    if one[1] is not None and other[1] is not None:
        raise ConfigError(f"{one[0]} and {other[0]} given; valid: one of them")


def tables_of(
    preset: str, config: Path | None, overrides: Sequence[str], given: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The tables of a comparison: of the preset, its regime, a file, `--set`, and options of [compare].

    Raises:
        ConfigError: an unknown preset or regime, or a file or override that cannot be read.
    """
    from lrmoe.training.toml_files import read_toml

    file = {} if config is None else read_toml(config)
    values = _layered(preset, {}, file, overrides, given)
    compare = values["compare"]
    regime = compare.get("regime") if isinstance(compare, Mapping) else None
    if regime is None:
        return values
    from lrmoe.experiments.compare.starting import regime_tables

    return _layered(preset, regime_tables(str(regime), values), file, overrides, given)


def _layered(
    preset: str,
    regime: Mapping[str, Any],
    file: Mapping[str, Any],
    overrides: Sequence[str],
    given: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """All of them, later ones last."""
    from lrmoe.training.toml_files import apply_override

    values = get_preset(preset)
    for layer in (regime, file):
        for table, fields in layer.items():
            _put(values, table, fields)
    for override in overrides:
        _make_room(values, override.partition("=")[0].strip().removeprefix("compare."))
        apply_override(values, override)
    _put(values, "compare", given)
    return values


def _put(values: dict[str, dict[str, Any]], table: str, fields: Any) -> None:
    before = values.get(table, {})
    if not (isinstance(fields, Mapping) and isinstance(before, Mapping)):
        values[table] = before if isinstance(fields, Mapping) else fields  # refused when the tables are built
        return
    if table == "compare":
        for key in fields:
            _make_room(values, key)
    values[table] = {**before, **fields}


def _make_room(values: Mapping[str, dict[str, Any]], key: str) -> None:
    """A later target replaces an earlier one of the other key."""
    other = _AIMS.get(key)
    if other is not None and isinstance(values.get("compare"), dict):
        values["compare"].pop(other, None)


def _announcement(experiment: Experiment, cells: int) -> str:
    c = experiment.compare
    names = " and ".join(c.systems) if len(c.systems) <= 2 else ", ".join(c.systems)
    aim = f"{c.max_steps} steps"
    if c.aims:
        losses = ", ".join(f"{target:g}" for target in c.aims)
        aim = f"to training loss {losses} (mean of {c.smoothing_steps} steps), at most {aim}"
    regime = "" if c.regime is None else f", regime {c.regime}"
    several = "" if cells == 1 else f"; {cells} cells, one after another"
    return f"{experiment.preset}: {names}, experts over {c.ep} processes, {aim}{regime}{several}"


def _run(preset: str, values: Mapping[str, Any], overwrite: bool, as_json: bool) -> int:
    from lrmoe.experiments.compare.cells import cells_of
    from lrmoe.experiments.compare.config import Experiment
    from lrmoe.report import html

    experiment = Experiment.from_dict(preset, values)
    cells = cells_of(experiment)
    html.check_installed()  # before minutes of training, not after
    console = open_console(as_json)
    say(console, _announcement(experiment, len(cells)))
    if len(cells) > 1:
        return _matrix(experiment, cells, console, overwrite, as_json)
    return _single(cells[0].experiment, console, overwrite, as_json)


def _single(experiment: Experiment, console: Console, overwrite: bool, as_json: bool) -> int:
    from lrmoe.experiments.compare.figures import lines
    from lrmoe.experiments.compare.matrix_folder import make_room
    from lrmoe.experiments.compare.run import compare as run
    from lrmoe.experiments.compare.starting import started
    from lrmoe.experiments.trajectories.regimes import CACHE
    from lrmoe.report import html, tables
    from lrmoe.report.load import load_run
    from lrmoe.report.targets import targets

    make_room(experiment, overwrite=overwrite)
    cache = Path(experiment.train.train.runs) / CACHE.name
    summary = run(started(experiment, cache, partial(say, console)), overwrite=overwrite)
    loaded = load_run(experiment.folder)
    page = html.write([loaded], experiment.folder / "report.html")
    if as_json:
        print(*lines(summary), sep="\n")
    shown = [tables.headline(loaded), tables.fairness(loaded, brief=True)]
    if len(experiment.compare.aims) > 1:
        shown.insert(1, targets(loaded))
    for table in shown:
        console.print(table.rich())
    say(console, html.verdict(loaded))
    say(console, f"{page}  ({summary['total_s']:.0f} s)")
    sys.stdout.flush()
    arrived = all(entry["reached"] for entry in summary["systems"].values())
    return 0 if arrived else 1


def _matrix(
    experiment: Experiment, cells: Sequence[Cell], console: Console, overwrite: bool, as_json: bool
) -> int:
    from lrmoe.experiments.compare.matrix import run_matrix
    from lrmoe.report import html, matrix
    from lrmoe.report.load import load_run
    from lrmoe.report.matrix_figures import lines

    summary = run_matrix(experiment, cells, overwrite=overwrite, say=partial(say, console))
    loaded = load_run(experiment.folder)
    page = html.write([loaded], experiment.folder / "report.html")
    if as_json:
        print(*lines(summary), sep="\n")
    for table in matrix.tables(loaded, brief=True):
        console.print(table.rich())
    say(console, matrix.verdict(loaded))
    say(console, f"{page}  ({summary['total_s']:.0f} s of {len(cells)} cells)")
    sys.stdout.flush()
    return 0 if all(row["reached"] for row in summary["rows"]) else 1
