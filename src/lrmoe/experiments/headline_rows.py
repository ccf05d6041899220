"""Rows and figures of the headline: time to the same loss, per seed and over seeds.

    time to loss = (sum over layers of the mean critical path of its executed steps up to the target) x steps to target

Ratios are taken seed by seed, then averaged; a ratio's standard error is over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lrmoe.experiments.stage_lanes import BALANCED, reference_of
from lrmoe.experiments.stage_lines import UNCOUNTED, Call, link_of
from lrmoe.report.data import BASELINE
from lrmoe.telemetry.figures import figure

AGAINST = ("symi", "ultraep", BASELINE)
PUBLISHED = (0.212, 0.448)  # reduction of MoE-layer time to a fixed loss against SYMI, smallest and largest


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one trajectory went.

    Attributes:
        model, aux, seed, system: which; exact systems share one trajectory.
        steps: to the target loss, or None where it was not reached.
        final_loss: mean of its last steps. exact_loss: the same of the exact trajectory.
    """

    model: str
    aux: float
    seed: int
    system: str
    steps: int | None
    final_loss: float
    exact_loss: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system on one model, auxiliary loss and seed.

    Attributes:
        steps, dloss: steps to the target; final loss less the exact one.
        layer_ms: critical path of a step's MoE layers, mean over executed steps. wall_ms: of the slowest rank.
        time_to_loss_s: None where the target was not reached.
        over: time to loss over that of other systems, by name.
        over_balanced: critical path over that of the same layer on balanced counts.
        kept_share, forward_peak, backward_peak, replicas: means over executed calls.
        phases: milliseconds a call by phase, bytes over the link included.
    """

    model: str
    aux: float
    seed: int
    system: str
    steps: int | None
    dloss: float
    layer_ms: float
    wall_ms: float
    time_to_loss_s: float | None
    over: dict[str, float]
    over_balanced: float
    kept_share: float
    forward_peak: float
    backward_peak: float
    buffer_bytes: int
    replicas: float
    phases: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Of some seeds: mean, standard error (None of one), and how many."""

    value: float
    error: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of at least one value."""
        spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(value=statistics.fmean(values), error=spread, seeds=len(values))


def rows_of(outcomes: Sequence[Outcome], calls: Sequence[Call]) -> list[Row]:
    """A row for each outcome whose calls were executed."""
    links = link_of(calls, f"{BALANCED}:{BASELINE}")
    by_place: dict[tuple[str, float, int, str], list[Call]] = {}
    for call in calls:
        by_place.setdefault((call.model, call.aux, call.seed, call.system), []).append(call)
    rows = []
    for outcome in outcomes:
        place = (outcome.model, outcome.aux, outcome.seed)
        own = by_place.get((*place, outcome.system), [])
        own = [call for call in own if outcome.steps is None or call.step <= outcome.steps]
        balanced = by_place.get((*place, reference_of(outcome.system)), [])
        if own and balanced:
            rows.append(_row(outcome, own, balanced, links[outcome.model]))
    return [_against(row, rows) for row in rows]


def _row(outcome: Outcome, own: Sequence[Call], balanced: Sequence[Call], link: float) -> Row:
    layer_ms = _by_layer([(call.layer, call.critical_ms(link)) for call in own])
    reference = statistics.fmean(call.critical_ms(link, UNCOUNTED) for call in balanced)
    layers = len({call.layer for call in own})
    return Row(
        model=outcome.model,
        aux=outcome.aux,
        seed=outcome.seed,
        system=outcome.system,
        steps=outcome.steps,
        dloss=outcome.final_loss - outcome.exact_loss,
        layer_ms=layer_ms,
        wall_ms=_by_layer([(call.layer, call.wall_ms) for call in own]),
        time_to_loss_s=None if outcome.steps is None else layer_ms * outcome.steps / 1e3,
        over={},
        over_balanced=layer_ms / layers / reference,
        kept_share=sum(call.kept for call in own) / sum(call.pairs for call in own),
        forward_peak=statistics.fmean(call.forward_peak for call in own),
        backward_peak=statistics.fmean(call.backward_peak for call in own),
        buffer_bytes=max(call.buffer_bytes for call in own),
        replicas=statistics.fmean(call.replicas for call in own),
        phases=_phases(own, link),
    )


def _by_layer(values: Sequence[tuple[int, float]]) -> float:
    """Sum over layers of the mean of each."""
    layers = sorted({layer for layer, _ in values})
    return sum(statistics.fmean(value for at, value in values if at == layer) for layer in layers)


def _phases(calls: Sequence[Call], link: float) -> dict[str, float]:
    names = dict.fromkeys(name for call in calls for name in (*call.phase_ms, *call.phase_bytes))
    return {
        name: statistics.fmean(
            call.phase_ms.get(name, 0.0) + call.phase_bytes.get(name, 0) / link * 1e3 for call in calls
        )
        for name in names
    }


def _against(row: Row, rows: Sequence[Row]) -> Row:
    """The row with its ratios to others of the same seed."""
    over = {
        other.system: row.time_to_loss_s / other.time_to_loss_s
        for other in rows
        if (other.model, other.aux, other.seed) == (row.model, row.aux, row.seed)
        and other.system in AGAINST
        and row.time_to_loss_s is not None
        and other.time_to_loss_s is not None
    }
    return Row(**{**vars(row), "over": over})


def figures(rows: Sequence[Row], regime: str, **context: Any) -> list[dict[str, Any]]:
    """The headline's figures, over seeds: name, mean, and in the context seeds, standard error and values by seed."""
    found = []
    for (model, aux, system), same in grouped(rows):
        name = f"headline.{model}.{regime}.aux{aux:g}.{system}"
        quantities = {
            f"time_to_loss_over_{other}": _ratios(same, other) for other in AGAINST if other != system
        }
        quantities["layer_time_over_balanced"] = {row.seed: row.over_balanced for row in same}
        quantities["dloss"] = {row.seed: row.dloss for row in same}
        quantities["steps"] = {row.seed: float(row.steps) for row in same if row.steps is not None}
        for quantity, by_seed in quantities.items():
            if by_seed:
                found.append(_figure(f"{name}.{quantity}", quantity, by_seed, len(same), context))
    return found


def _figure(
    name: str, quantity: str, by_seed: dict[int, float], runs: int, context: dict[str, Any]
) -> dict[str, Any]:
    mean = Mean.of(list(by_seed.values()))
    unit = {"dloss": "nats", "steps": "steps"}.get(quantity, "ratio")
    return figure(
        name,
        round(mean.value, 6),
        unit,
        "lower",
        standard_error=None if mean.error is None else round(mean.error, 6),
        by_seed={str(seed): round(value, 6) for seed, value in by_seed.items()},
        missing_seeds=runs - len(by_seed),
        **context,
    )


def _ratios(rows: Sequence[Row], other: str) -> dict[int, float]:
    return {row.seed: row.over[other] for row in rows if other in row.over}


def grouped(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, float, str], list[Row]]]:
    """Rows by model, auxiliary loss and system, in the order of the first of each."""
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.aux, row.system), []).append(row)
    yield from groups.items()
