"""The `replay` command: a question from options, progress, tables, JSON lines and the run's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lrmoe.experiments.folder import check_free, put
from lrmoe.experiments.replay_question import check_memory, make_question
from lrmoe.experiments.simulation import keep_trace, named_folder
from lrmoe.experiments.terminal import progress_bar, say
from lrmoe.report import html
from lrmoe.report import replay as page
from lrmoe.simulate.replay import HALF, OURS, replay
from lrmoe.simulate.replay_summary import summarise
from lrmoe.simulate.scenario import SYSTEMS
from lrmoe.simulate.summary import BASELINE
from lrmoe.telemetry.figures import environment, figure

_OWN = ("summary.json", "report.html")
_MS, _BYTES, _RATIO, _SHARE = ("ms", "lower"), ("bytes", "lower"), ("ratio", "higher"), ("share", "higher")

# figure of a system -> unit, which way is better
QUANTITIES: Mapping[str, tuple[str, str]] = {
    "forward_peak": ("mean loads", "lower"),
    "backward_peak": ("mean loads", "lower"),
    "kept_share": _SHARE,
    "moved_share": ("share", "lower"),
    "energy_dropped": ("share", "lower"),
    "forward_ms": _MS,
    "backward_ms": _MS,
    "layer_ms": _MS,
    "forward_compute_ms": _MS,
    "backward_compute_ms": _MS,
    "forward_exchange_ms": _MS,
    "backward_exchange_ms": _MS,
    "forward_subtotal": _BYTES,
    "backward_subtotal": _BYTES,
    "memory": _BYTES,
    "forward_memory": _BYTES,
    "backward_memory": _BYTES,
    "row_traffic": _BYTES,
    "weight_traffic": _BYTES,
}
RATIOS: Mapping[str, tuple[str, str]] = {
    "forward_speedup": _RATIO,
    "backward_speedup": _RATIO,
    "layer_speedup": _RATIO,
    "forward_compute_speedup": _RATIO,
    "backward_compute_speedup": _RATIO,
    "forward_time_reduction": _SHARE,
    "backward_time_reduction": _SHARE,
    "forward_subtotal_reduction": _SHARE,
    "backward_subtotal_reduction": _SHARE,
    "forward_memory_reduction": _SHARE,
    "backward_memory_reduction": _SHARE,
    "memory_reduction": _SHARE,
}


def run_replay(
    *,
    systems: Sequence[str] | None = None,
    name: str | None = None,
    overwrite: bool = False,
    as_json: bool = False,
    trace: Path | None = None,
    **options: Any,
) -> int:
    """Replay one call under several systems, print tables, write runs/<name>/.

    Args:
        systems: names; None takes all. name: of the run's folder; None takes "replay" and replaces an earlier replay.
        overwrite: replace an earlier run of that name, of any kind; never its checkpoints.
        as_json: figures to stdout, one JSON object a line; tables to stderr.
        trace: a trace file, CSV or run folder. options: the other options, as `make_question` takes them.

    Returns:
        0.

    Raises:
        ConfigError: bad options or trace, too little memory, a folder that cannot be written or a name that is taken.
    """
    html.check_installed()
    folder = named_folder(name or "replay")
    keep_trace(trace, folder)
    check_free(folder, own=_OWN, replaceable=name is None, overwrite=overwrite, kind="replay")
    question = make_question(systems=tuple(systems or SYSTEMS), trace=trace, **options)
    check_memory(question)
    console = Console(stderr=as_json)
    begin = time.monotonic()
    with progress_bar() as told:
        summary = summarise(question, replay(question, told))
    seconds = time.monotonic() - begin
    summary |= {"name": folder.name, "context": environment(), "total_s": seconds}
    return _show(summary, folder, console, as_json)


def _show(summary: Mapping[str, Any], folder: Path, console: Console, as_json: bool) -> int:
    run, written = put(summary, folder)
    if as_json:
        for line in figures(summary):
            print(json.dumps(line, allow_nan=False))
    for table in (page.times(run), page.memory(run)):
        console.print(table.rich())
    say(console, page.verdict(run))
    say(console, f"{written}  ({summary['total_s']:.0f} s)")
    return 0


def figures(summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every figure: replay.<system>.<quantity>; replay.<quantity> is lrmoe's, replay.drop0.5.<quantity> at drop 0.5."""
    context = {
        **summary["context"],
        **{key: value for key, value in summary["settings"].items() if key != "systems"},
        "measured": summary["measured"],
        "modelled": summary["modelled"],
        "total_s": summary["total_s"],
    }
    systems = summary["systems"]
    for name, found in systems.items():
        yield from _system(f"replay.{name}", found, context, ratios=name != BASELINE)
    if OURS in systems:
        yield from _system("replay", systems[OURS], context, ratios=True)


def _system(
    prefix: str, found: Mapping[str, Any], context: Mapping[str, Any], *, ratios: bool
) -> Iterator[dict[str, Any]]:
    for quantity, (unit, better) in {**QUANTITIES, **(RATIOS if ratios else {})}.items():
        more = {}
        if quantity in ("forward_ms", "backward_ms"):
            more = {"phases": found["phases"][quantity.removesuffix("_ms")], "runs": found["repeats"]}
        if prefix == f"replay.{HALF}":
            more["max_drop"] = 0.5
        yield figure(f"{prefix}.{quantity}", found[quantity], unit, better, **{**context, **more})
