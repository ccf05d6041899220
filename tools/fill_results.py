"""Fill docs/results.md with what `make headline` wrote; figures enter the page in no other way.

Usage: python tools/fill_results.py runs/headline [--ablate FILE] [--link-wall FILE]
Reads headline.json of the run (and JSON lines of `lrmoe ablate` and benchmarks/link_wall.py where they exist), writes
what stands between the page's markers and docs/img/time-to-loss.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from results_plot import Bar, bars

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
PLOT = ROOT / "docs" / "img" / "time-to-loss.svg"
REGION = re.compile(r"(<!-- results:start -->\n).*?(<!-- results:end -->)", re.DOTALL)
ABLATED = re.compile(r"ablate\.(\w+)\.(.+)\.drop([\d.]+)\.(dloss|dppl)")
PHASES = (
    "plan", "pack", "dispatch", "experts", "combine", "score", "select", "reroute", "exchange", "experts_backward",
    "return", "replicas",
)  # fmt: skip

Rows = Sequence[dict[str, Any]]


def page_of(run: dict[str, Any], ablate: Rows, wall: Rows) -> str:
    """Everything between the markers."""
    rows = run["rows"]
    parts = [
        _how(run),
        "### Time to loss",
        "![Time to loss over SYMI's, by system](img/time-to-loss.svg)",
        _ratios(rows, "symi", _published(run)),
        _ratios(rows, "ultraep", "Time to the same loss over UltraEP's policy."),
        "### Layer time over balanced counts",
        _table(
            rows,
            lambda row: row["over_balanced"],
            "Critical path of a layer call over that of the same layer on perfectly balanced counts with the same pairs"
            " and kept share, without scoring, selection and replica traffic.",
        ),
        "### Steps and final loss",
        _table(rows, lambda row: row["steps"], "Steps to the target loss.", digits=1),
        _table(
            rows,
            lambda row: row["dloss"],
            "Mean loss of the last steps, less that of the exact trajectory.",
            digits=5,
        ),
        "### Where a call's time goes",
        *(_phases(rows, model) for model in dict.fromkeys(row["model"] for row in rows)),
        "### Every seed",
        _seeds(rows),
        *_link_wall(wall),
        *_ablate(ablate),
        "### What each system was given",
        _fairness(run["fairness"]),
    ]
    return "\n\n".join(parts)


def _how(run: dict[str, Any]) -> str:
    context, size = run["context"], run["size"]
    hardware = context["hardware"]
    links = ", ".join(f"{speed / 2**20:.0f} MiB/s ({model})" for model, speed in run["links"].items())
    return (
        f"`{run['command']}`, regime `{run['regime']}`, target loss {run['target_loss']:g}, seeds "
        f"{', '.join(map(str, run['seeds']))}; {hardware['cores']} cores of {hardware['cpu']}, torch "
        f"{context['versions']['torch']}, {context['date']}. Layers executed at EP {size['ranks']} with hidden "
        f"{size['hidden']}, width {size['width']} and {run['pairs_per_rank']} pairs per rank and call, every "
        f"{run['every']}th step. {run['link_rule']} Here: {links}."
    )


def _published(run: dict[str, Any]) -> str:
    low, high = run["published"]
    return (
        f"Time to the same loss over SYMI's, mean over seeds with its standard error. Published for LRMoE (two models, "
        f"8 Hopper GPUs): {1 - high:.3f} to {1 - low:.3f}, that is {low:.1%} to {high:.1%} less."
    )


def _ratios(rows: Rows, other: str, text: str) -> str:
    return _table(rows, lambda row: row["over"].get(other), text)


def _table(rows: Rows, value: Callable[[dict[str, Any]], float | None], text: str, *, digits: int = 3) -> str:
    """Systems down, models and auxiliary losses across."""
    columns = list(dict.fromkeys((row["model"], row["aux"]) for row in rows))
    lines = [f"| | {' | '.join(f'{model}, aux {aux:g}' for model, aux in columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for system in dict.fromkeys(row["system"] for row in rows):
        cells = []
        for column in columns:
            same = [row for row in rows if (row["model"], row["aux"]) == column and row["system"] == system]
            cells.append(_cell([value(row) for row in same], digits))
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return f"{text}\n\n" + "\n".join(lines)


def _cell(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "not reached" if values else ""
    text = f"{statistics.fmean(known):.{digits}f}"
    if len(known) > 1:
        text += f" +- {statistics.stdev(known) / math.sqrt(len(known)):.{digits}f}"
    return text + (f" ({len(known)} of {len(values)} seeds)" if len(known) < len(values) else "")


def _phases(rows: Rows, model: str) -> str:
    own = [row for row in rows if row["model"] == model]
    phases = [name for name in PHASES if any(row["phases"].get(name) for row in own)]
    lines = [
        f"| ms a call | {' | '.join(phases)} | forward peak | backward peak | copies |",
        "|---" * (len(phases) + 4) + "|",
    ]
    for system in dict.fromkeys(row["system"] for row in own):
        same = [row for row in own if row["system"] == system]
        cells = [f"{statistics.fmean(row['phases'].get(name, 0.0) for row in same):.1f}" for name in phases]
        for name, digits in (("forward_peak", 2), ("backward_peak", 2), ("replicas", 1)):
            cells.append(f"{statistics.fmean(row[name] for row in same):.{digits}f}")
        lines.append(f"| {system} | {' | '.join(cells)} |")
    text = f"`{model}`: slowest rank by phase, bytes over the link included; peaks in mean loads of the whole call."
    return f"{text}\n\n" + "\n".join(lines)


def _seeds(rows: Rows) -> str:
    names = "model aux seed system steps layer-ms-a-step time-to-loss-(s) over-symi over-ultraep over-balanced dloss"
    lines = [f"| {names.replace(' ', ' | ').replace('-', ' ')} |", "|---" * 11 + "|"]
    lines += [f"| {' | '.join(_seed_cells(row))} |" for row in rows]
    return "\n".join(lines)


def _seed_cells(row: dict[str, Any]) -> Iterator[str]:
    yield from (row["model"], f"{row['aux']:g}", str(row["seed"]), row["system"])
    yield "-" if row["steps"] is None else str(row["steps"])
    yield f"{row['layer_ms']:.1f}"
    yield "-" if row["time_to_loss_s"] is None else f"{row['time_to_loss_s']:.2f}"
    yield from (f"{row['over'][o]:.3f}" if o in row["over"] else "-" for o in ("symi", "ultraep"))
    yield f"{row['over_balanced']:.3f}"
    yield f"{row['dloss']:+.5f}"


def _link_wall(wall: Rows) -> Iterator[str]:
    if not wall:
        return
    values = {row["name"]: row["value"] for row in wall}
    context = wall[0]["context"]
    yield "### Wall clock of two ranks over a limited link"
    lines = ["| | ms a layer call | over symi | over ultraep |", "|---|---|---|---|"]
    for system in dict.fromkeys(name.split(".")[1] for name in values):
        cells = [f"{values[f'link_wall.{system}.wall_ms']:.1f}"]
        for other in ("symi", "ultraep"):
            found = values.get(f"link_wall.{system}.wall_over_{other}")
            cells.append("-" if found is None else f"{found:.3f}")
        lines.append(f"| {system} | {' | '.join(cells)} |")
    yield (
        f"`benchmarks/link_wall.py`: {context['link_bytes_per_s'] * 8 / 1e6:.0f} Mbit/s each way between two network "
        f"namespaces; exchange is {context['exchange_share_of_balanced_call']:.0%} of a balanced exact call. "
        f"{context['calls']} calls a system.\n\n" + "\n".join(lines)
    )


def _ablate(figures: Rows) -> Iterator[str]:
    found = {match.groups(): row for row in figures if (match := ABLATED.fullmatch(row["name"]))}
    if not found:
        return
    yield "### Quality by rule"
    columns = list(dict.fromkeys((regime, drop) for regime, _, drop, _ in found))
    for quantity, text in (
        ("dloss", "Final training loss less that of nothing dropped"),
        ("dppl", "The same as a relative difference of perplexity"),
    ):
        lines = [f"| | {' | '.join(f'{regime} {float(drop):.0%}' for regime, drop in columns)} |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        for rule in dict.fromkeys(rule for _, rule, _, _ in found):
            cells = (found.get((regime, rule, drop, quantity)) for regime, drop in columns)
            lines.append(f"| {rule} | {' | '.join(map(_ablate_cell, cells))} |")
        yield f"{text}, mean over paired seeds with its standard error.\n\n" + "\n".join(lines)


def _ablate_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    error = row["context"].get("standard_error")
    return f"{row['value']:+.4f}" + (f" +- {error:.4f}" if error is not None else "")


def _fairness(systems: dict[str, dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for about in systems.values() for name in about))
    lines = [f"| | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    for name in names:
        cells = (str(about.get(name, "")) for about in systems.values())
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot_of(rows: Rows) -> str:
    """Time to loss over SYMI's: systems down, models and auxiliary losses as bars."""
    systems = list(dict.fromkeys(row["system"] for row in rows if row["system"] != "symi"))
    series: dict[str, list[Bar | None]] = {}
    for model, aux in dict.fromkeys((row["model"], row["aux"]) for row in rows):
        series[f"{model.partition('-')[0]}, aux {aux:g}"] = [
            _bar([row["over"].get("symi") for row in rows if (row["model"], row["aux"]) == (model, aux)
                  and row["system"] == system])
            for system in systems
        ]  # fmt: skip
    return bars("Time to loss over SYMI's (below 1 is faster)", systems, series)


def _bar(values: Sequence[float | None]) -> Bar | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else 0.0
    return Bar(value=statistics.fmean(known), error=error)


def fill(page: str, results: str) -> str:
    """The page with `results` between its markers.

    Raises:
        ValueError: the markers are missing.
    """
    if not REGION.search(page):
        raise ValueError("docs/results.md: no <!-- results:start --> ... <!-- results:end -->")
    return REGION.sub(lambda found: f"{found[1]}{results}\n{found[2]}", page)


def _lines(path: Path | None) -> Rows:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def main() -> int:
    """Read the run, write the page and its plot."""
    parser = argparse.ArgumentParser(description="Fill docs/results.md.")
    parser.add_argument("run", type=Path, help="folder of `make headline`")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--ablate", type=Path, default=results / "ablate.jsonl")
    parser.add_argument("--link-wall", type=Path, default=results / "link_wall.jsonl")
    given = parser.parse_args()
    run = json.loads((given.run / "headline.json").read_text(encoding="utf-8"))
    made = page_of(run, _lines(given.ablate), _lines(given.link_wall))
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(plot_of(run["rows"]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
