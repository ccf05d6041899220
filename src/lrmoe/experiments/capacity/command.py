"""The `plan` command: one question, or a table of many."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError, InfeasibleError, PlanError, did_you_mean
from lrmoe.experiments.capacity import figures, report
from lrmoe.experiments.capacity.advice import advise
from lrmoe.experiments.capacity.answer import Answer, largest_micro_batch, solve
from lrmoe.experiments.capacity.model import find_model
from lrmoe.experiments.capacity.question import Question
from lrmoe.experiments.folder import check_free
from lrmoe.planning.calibration import Calibration
from lrmoe.planning.hardware import Hardware, get_hardware
from lrmoe.planning.policies import policy_info
from lrmoe.sizes import parse_size
from lrmoe.telemetry.figures import figure

_GRADS = {"fp32": 4, "bf16": 2}
_SWEPT: Mapping[str, Callable[[str], Any]] = {
    "gpus": int,
    "ep": int,
    "nodes": int,
    "micro_batch": int,
    "seq": int,
    "slots": int,
    "max_drop": float,
    "peak": float,
    "policy": str,
    "model": str,
    "hardware": str,
}
_TYPED = {"sequence": "seq", "target_peak": "peak"}  # fields of a question whose option has another name
_FIELD = re.compile(
    r"^(sequence|target_peak|gpus|ep|nodes|micro_batch|policy|slots|max_drop|drop|budget|layer_budget|reserved|headroom|activations|"
    r"checkpointing|grads|optimizer|skew|peak|seed|network_gbps|calibration|sweep|csv|model|hardware)="
)
_CSV = Path("runs/plan/capacity.csv")


def plan(
    *,
    model: str,
    hardware: str = "h100",
    sweep: Sequence[str] = (),
    csv: Path | None = None,
    overwrite: bool = False,
    as_json: bool = False,
    **options: Any,
) -> int:
    """Print what a model needs on some GPUs, or with several hardware names or a sweep one table of all cases.

    Args:
        model: names or files, comma-separated. hardware: names, comma-separated.
        sweep: "gpus=8,16": an option and the values it takes; all combinations.
        csv: where a sweep's table goes; None: runs/plan/capacity.csv, where an earlier one is replaced.
        overwrite: replace a file that is there.
        as_json: figures to stdout, one JSON object a line, instead of the tables.
        options: the other options of the command, as typed.

    Returns:
        0; 3 where nothing fits (for a sweep: no case).

    Raises:
        ConfigError: a bad value, an unknown model, device, policy or option, or a file that is there already.
    """
    try:
        return _plan(_axes(model, hardware, sweep, options), csv, overwrite, as_json, bool(sweep), options)
    except ConfigError as error:
        raise ConfigError(_as_typed(str(error))) from error


def _plan(
    axes: Mapping[str, Sequence[str]],
    csv: Path | None,
    overwrite: bool,
    as_json: bool,
    swept: bool,
    options: Mapping[str, Any],
) -> int:
    if all(len(values) == 1 for values in axes.values()) and csv is None and not swept:
        case = {name: values[0] for name, values in axes.items()}
        return _one(_question({**options, **case}), as_json)
    _check_csv(csv, overwrite)
    return _many(axes, options, csv or _CSV, as_json)


def _check_csv(csv: Path | None, overwrite: bool) -> None:
    """Refuse to replace a table that was put somewhere by name, or to write into the folder of another run."""
    if csv is None:
        check_free(_CSV.parent, own=(_CSV.name,), replaceable=True, overwrite=overwrite, kind="plan")
    elif csv.exists() and not (overwrite and csv.is_file()):
        raise ConfigError(
            f"csv={str(csv)!r}: is there already; pass --overwrite to replace it, or choose another name"
        )


def _one(question: Question, as_json: bool) -> int:
    from rich.console import Console

    answer, largest = _solve(question)
    advice = [] if answer.fits else advise(answer)
    console = Console(stderr=as_json)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if as_json:
        print(figures.json_lines(figures.figures(answer, largest, advice)))
    say(report.describe(answer))
    for table in (report.memory_table(answer), report.load_table(answer), report.time_table(answer)):
        console.print(table.rich())
    for line in report.assumptions(answer):
        say(line)
    if answer.fits:
        say(report.verdict(answer, largest))
        return 0
    say("What would fit:")
    for line in report.advice_lines(answer, advice):
        say(line)
    raise InfeasibleError(report.verdict(answer, largest))


def _solve(question: Question) -> tuple[Answer, int]:
    """The answer and the largest micro-batch."""
    try:
        return solve(question), largest_micro_batch(question)
    except (OverflowError, MemoryError) as error:
        raise ConfigError(
            f"gpus={question.gpus}, sequence={question.sequence}: too large to plan with {question.model.name}"
        ) from error


def _many(axes: Mapping[str, Sequence[str]], options: Mapping[str, Any], csv: Path, as_json: bool) -> int:
    from rich.console import Console
    from rich.progress import track

    console, progress = Console(stderr=as_json), Console(stderr=True)
    cases = list(_cases(axes))
    rows = [
        _row({**options, **case})
        for case in track(cases, description="planning", console=progress, disable=not progress.is_terminal)
    ]
    if all(row["fits"] == "-" for row in rows):
        raise ConfigError(f"sweep: no case can be planned; the first: {rows[0]['why']}")
    swept = [{"seq": "sequence"}.get(name, name) for name, values in axes.items() if len(values) > 1]
    figures.write_csv(rows, csv)
    if as_json:
        print(figures.json_lines([_figure(row) for row in rows]))
    console.print(report.sweep_table(rows, swept).rich())
    for note in report.sweep_notes(rows, swept):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{csv}  ({len(rows)} cases)", markup=False, highlight=False, soft_wrap=True)
    return 0 if any(row["fits"] == "yes" for row in rows) else 3


def _row(options: Mapping[str, Any]) -> dict[str, Any]:
    """One case; a layout that cannot be (more ranks than experts, say) is a row that says why."""
    try:
        return figures.sweep_row(*_solve(_question(options)))
    except ConfigError as error:
        names = {**options, "sequence": options["seq"]}
        given = {name: names[name] for name in figures.COLUMNS if names.get(name) is not None}
        return {**given, "fits": "-", "largest_micro_batch": 0, "why": _as_typed(str(error))}


def _figure(row: Mapping[str, Any]) -> dict[str, Any]:
    case = f"plan.{str(row['model']).lower()}.{row['hardware']}.gpus{row['gpus']}"
    return figure(
        f"{case}.largest_micro_batch", row["largest_micro_batch"], "sequences", "higher", row=dict(row)
    )


def _as_typed(message: str) -> str:
    """A message that names the option as it is typed: "sequence=0: .." becomes "--seq=0: ..."."""

    def option(name: re.Match[str]) -> str:
        typed = _TYPED.get(name[1], name[1])
        return f"--{typed.replace('_', '-')}="

    return _FIELD.sub(option, message)


def _axes(
    model: str, hardware: str, sweep: Sequence[str], options: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Option -> values, each once; model and hardware may be lists by themselves, an option swept twice adds values.

    Names are checked before anything runs.
    """
    axes = {"model": _list("model", model), "hardware": _list("hardware", hardware)}
    swept: set[str] = set()
    for text in sweep:
        name, equals, values = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if name not in _SWEPT or not equals:
            known = [option.replace("_", "-") for option in _SWEPT]
            hint = did_you_mean(name.replace("_", "-"), known)
            raise ConfigError(
                f"sweep={text!r}: must be OPTION=A,B with an option of {', '.join(known)}{hint}"
            )
        more = _list(f"sweep {name}", values)
        axes[name] = list(dict.fromkeys([*(axes[name] if name in swept else ()), *more]))
        swept.add(name)
    for name in axes["model"]:
        find_model(name)
    for name in axes["hardware"]:
        _device(name, None)
    for name in axes.get("policy", [options["policy"]] if "policy" in options else []):
        try:
            policy_info(name)
        except PlanError as error:
            raise ConfigError(str(error)) from error
    return axes


