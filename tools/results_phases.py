"""Where a layer call's time goes, as Markdown: by phase, and what each phase takes more than on balanced counts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

PHASES = (
    "plan", "pack", "dispatch", "experts", "combine", "score", "select", "reroute", "exchange", "experts_backward",
    "return", "replicas", "wire",
)  # fmt: skip
EXPERTS = ("experts", "experts_backward")  # what peaks cost

Rows = Sequence[dict[str, Any]]


def spent(rows: Rows, model: str) -> str:
    """Milliseconds of a call by phase, and its peaks."""
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
    text = (
        f"`{model}`: slowest rank by phase; `wire` is all bytes over the link but those of copies, which are with "
        "`replicas`; peaks in mean loads of the whole call."
    )
    return f"{text}\n\n" + "\n".join(lines)


def above_balanced(rows: Rows, model: str) -> str:
    """Every system's excess over its balanced reference by phase, in ms and in percent of the reference."""
    own = [row for row in rows if row["model"] == model]
    phases = [name for name in PHASES if any(row["phases"].get(name) for row in own)]
    lines = [f"| above balanced | {' | '.join(phases)} | all |", "|---" * (len(phases) + 2) + "|"]
    largest = []
    for system in dict.fromkeys(row["system"] for row in own):
        same = [row for row in own if row["system"] == system]
        more = {
            name: statistics.fmean(
                row["phases"].get(name, 0.0) - row["balanced"].get(name, 0.0) for row in same
            )
            for name in phases
        }
        whole = statistics.fmean(sum(row["balanced"].values()) for row in same)
        cells = [_excess(value, whole) for value in (*more.values(), sum(more.values()))]
        lines.append(f"| {system} | {' | '.join(cells)} |")
        if any(row["kept_share"] < 1 for row in same):
            largest.append(_sentence(system, same, more, whole))
    text = (
        f"`{model}`: the same less the balanced reference, in ms and in percent of the reference's call, which has no "
        "scoring, selection and copies. In `experts` and `experts_backward` it is the peak; where peaks are equal, "
        "noise."
    )
    return f"{text}\n\n" + "\n".join(lines) + "\n\n" + "\n".join(largest)


def _excess(ms: float, whole: float) -> str:
    return f"{ms:+.1f} ({ms / whole:+.1%})"


def _sentence(system: str, rows: Rows, more: dict[str, float], whole: float) -> str:
    """A system's excess in words, the largest term first."""
    peaks = " and ".join(
        f"{statistics.fmean(row[name] for row in rows):.2f} {name.replace('_', ' ')}"
        for name in ("forward_peak", "backward_peak")
    )
    order = sorted(more, key=lambda name: -abs(more[name]))
    terms = ", ".join(
        f"{name}{' (peak)' if name in EXPERTS else ' (bytes)' if name == 'wire' else ''} {more[name] / whole:+.1%}"
        for name in order
        if abs(more[name]) >= whole / 1000
    )
    over = 1 + sum(more.values()) / whole
    return f"- `{system}`: {over:.3f} of balanced counts: {terms}; {peaks}."
