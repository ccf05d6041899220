"""Figures of a step, and where they go: metrics.jsonl, reporters, a progress bar or log lines."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from lrmoe.telemetry import CallRecord
from lrmoe.telemetry.layers import layer_figures, layer_loads, over_all
from lrmoe.telemetry.live import Histograms, Reporter

log = logging.getLogger(__name__)

_NO_HISTOGRAMS: Histograms = {}


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step. Everything but `records` and `step_ms` is the same on all ranks.

    Attributes:
        step: optimizer steps done, this one included.
        loss: mean over all tokens of all ranks.
        lr: learning rate of the step.
        grad_norm: of the whole gradient before clipping; not finite where the step was skipped.
        skipped: whether the update was left out because the gradient was not finite.
        tokens: of all ranks.
        step_ms: wall time of the step on this rank.
        records: this rank's layer calls, by micro-batch and layer.
        records_by_rank: every rank's; position i is the same call on all.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    tokens: int
    step_ms: float
    records: list[CallRecord]
    records_by_rank: list[list[CallRecord]]

    @property
    def moe_ms_wall(self) -> float:
        """Wall time in MoE layers: of all the step's calls, on the rank where it is largest."""
        return max((sum(r.wall_total_ms for r in records) for records in self.records_by_rank), default=0.0)

    @property
    def wire_bytes(self) -> int:
        """Bytes that all ranks sent to other ranks in MoE layers."""
        return sum(r.wire_bytes for records in self.records_by_rank for r in records)

    @property
    def kept_share(self) -> float:
        """Pairs that took part in backward over all pairs of the step."""
        pairs = sum(r.pairs for r in self.records)
        return sum(r.kept for r in self.records) / pairs if pairs else 1.0

    def as_dict(self) -> dict[str, Any]:
        """One line of metrics.jsonl: shares over all calls of the step, `loads` by layer, and `lrmoe/...` figures."""
        names = (
            "step",
            "loss",
            "lr",
            "grad_norm",
            "skipped",
            "tokens",
            "step_ms",
            "moe_ms_wall",
            "wire_bytes",
            "kept_share",
        )
        flat: dict[str, Any] = {name: getattr(self, name) for name in names}
        flat["dropped_energy"] = over_all(self.records_by_rank, "energy_dropped")
        flat["added_variance"] = over_all(self.records_by_rank, "variance_added")
        flat["tokens_per_s"] = self.tokens / self.step_ms * 1e3
        flat["loads"] = layer_loads(self.records_by_rank)
        return {**flat, **layer_figures(self.records_by_rank)}


class MetricsWriter:
    """metrics.jsonl, and whoever shows the run while it goes on. Used on rank 0.

    Args:
        folder: the run's folder.
        resume_step: keep lines up to this step and go on after them; None starts anew.
        reporters: get the same numbers, and histograms; closed with the writer.
    """

    def __init__(
        self, folder: Path, resume_step: int | None = None, reporters: Sequence[Reporter] = ()
    ) -> None:
        path = folder / "metrics.jsonl"
        kept = _lines_until(path, resume_step) if resume_step is not None and path.exists() else []
        self._file: IO[str] = path.open("w", encoding="utf-8")
        self._file.writelines(kept)
        self._reporters = reporters

    def write(self, step: int, values: Mapping[str, Any], histograms: Histograms = _NO_HISTOGRAMS) -> None:
        """Add one line, numbers that are not finite as null; numbers and histograms also go to the reporters."""
        self._file.write(json.dumps({name: _finite(value) for name, value in values.items()}) + "\n")
        self._file.flush()
        for reporter in self._reporters:
            reporter.write(step, values, histograms)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        for reporter in self._reporters:
            reporter.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_until(path: Path, step: int) -> list[str]:
    """Whole lines up to `step`; says how many later ones (a last one that is cut off too) and unreadable ones go."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        steps = [(line, _step_of(line)) for line in file]
    kept = [line for line, found in steps if found is not None and found <= step]
    bad = sum(found is None and line.endswith("\n") for line, found in steps)
    if bad:
        log.warning("%s: %d unreadable lines dropped", path, bad)
    if len(kept) + bad < len(steps):
        log.info("%s: %d lines after step %d dropped", path, len(steps) - len(kept) - bad, step)
    return kept


def _step_of(line: str) -> int | None:
    """None where it is no line of metrics.jsonl, or only the begin of one."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


class Progress:
    """A bar on a terminal; elsewhere a log line every `every` steps, never control characters."""

    def __init__(self, total: int, *, start: int = 0, every: int = 10, enabled: bool = True) -> None:
        self._total = total
        self._every = every
        self._enabled = enabled
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            self._open_bar(start)

    def _open_bar(self, start: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import (
            Progress as Bar,
        )

        columns = (MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"))
        self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self._task = self._bar.add_task("", total=self._total, completed=start)
        self._bar.start()

    def update(self, metrics: StepMetrics) -> None:
        """Show one step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step, description=describe(metrics))
        elif self._enabled and (metrics.step % self._every == 0 or metrics.step in (1, self._total)):
            log.info("step %d/%d  %s", metrics.step, self._total, describe(metrics))

    def evaluated(self, step: int, loss: float) -> None:
        """Show an evaluation's loss: always, and on a terminal above the bar."""
        text = f"step {step}/{self._total}  eval loss {loss:.4f}"
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        elif self._enabled:
            log.info("%s", text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(metrics: StepMetrics) -> str:
    """Loss, kept share, peak over mean load of the worst layer in backward, MoE-layer time, tokens per second."""
    peak = max((r.backward_peak for r in metrics.records), default=0.0)
    speed = metrics.tokens / metrics.step_ms * 1e3
    skipped = "  skipped: gradient not finite" if metrics.skipped else ""
    return (
        f"loss {metrics.loss:.4f}  kept {metrics.kept_share:.2f}  peak {peak:.2f}  "
        f"moe {metrics.moe_ms_wall:.0f} ms  {speed:.0f} tok/s{skipped}"
    )
