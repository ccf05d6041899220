"""The `simulate` command: settings from options, progress, tables, JSON lines and the run's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from lrmoe.errors import ConfigError
from lrmoe.experiments.folder import check_free, put
from lrmoe.experiments.terminal import progress_bar, say
from lrmoe.report import html, simulation
from lrmoe.simulate.published import SEEDS, published_settings, run_published
from lrmoe.simulate.run import Settings, run
from lrmoe.simulate.scenario import SYSTEMS, Allowance
from lrmoe.simulate.sources import enlarge
from lrmoe.simulate.summary import BASELINE
from lrmoe.sizes import parse_size
from lrmoe.telemetry.figures import environment, figure
from lrmoe.telemetry.traces import load

RUNS = Path("runs")
_OWN = ("summary.json", "report.html")
_FIXED_BY_PRESET = (
    "trace", "generator", "ranks", "experts", "top_k", "tokens", "steps", "budget", "seed", "max_drop", "model",
    "hardware", "options",
)  # fmt: skip

# figure of a system's summary -> unit, which way is better
QUANTITIES: Mapping[str, tuple[str, str]] = {
    "forward_peak": ("mean loads", "lower"),
    "forward_peak_worst": ("mean loads", "lower"),
    "backward_peak": ("mean loads", "lower"),
    "backward_peak_worst": ("mean loads", "lower"),
    "peak": ("mean loads", "lower"),
    "kept_share": ("share", "higher"),
    "overflow_share": ("share", "lower"),
    "replicas": ("copies", "lower"),
    "extra_slots": ("slots", "lower"),
    "forward_subtotal": ("bytes", "lower"),
    "backward_subtotal": ("bytes", "lower"),
    "local_share": ("share", "higher"),
    "row_traffic": ("bytes", "lower"),
    "weight_traffic": ("bytes", "lower"),
    "plan_ms": ("ms", "lower"),
    "forward_ms": ("ms", "lower"),
    "backward_ms": ("ms", "lower"),
    "layer_ms": ("ms", "lower"),
}
CHUNKS: Mapping[str, tuple[str, str]] = {  # where any system has more than 1
    "forward_chunks": ("chunks", "lower"),
    "backward_chunks": ("chunks", "lower"),
}
_PUBLISHED_UNITS = {
    "speedup": ("ratio", "higher"),
    "peak": ("mean loads", "lower"),
    "over": ("ratio", "lower"),
}


def simulate(
    *,
    preset: str | None = None,
    trace: Path | None = None,
    trace_system: str | None = None,
    generator: str | None = None,
    systems: Sequence[str] | None = None,
    ranks: str | None = None,
    experts: str | None = None,
    top_k: int | None = None,
    tokens: int | None = None,
    steps: int | None = None,
    skip: int | None = None,
    slots: int = 2,
    budget: str | None = None,
    max_drop: float | None = None,
    seed: int | None = None,
    model: str | None = None,
    hardware: str | None = None,
    options: Sequence[str] = (),
    name: str | None = None,
    overwrite: bool = False,
    as_json: bool = False,
) -> int:
    """Plan recorded or generated calls under several systems, print tables, write runs/<name>/.

    Args:
        preset: "published" fixes everything but systems and slots.
        trace: a trace file, CSV or run folder; trace_system: whose calls in it.
        generator: a load pattern; options: its "key=value".
        systems: names; None takes all. ranks, experts: numbers with commas.
        top_k, tokens, steps, skip, max_drop, seed, model, hardware: None takes the defaults of Settings.
        slots: weight slots per rank beyond the home experts. budget: bytes per rank and call, or a size.
        name: of the run's folder; None takes the preset's name or "simulate", and replaces an earlier simulation.
        overwrite: replace an earlier run of that name (see `training.kinds`); never its checkpoints.
        as_json: figures to stdout, one JSON object a line; tables to stderr.

    Returns:
        0; 3 where a budget was given and no system fits it in every call.

    Raises:
        ConfigError: bad options, trace or budget, a folder that cannot be written or a name that is taken.
    """
    given = {key: value for key, value in locals().items() if key in _FIXED_BY_PRESET and value}
    if preset is None:
        settings = _settings(
            trace=trace,
            trace_system=trace_system,
            allowance=_allowance(slots, budget, max_drop),
            generator=generator,
            options=parse_options(options),
            systems=systems,
            ranks=_numbers("ranks", ranks),
            experts=_numbers("experts", experts),
            top_k=top_k,
            tokens=tokens,
            steps=steps,
            skip=skip,
            seeds=None if seed is None else (seed,),
            model=model,
            hardware=hardware,
        )
        todo: Callable[[Any], dict[str, Any]] = partial(run, settings)
    else:
        settings = _published(preset, systems, slots, given)
        todo = partial(run_published, settings)
    html.check_installed()  # before minutes of planning, not after
    folder = named_folder(name or preset or "simulate")
    keep_trace(trace, folder)
    check_free(folder, own=_OWN, replaceable=name is None, overwrite=overwrite)
    console = Console(stderr=as_json)
    begin = time.monotonic()
    with progress_bar() as told:
        summary = todo(told)
    summary |= {"name": folder.name, "context": environment(), "total_s": time.monotonic() - begin}
    return _show(summary, folder, console, as_json)


def _published(preset: str, systems: Sequence[str] | None, slots: int, given: Mapping[str, Any]) -> Settings:
    if preset != "published":
        raise ConfigError(f"preset={preset!r}: must be 'published'")
    if given:
        fixed = next(iter(given))
        raise ConfigError(
            f"{fixed}={given[fixed]!r}: --preset published fixes it; systems and slots may be given"
        )
    chosen = list(systems) if systems is not None else list(SYSTEMS)
    if BASELINE not in chosen:
        raise ConfigError(f"systems={chosen}: --preset published needs {BASELINE}, which sets the budget")
    return published_settings(chosen, slots, SEEDS)


def _settings(*, trace: Path | None, trace_system: str | None, **values: Any) -> Settings:
    if trace is not None:
        for key in ("generator", "tokens", "seeds", "options"):
            if values[key]:
                raise ConfigError(f"{key}={values[key]!r}: a trace has its own counts; give one or the other")
        read = load(trace, system=trace_system)
        values["trace_file"] = str(trace)
        values["trace"] = enlarge(read, values["ranks"] or (), values["experts"] or ())
    elif trace_system is not None:
        raise ConfigError(f"trace_system={trace_system!r}: there is no trace")
    return Settings(**{key: value for key, value in values.items() if value is not None})


def _allowance(slots: int, budget: str | None, max_drop: float | None) -> Allowance:
    size = None if budget is None else parse_size("budget", budget)
    return Allowance(slots=slots, budget_bytes=size, max_drop=0.2 if max_drop is None else max_drop)


def _numbers(field: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{field}={text!r}: must be whole numbers with commas, like 8,64") from error


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Options of a load pattern from "key=value"; numbers where they look like it.

    Raises:
        ConfigError: no equals sign.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"option {pair!r}: must be KEY=VALUE, like sigma=2.0")
        found[key.strip()] = _value(text.strip())
    return found


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def named_folder(name: str) -> Path:
    """The folder of a run.

    Raises:
        ConfigError: not the plain name of a folder.
    """
    if not name or Path(name).name != name:
        raise ConfigError(f"name={name!r}: must be a folder's name, without separators")
    return RUNS / name


def keep_trace(trace: Path | None, folder: Path) -> None:
    """A simulation must not replace the run whose trace it reads, not even where asked to overwrite."""
    if trace is not None and folder.resolve() in (trace.resolve(), trace.resolve().parent):
        raise ConfigError(f"name={folder.name!r}: {folder} holds the trace that is read; choose another name")


def _show(summary: Mapping[str, Any], folder: Path, console: Console, as_json: bool) -> int:
    loaded, page = put(summary, folder)
    if as_json:
        for line in figures(summary):
            print(json.dumps(line, allow_nan=False))
    for table in (*simulation.tables(loaded), simulation.fairness_short(loaded)):
        console.print(table.rich())
    console.print(simulation.verdict(loaded), markup=False, highlight=False)
    say(console, f"{page}  ({summary['total_s']:.0f} s)")
    return exit_code(summary)


def exit_code(summary: Mapping[str, Any]) -> int:
    """3 where in some cluster no system fits the budget in every call, else 0."""
    for scenario in summary["scenarios"]:
        found = scenario["systems"].values()
        if all(f["infeasible_calls"] or f.get("over_budget_calls") for f in found):
            return 3
    return 0


def figures(summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every figure: simulate.R<ranks>E<experts>.<system>.<quantity>; of the preset also published.<quantity>."""
    settings = {key: value for key, value in summary["settings"].items() if key != "systems"}
    context = {**summary["context"], **settings}
    for scenario in summary["scenarios"]:
        where = f"simulate.R{scenario['ranks']}E{scenario['experts']}"
        quantities = {**QUANTITIES, **(CHUNKS if simulation.chunked(scenario) else {})}
        for system, found in scenario["systems"].items():
            for kind in ("infeasible_calls", "over_budget_calls"):
                if kind in found:
                    yield figure(f"{where}.{system}.{kind}", found[kind], "calls", "lower", **context)
            for quantity, (unit, better) in quantities.items():
                if quantity in found:
                    yield figure(f"{where}.{system}.{quantity}", found[quantity], unit, better, **context)
            for pressure, value in found.get("throughput", {}).items():
                name = f"{where}.{system}.effective_throughput_{pressure}x"
                yield figure(name, value, "share", "higher", **context)
    for quantity, value in summary.get("published", {}).items():
        unit, better = _published_unit(quantity)
        yield figure(f"published.{quantity}", value, unit, better, **context, **_account(summary, quantity))


def _published_unit(quantity: str) -> tuple[str, str]:
    for part, found in _PUBLISHED_UNITS.items():
        if part in quantity.split(".")[0].split("_"):
            return found
    return "share", "higher"


def _account(summary: Mapping[str, Any], quantity: str) -> dict[str, Any]:
    """The published figure of the same quantity and the ratio to it, where there is one."""
    for line in summary["comparison"]:
        if line["quantity"] == quantity:
            return {"published": line["published"], "ratio_to_published": line["ratio"]}
    return {}
