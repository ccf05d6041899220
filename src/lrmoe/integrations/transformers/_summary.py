"""From call records to figures a person reads: means over the run, and numbers for loggers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from lrmoe.telemetry import CallRecord, Telemetry
from lrmoe.telemetry.layers import PREFIX, layer_figures
from lrmoe.telemetry.record import OpenCall

_MEANS = ("kept_share", "forward_peak", "backward_peak", "dropped_energy", "added_variance")
_SUMS = (
    *_MEANS,
    "pairs",
    "kept",
    "wire_bytes",
    "wire_bytes_row_per_pair",
    "replicas",
    "nonfinite_scores",
    "wall_total_ms",
)
# of a short log, where the calls have them; the rest of `layer_figures` is for who asks for every layer's
SHORT = (
    "kept_share",
    "forward_peak",
    "backward_peak",
    "backward_peak_worst",
    "dropped_energy",
    "dropped_energy_worst",
    "added_variance",
    "added_variance_worst",
    "nonfinite_scores",
    "moe_layer_ms",
    "mem_peak_measured",
    "auto_drop",
    "variance_mean",
    "check_cosine",
)


class Totals:
    """Sums over training calls of this rank, added record by record, read as means."""

    def __init__(self) -> None:
        self._calls = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._observed: dict[str, float] = defaultdict(float)
        self._control: dict[str, float] = defaultdict(float)
        self._reasons: dict[str, int] = defaultdict(int)
        self._buffer_peak = 0
        self._check: dict[str, float] = {}

    def copy(self) -> Totals:
        """An independent copy."""
        other = Totals()
        other._calls, other._buffer_peak = self._calls, self._buffer_peak
        for name in ("_sums", "_observed", "_control"):
            getattr(other, name).update(getattr(self, name))
        other._reasons.update(self._reasons)
        other._check.update(self._check)
        return other

    def add(self, records: Iterable[CallRecord]) -> None:
        """Add calls; those of an evaluation do not count."""
        for record in records:
            if record.drop_reason == "eval":
                continue
            self._calls += 1
            for name in _SUMS:
                self._sums[name] += getattr(record, name)
            if record.observed:
                self._observed["calls"] += 1
                self._observed["energy"] += record.energy
            for name, value in record.observed.items():
                self._observed[name] += value
            if record.control:
                self._control["calls"] += 1
            for name, value in record.control.items():
                self._control[name] += value
            self._compared(record)
            self._reasons[record.drop_reason] += 1
            self._buffer_peak = max(self._buffer_peak, record.buffer_peak_bytes)

    def _compared(self, record: CallRecord) -> None:
        """Add what `check_every` compared; a gradient that is not finite has no cosine (`nonfinite_scores` tells)."""
        cosine, error = record.check_cosine, record.check_relative_error
        if cosine is None or error is None or not (math.isfinite(cosine) and math.isfinite(error)):
            return
        sums = self._check
        self._check = {
            "calls": sums.get("calls", 0) + 1,
            "cosine": sums.get("cosine", 0.0) + cosine,
            "cosine_worst": min(sums.get("cosine_worst", 1.0), cosine),
            "relative_error": sums.get("relative_error", 0.0) + error,
        }

    def summary(self) -> dict[str, Any]:
        """JSON-able: see `Handle.summary`."""
        calls, pairs = max(self._calls, 1), self._sums["pairs"]
        found: dict[str, Any] = {"calls": self._calls, "drop_reasons": dict(self._reasons)}
        found["kept_share"] = self._sums["kept"] / pairs if pairs else 1.0
        for name in ("forward_peak", "backward_peak", "dropped_energy", "added_variance"):
            found[name] = self._sums[name] / calls
        found["moe_layer_ms"] = self._sums["wall_total_ms"] / calls
        found["replicas"] = self._sums["replicas"] / calls
        found["wire_bytes"] = int(self._sums["wire_bytes"])
        found["wire_bytes_row_per_pair"] = int(self._sums["wire_bytes_row_per_pair"])
        found["buffer_peak_bytes"] = self._buffer_peak
        found["nonfinite_scores"] = int(self._sums["nonfinite_scores"])
        if self._control:
            governed = self._control["calls"]
            found["control"] = {name: v / governed for name, v in self._control.items() if name != "calls"}
        if self._check:
            means = {name: self._check[name] / self._check["calls"] for name in ("cosine", "relative_error")}
            found["check"] = {**self._check, **means}
        if self._observed:
            found["observed"] = self._savings()
        return found

    def _savings(self) -> dict[str, dict[str, float]]:
        """What pruning would have saved, by drop share; records name each quantity `<quantity>_<share>`."""
        sums = self._observed
        shares = [name.removeprefix("backward_peak_") for name in sums if name.startswith("backward_peak_")]
        return {
            share: {
                "backward_peak": sums[f"backward_peak_{share}"] / sums["calls"],
                "rows_saved": int(sums[f"rows_saved_{share}"]),
                "bytes_saved": int(sums[f"bytes_saved_{share}"]),
                "added_variance": sums[f"variance_added_{share}"] / (sums["energy"] or 1.0),
            }
            for share in sorted(shares, key=float)
        }


class SummedTelemetry(Telemetry):
    """Telemetry that keeps running totals, whoever drains it.

    Attributes:
        calls: finished training calls so far.
    """

    def __init__(self, limit: int = 4096) -> None:
        super().__init__(limit)
        self.calls = 0
        self._totals = Totals()

    def add(self, call: OpenCall) -> None:
        """Count and add a finished call."""
        self.calls += 1
        super().add(call)

    def drain(self) -> list[CallRecord]:
        """Records of finished calls, which are then forgotten but for the totals."""
        records = super().drain()
        self._totals.add(records)
        return records

    def _forget(self, call: OpenCall) -> None:
        """Nobody drained it in time: it counts in the totals all the same."""
        self._totals.add([self._read(call)])

    def totals(self) -> Totals:
        """Totals over all calls so far, drained or not."""
        totals = self._totals.copy()
        totals.add(self.records)
        return totals


def figures(records: Sequence[CallRecord]) -> dict[str, float]:
    """The numbers of `layer_figures`, over this rank's records."""
    found = layer_figures([records])
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def short_figures(records: Sequence[CallRecord], step_ms: float) -> dict[str, float]:
    """A short log of this rank's calls: a choice of `figures`, and sums over the calls.

    Args:
        step_ms: wall milliseconds of the optimizer steps these calls belong to; 0 where nobody took the time.

    Returns:
        beside the choice `lrmoe/wire_bytes`, bytes this rank sent in all calls together; `lrmoe/calls_<reason>`, calls
        by `drop_reason`; `lrmoe/moe_time_share`, wall time of the calls over that of the steps. Empty where there was
        no training call.
    """
    training = [record for record in records if record.drop_reason != "eval"]
    if not training:
        return {}
    known = figures(training)
    found = {PREFIX + name: known[PREFIX + name] for name in SHORT if PREFIX + name in known}
    found[f"{PREFIX}wire_bytes"] = sum(record.wire_bytes for record in training)
    for reason, calls in Counter(record.drop_reason for record in training).items():
        found[f"{PREFIX}calls_{reason}"] = calls
    if step_ms > 0:
        found[f"{PREFIX}moe_time_share"] = sum(record.wall_total_ms for record in training) / step_ms
    return found
