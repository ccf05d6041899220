"""The `compare` command."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrmoe.experiments.presets import get_preset

if TYPE_CHECKING:
    from lrmoe.experiments.config import Experiment

_FILE_WIDTH = 240  # characters


def compare(
    *,
    preset: str = "demo",
    systems: Sequence[str] | None = None,
    name: str | None = None,
    target_loss: float | None = None,
    ep: int | None = None,
    seed: int | None = None,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    as_json: bool = False,
) -> int:
    """Run the same training under several systems, print the tables, write the run's folder and its page.

    Later settings win: the preset, the file, `--set`, then the other options.

    Args:
        preset: a comparison that ships with the package.
        systems: names of systems, or ["all"]; None takes the preset's.
        name: of the run's folder; None takes the preset's name.
        target_loss, ep, seed: None keeps what the preset or the file says.
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
    options = {"systems": list(systems) if systems else None, "target_loss": target_loss, "ep": ep}
    values = _tables(preset, config, overrides)
    values["compare"] |= {key: value for key, value in options.items() if value is not None}
    train = values.setdefault("train", {})
    train["name"] = name or train.get("name") or preset
    if seed is not None:
        train["seed"] = seed
        values.setdefault("lrmoe", {})["seed"] = seed
    return _run(preset, values, overwrite, as_json)


def _tables(preset: str, config: Path | None, overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    from lrmoe.training.config import apply_override, read_toml

    values = get_preset(preset)
    if config is not None:
        for table, fields in read_toml(config).items():
            values[table] = {**values.get(table, {}), **fields} if isinstance(fields, Mapping) else fields
    for override in overrides:
        apply_override(values, override)
    return values


def _announcement(experiment: Experiment) -> str:
    c = experiment.compare
    names = " and ".join(c.systems) if len(c.systems) <= 2 else ", ".join(c.systems)
    aim = f"{c.max_steps} steps"
    if c.target_loss is not None:
        aim = f"to training loss {c.target_loss:g} (mean of {c.smoothing_steps} steps), at most {aim}"
    return f"{experiment.preset}: {names}, experts over {c.ep} processes, {aim}"


def _run(preset: str, values: Mapping[str, Any], overwrite: bool, as_json: bool) -> int:
    from rich.console import Console

    from lrmoe.experiments.compare import compare as run
    from lrmoe.experiments.config import Experiment
    from lrmoe.experiments.figures import lines
    from lrmoe.report import html, tables
    from lrmoe.report.load import load_run

    experiment = Experiment.from_dict(preset, values)
    html.check_installed()  # before minutes of training, not after
    console = Console(stderr=as_json)
    if not console.is_terminal:  # a file or a pipe has no width: words of wide tables stay whole
        console = Console(stderr=as_json, width=_FILE_WIDTH)
    console.print(_announcement(experiment), markup=False, highlight=False, soft_wrap=True)
    summary = run(experiment, overwrite=overwrite)
    loaded = load_run(experiment.folder)
    page = html.write([loaded], experiment.folder / "report.html")
    if as_json:
        print(*lines(summary), sep="\n")
    for table in (tables.headline(loaded), tables.fairness(loaded, brief=True)):
        console.print(table.rich())
    console.print(html.verdict(loaded), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{page}  ({summary['total_s']:.0f} s)", markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()
    return 0 if all(entry["reached"] for entry in summary["systems"].values()) else 1
