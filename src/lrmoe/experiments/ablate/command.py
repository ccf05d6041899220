"""The `ablate` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lrmoe.config import CHOICES, SCORES
from lrmoe.errors import ConfigError
from lrmoe.experiments.ablate.rules import Ablation, Part, get_preset, rules_of, with_seeds
from lrmoe.experiments.lists import names, numbers
from lrmoe.experiments.terminal import open_console, say
from lrmoe.experiments.trajectories.regimes import REGIMES
from lrmoe.experiments.trajectories.virtual import QUOTA_RULES

_DEFAULTS = {
    "scores": "lrm",
    "estimators": "sampled",
    "drops": "0.3",
    "quota_rule": "variance",
    "router_grad": "auto",
    "select_in": "backward",
}

_VALID: dict[str, tuple[Any, ...]] = {
    "scores": SCORES,
    "estimators": CHOICES["estimator"],
    "quota_rule": QUOTA_RULES,
    "router_grad": CHOICES["router_grad"],
    "select_in": CHOICES["select_in"],
}


def ablate(
    *,
    preset: str | None = None,
    regime: str | None = None,
    seeds: str | None = None,
    grid: Mapping[str, str | None],
    model: str = "qwen3-moe-micro",
    aux: float = 0.0,
    steps: int | None = None,
    workers: int | None = None,
    name: str | None = None,
    overwrite: bool = False,
    as_json: bool = False,
) -> int:
    """Run rules for the kept set beside nothing dropped, print the table, write the run's folder and its page.

    Args:
        preset: parts that ship with the package, instead of `regime` and `grid`.
        regime, seeds: "a,b" and "0,1,2", or one number of seeds. grid: by option, "a,b".
        model, aux, steps: see Ablation. workers: processes; None: one per core.
        name: of the run's folder; None: ablate, or the preset's.
        overwrite: replace an earlier run of the same name.
        as_json: figures to stdout, one JSON object a line, instead of the table.

    Returns:
        0.

    Raises:
        ConfigError: a bad value, options that exclude each other, or a name that is taken.
        LRMoEError: a run failed.
    """
    parts = _parts(preset, regime, seeds, grid)
    ablation = Ablation(
        parts=parts,
        model=model,
        aux=aux,
        steps=steps,
        folder=Path("runs") / (name or ("ablate" if preset is None else f"ablate-{preset}")),
    )
    return _run(ablation, workers, overwrite, as_json)


def _parts(
    preset: str | None, regime: str | None, seeds: str | None, grid: Mapping[str, str | None]
) -> tuple[Part, ...]:
    given = [option for option, value in {"regime": regime, **grid}.items() if value is not None]
    chosen = _seeds(seeds)
    if preset is not None:
        if given:
            raise ConfigError(
                f"--preset {preset} with --{given[0].replace('_', '-')}: a preset has its own; valid: one of them "
                "(--seeds, --model, --aux and --steps go with a preset)"
            )
        return with_seeds(get_preset(preset), chosen)
    texts = {**_DEFAULTS, **{key: text for key, text in grid.items() if text is not None}}
    values = {key: names(key.replace("_", "-"), texts[key], valid) for key, valid in _VALID.items()}
    rules = rules_of(
        scores=values["scores"],
        estimators=values["estimators"],
        drops=numbers("drops", texts["drops"], float),
        quota_rules=values["quota_rule"],
        router_grads=values["router_grad"],
        select_ins=values["select_in"],
    )
    regimes = names("regime", "memorise" if regime is None else regime, REGIMES)
    return tuple(Part(regime=one, seeds=chosen or (0, 1, 2), rules=rules) for one in regimes)


def _seeds(text: str | None) -> tuple[int, ...] | None:
    """Of an option: "5" is five seeds from 0, "3,4" these two."""
    if text is None:
        return None
    found = numbers("seeds", text, int)
    if len(found) == 1 and "," not in text:
        if found[0] < 1:
            raise ConfigError(f"--seeds {text!r}: must be at least 1, or a list of seeds as 0,1,2")
        return tuple(range(found[0]))
    return tuple(found)


def _run(ablation: Ablation, workers: int | None, overwrite: bool, as_json: bool) -> int:
    from lrmoe.experiments.ablate.run import ablate as run
    from lrmoe.report import ablate as report
    from lrmoe.report import html
    from lrmoe.report.load import load_run

    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}: must be at least 1")
    html.check_installed()  # before minutes of training, not after
    console = open_console(as_json)
    say(console, _announcement(ablation))
    summary = run(ablation, workers=workers, overwrite=overwrite)
    loaded = load_run(ablation.folder)
    page = html.write([loaded], ablation.folder / "report.html")
    if as_json:
        print(*lines(summary), sep="\n")
    for table in report.tables(loaded):
        console.print(table.rich())
    say(console, report.verdict(loaded))
    say(console, f"{page}  ({summary['total_s']:.0f} s)")
    sys.stdout.flush()
    return 0


def _announcement(ablation: Ablation) -> str:
    runs = len(list(ablation.cells()))
    regimes = ", ".join(dict.fromkeys(part.regime for part in ablation.parts))
    count = len({rule for part in ablation.parts for rule in part.rules})
    rules = "1 rule" if count == 1 else f"{count} rules"
    return f"{rules} beside nothing dropped, {ablation.model}, {regimes}: {runs} training runs"


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """The figures, one JSON object a line."""
    from lrmoe.experiments.ablate.rows import figures_of
    from lrmoe.telemetry.figures import figure

    for name, value, unit, own in figures_of(summary):
        yield json.dumps(figure(name, value, unit, "lower", **{**summary["context"], **own}), allow_nan=False)
