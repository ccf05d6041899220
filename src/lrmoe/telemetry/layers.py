"""A step's layer calls as a logger shows them: mean and worst layer, rows per rank, pairs and quotas per expert."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lrmoe.planning.calibration import PHASES
from lrmoe.telemetry.record import CallRecord

PREFIX = "lrmoe/"

Call = Sequence[CallRecord]  # of all ranks
_Reduce = Callable[[Sequence[float]], float]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class _Figure:
    """How a number is found: of one call of all ranks, of a layer's calls, and which of two layers is worse."""

    of_call: Callable[[Call], float]
    worst: _Reduce = max
    of_layer: _Reduce = _mean


def _over_energy(name: str) -> Callable[[Call], float]:
    def share(call: Call) -> float:
        energy = sum(record.energy for record in call)
        return sum(getattr(record, name) for record in call) / energy if energy else 0.0

    return share


_FIGURES: dict[str, _Figure] = {
    "kept_share": _Figure(lambda call: call[0].kept_share, worst=min),
    "forward_peak": _Figure(lambda call: call[0].forward_peak),
    "backward_peak": _Figure(lambda call: call[0].backward_peak),
    "dropped_energy": _Figure(_over_energy("energy_dropped")),
    "added_variance": _Figure(_over_energy("variance_added")),
    "dropped_energy_high": _Figure(lambda call: float(call[0].dropped_energy_high), of_layer=max),
    "nonfinite_scores": _Figure(lambda call: sum(r.nonfinite_scores for r in call), of_layer=sum),
    "chunks": _Figure(lambda call: call[0].chunks),
    "moe_layer_ms": _Figure(lambda call: max(r.wall_total_ms for r in call)),
}
_BY_LAYER = ("kept_share", "dropped_energy", "added_variance")  # also shown as a histogram over layers


def layer_figures(records_by_rank: Sequence[Sequence[CallRecord]]) -> dict[str, Any]:
    """Telemetry of training calls under `lrmoe/`: `<name>` is the mean over layers, `<name>_worst` the worst layer's.

    Bytes are summed over ranks; times and memory are those of the slowest or fullest rank; a layer's number is the mean
    over its calls (the sum for `nonfinite_scores`, the largest for memory).

    Args:
        records_by_rank: every rank's records, position i the same call on all; one entry where only one rank is known.

    Returns:
        empty where there was no training call.
    """
    layers = _by_layer(records_by_rank)
    if not layers:
        return {}
    flat: dict[str, Any] = {}
    for name, figure in _all_figures(layers).items():
        values = [figure.of_layer([figure.of_call(call) for call in calls]) for calls in layers.values()]
        flat[PREFIX + name], flat[f"{PREFIX}{name}_worst"] = _mean(values), figure.worst(values)
    flat.update(_decided(layers))
    flat.update(_checked(layers))
    reasons = [call[0].drop_reason for calls in layers.values() for call in calls]
    flat[f"{PREFIX}drop_reason"] = max(sorted(set(reasons)), key=reasons.count)
    return flat


def _decided(layers: dict[int, list[Call]]) -> dict[str, float]:
    """How much could be dropped and why, where a limit or `drop="auto"` decided: mean and highest of layers."""
    flat: dict[str, float] = {}
    for name in sorted({name for calls in layers.values() for call in calls for name in call[0].control}):
        told = [
            [call[0].control[name] for call in calls if name in call[0].control] for calls in layers.values()
        ]
        values = [_mean(of_layer) for of_layer in told if of_layer]
        flat[PREFIX + name], flat[f"{PREFIX}{name}_worst"] = _mean(values), max(values)
    return flat


def _checked(layers: dict[int, list[Call]]) -> dict[str, float]:
    """The gradient that `check_every` compared: cosine, relative error and layer; the latest, empty where none was."""
    first = [call[0] for calls in layers.values() for call in calls if call[0].check_cosine is not None]
    if not first:
        return {}
    last = max(first, key=lambda record: (record.step, record.layer))
    found = {"check_cosine": last.check_cosine, "check_relative_error": last.check_relative_error}
    return {
        PREFIX + name: value
        for name, value in {**found, "check_layer": last.layer}.items()
        if value is not None
    }


def layer_loads(records_by_rank: Sequence[Sequence[CallRecord]]) -> list[dict[str, Any]]:
    """Per layer, summed over its calls: `layer`, rows per rank `forward_R` and `backward_R`, pairs per expert
    `counts_E`, and those that backward kept, `quota_E`.
    """
    fields = {
        "forward_R": "forward_load_R",
        "backward_R": "backward_load_R",
        "counts_E": "counts_E",
        "quota_E": "quota_E",
    }
    return [
        {
            "layer": layer,
            **{name: _column_sums([getattr(c[0], field) for c in calls]) for name, field in fields.items()},
        }
        for layer, calls in _by_layer(records_by_rank).items()
    ]


def layer_histograms(records_by_rank: Sequence[Sequence[CallRecord]]) -> dict[str, list[float]]:
    """Values behind the means: `lrmoe/layer<l>/...` of one layer's ranks or experts, `lrmoe/<name>_by_layer` of layers.

    Rows per rank (`forward_R`, `backward_R`) and pairs per expert (`counts_E`, `quota_E`) are summed over the calls.
    """
    found: dict[str, list[float]] = {}
    for load in layer_loads(records_by_rank):
        for name, values in load.items():
            if name != "layer":
                found[f"{PREFIX}layer{load['layer']}/{name}"] = values
    for calls in _by_layer(records_by_rank).values():
        for name in _BY_LAYER:
            of_call = _FIGURES[name].of_call
            found.setdefault(f"{PREFIX}{name}_by_layer", []).append(_mean([of_call(c) for c in calls]))
    return found


def over_all(records_by_rank: Sequence[Sequence[CallRecord]], name: str) -> float:
    """`energy_dropped` or `variance_added` of all calls and ranks over their energy; 0 where there is none."""
    return _over_energy(name)([record for records in records_by_rank for record in records])


def _by_layer(records_by_rank: Sequence[Sequence[CallRecord]]) -> dict[int, list[Call]]:
    """Training calls by layer, in the layers' order."""
    layers: dict[int, list[Call]] = defaultdict(list)
    for call in zip(*records_by_rank, strict=True):
        if call[0].drop_reason != "eval":
            layers[call[0].layer].append(call)
    return dict(sorted(layers.items()))


def _all_figures(layers: dict[int, list[Call]]) -> dict[str, _Figure]:
    """Those that every call has, and memory by the parts that these calls book."""
    figures = dict(_FIGURES)
    for phase in PHASES:
        figures[f"bytes_{phase}"] = _Figure(_entry("bytes", phase, sum))
        figures[f"ms_{phase}"] = _Figure(_entry("ms", phase, max))
    calls = [call[0] for of_layer in layers.values() for call in of_layer]
    for kind, table in (("measured", "mem"), ("predicted", "mem_predicted")):
        for part in sorted({part for call in calls for part in getattr(call, table)}):
            figures[f"mem_{part}_{kind}"] = _Figure(_entry(table, part, max), of_layer=max)
    figures["mem_peak_measured"] = _Figure(lambda call: max(r.peak_measured for r in call), of_layer=max)
    figures["mem_peak_predicted"] = _Figure(lambda call: max(r.peak_predicted for r in call), of_layer=max)
    return figures


def _entry(table: str, key: str, reduce: Callable[[Iterable[float]], float]) -> Callable[[Call], float]:
    """One entry of a record's table, over the ranks."""
    return lambda call: reduce(getattr(record, table).get(key, 0) for record in call)


def _column_sums(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]