def _list(field: str, text: str) -> list[str]:
    values = [part.strip() for part in text.split(",") if part.strip()]
    if not values:
        raise ConfigError(f"{field}={text!r}: name at least one value")
    return list(dict.fromkeys(values))


def _cases(axes: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        case = {}
        for name, text in zip(axes, values, strict=True):
            try:
                case[name] = _SWEPT[name](text)
            except ValueError as error:
                raise ConfigError(f"sweep {name}={text!r}: must be a number") from error
        yield case


def _device(name: str, network_gbps: float | None) -> Hardware:
    if network_gbps is not None and not 0 < network_gbps < math.inf:
        raise ConfigError(f"network_gbps={network_gbps}: must be positive and finite")
    try:
        device = get_hardware(name)
        return device if network_gbps is None else device.with_network(network_gbps * 1e9 / 8)
    except PlanError as error:
        raise ConfigError(str(error)) from error


def _question(options: Mapping[str, Any]) -> Question:
    """The question that options, as typed, ask."""
    given = dict(options)
    device = _device(given.pop("hardware"), given.pop("network_gbps", None))
    grads = given.pop("grads", "fp32")
    if grads not in _GRADS:
        raise ConfigError(f"grads={grads!r}: must be one of {', '.join(_GRADS)}")
    for name in ("budget", "layer_budget", "reserved"):
        if given.get(name) is not None:
            given[name] = _bytes(name, given[name], device.memory_bytes)
    given["calibration"] = _calibration(given.get("calibration"))
    given["sequence"] = given.pop("seq")
    given["model"] = find_model(given["model"])
    return Question(**given, hardware=device, gradient_bytes=_GRADS[grads])


def _bytes(field: str, text: str, whole: int) -> int:
    return 0 if field == "reserved" and text.strip() == "0" else parse_size(field, text, whole)


def _calibration(path: Path | None) -> Calibration:
    try:
        return Calibration() if path is None else Calibration.load(path)
    except PlanError as error:
        raise ConfigError(str(error)) from error
