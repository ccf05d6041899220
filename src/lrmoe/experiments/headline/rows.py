"""Rows and figures of the headline: time to the same loss, per seed and over seeds.

    time to loss = (sum over layers of the mean critical path of its executed steps up to the target) x steps to target

Ratios are taken seed by seed, then averaged; a ratio's standard error is over seeds.

    least time over SYMI's = (balanced exact forward + kept share x balanced exact backward) x steps / SYMI's time

is what a backward that costs nothing but its kept rows would reach: what SYMI's peaks on these counts leave to gain.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from lrmoe.experiments.stage.lanes import BALANCED, reference_of
from lrmoe.experiments.stage.lines import MAIN, UNCOUNTED, Call, link_of
from lrmoe.report.data import BASELINE
from lrmoe.statistics import standard_error
from lrmoe.telemetry.figures import figure

AGAINST = ("symi", "ultraep", BASELINE)
LINK = "wire"  # the phase of all bytes over the link but those of replicas
_FORWARD = {
    "plan": 1.0,
    "dispatch": 1.0,
    "experts": 1.0,
    "combine": 1.0,
    "pack": 0.5,
}  # packing is in both passes
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
        activations: as in Call.
        steps, dloss: steps to the target; final loss less the exact one.
        layer_ms: critical path of a step's MoE layers, mean over executed steps. wall_ms: of the slowest rank.
        time_to_loss_s: None where the target was not reached.
        over: time to loss over that of other systems, by name.
        over_balanced: critical path over that of the same layer on balanced counts.
        least_over_symi: see above; None for exact systems, and where SYMI or the target is missing.
        kept_share, forward_peak, backward_peak, replicas: means over executed calls.
        phases: milliseconds a call of the slowest rank by phase; bytes over the link are in LINK, those of replicas in
            theirs.
        balanced: the same of its reference on balanced counts, without UNCOUNTED. balanced_forward_ms: the part of it
            that is forward.
    """

    model: str
    aux: float
    seed: int
    activations: str
    system: str
    steps: int | None
    dloss: float
    layer_ms: float
    wall_ms: float
    time_to_loss_s: float | None
    over: dict[str, float]
    over_balanced: float
    least_over_symi: float | None
    kept_share: float
    forward_peak: float
    backward_peak: float
    buffer_bytes: int
    replicas: float
    phases: dict[str, float]
    balanced: dict[str, float]
    balanced_forward_ms: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def rows_of(outcomes: Sequence[Outcome], calls: Sequence[Call]) -> list[Row]:
    """A row for each outcome and setting of activations whose calls were executed, the main setting first."""
    links = link_of(calls, f"{BALANCED}:{BASELINE}")
    by_place: dict[tuple[str, float, int, str, str], list[Call]] = {}
    for call in calls:
        by_place.setdefault(call.key[:5], []).append(call)
    settings = sorted({call.activations for call in calls}, key=lambda name: name != MAIN)
    rows = []
    for activations, outcome in product(settings, outcomes):
        place = (outcome.model, outcome.aux, outcome.seed, activations)
        own = by_place.get((*place, outcome.system), [])
        own = [call for call in own if outcome.steps is None or call.step <= outcome.steps]
        balanced = by_place.get((*place, reference_of(outcome.system)), [])
        if own and balanced:
            rows.append(_row(outcome, own, balanced, links[outcome.model, activations]))
    return [_against(row, rows) for row in rows]


def _row(outcome: Outcome, own: Sequence[Call], balanced: Sequence[Call], link: float) -> Row:
    layer_ms = _by_layer([(call.layer, call.critical_ms(link)) for call in own])
    reference = statistics.fmean(call.critical_ms(link, UNCOUNTED) for call in balanced)
    layers = len({call.layer for call in own})
    return Row(
        model=outcome.model,
        aux=outcome.aux,
        seed=outcome.seed,
        activations=own[0].activations,
        system=outcome.system,
        steps=outcome.steps,
        dloss=outcome.final_loss - outcome.exact_loss,
        layer_ms=layer_ms,
        wall_ms=_by_layer([(call.layer, call.wall_ms) for call in own]),
        time_to_loss_s=None if outcome.steps is None else layer_ms * outcome.steps / 1e3,
        over={},
        over_balanced=layer_ms / layers / reference,
        least_over_symi=None,
        kept_share=sum(call.kept for call in own) / sum(call.pairs for call in own),
        forward_peak=statistics.fmean(call.forward_peak for call in own),
        backward_peak=statistics.fmean(call.backward_peak for call in own),
        buffer_bytes=max(call.buffer_bytes for call in own),
        replicas=statistics.fmean(call.replicas for call in own),
        phases=_phases(own, link),
        balanced=_phases(balanced, link, UNCOUNTED),
        balanced_forward_ms=statistics.fmean(_forward_ms(call, link) for call in balanced),
    )


def _by_layer(values: Sequence[tuple[int, float]]) -> float:
    """Sum over layers of the mean of each."""
    layers = sorted({layer for layer, _ in values})
    return sum(statistics.fmean(value for at, value in values if at == layer) for layer in layers)


def _phases(calls: Sequence[Call], link: float, without: Sequence[str] = ()) -> dict[str, float]:
    names = [n for n in dict.fromkeys(name for call in calls for name in call.phase_ms) if n not in without]
    found = {name: statistics.fmean(call.phase_ms.get(name, 0.0) for call in calls) for name in names}
    sent = {name: 0.0 for call in calls for name in call.phase_bytes if name not in without}
    for name in sent:
        size = statistics.fmean(call.phase_bytes.get(name, 0) for call in calls)
        place = name if name == "replicas" else LINK
        found[place] = found.get(place, 0.0) + size / link * 1e3
    return found


def _forward_ms(call: Call, link: float) -> float:
    return sum(
        share * (call.phase_ms.get(name, 0.0) + call.phase_bytes.get(name, 0) / link * 1e3)
        for name, share in _FORWARD.items()
    )


def _against(row: Row, rows: Sequence[Row]) -> Row:
    """The row with its ratios to others of the same seed and setting."""
    beside = {
        other.system: other
        for other in rows
        if (other.model, other.aux, other.seed, other.activations)
        == (row.model, row.aux, row.seed, row.activations)
    }
    over = {
        name: row.time_to_loss_s / other.time_to_loss_s
        for name, other in beside.items()
        if name in AGAINST and row.time_to_loss_s is not None and other.time_to_loss_s is not None
    }
    return replace(row, over=over, least_over_symi=_least(row, beside.get("symi")))


def _least(row: Row, symi: Row | None) -> float | None:
    """See Row."""
    if symi is None or row.steps is None or symi.time_to_loss_s is None or row.kept_share == 1:
        return None
    calls = symi.layer_ms / sum(symi.phases.values())  # layers of a step
    forward = symi.balanced_forward_ms
    backward = sum(symi.balanced.values()) - forward
    return (forward + row.kept_share * backward) * calls * row.steps / 1e3 / symi.time_to_loss_s


def figures(rows: Sequence[Row], regime: str, **context: Any) -> list[dict[str, Any]]:
    """The headline's figures, over seeds: name, mean, and in the context seeds, standard error and values by seed.

    Of other activations than the main ones only times are told, under <system>.<activations>: steps are the same.
    """
    found = []
    for (model, aux, system, activations), same in grouped(rows):
        name = f"headline.{model}.{regime}.{aux:g}.{system}"
        name += "" if activations == MAIN else f".{activations}"
        quantities = {
            f"time_to_loss_over_{other}": _ratios(same, other) for other in AGAINST if other != system
        }
        quantities["layer_time_over_balanced"] = {row.seed: row.over_balanced for row in same}
        least = {row.seed: row.least_over_symi for row in same if row.least_over_symi is not None}
        quantities["least_time_over_symi"] = least
        if activations == MAIN:
            quantities["dloss"] = {row.seed: row.dloss for row in same}
            quantities["steps"] = {row.seed: float(row.steps) for row in same if row.steps is not None}
        for quantity, by_seed in quantities.items():
            if by_seed:
                about = {**context, "activations": activations}
                found.append(_figure(f"{name}.{quantity}", quantity, by_seed, len(same), about))
    return found


def _figure(
    name: str, quantity: str, by_seed: dict[int, float], runs: int, context: dict[str, Any]
) -> dict[str, Any]:
    values = list(by_seed.values())
    error = standard_error(values)
    unit = {"dloss": "nats", "steps": "steps"}.get(quantity, "ratio")
    return figure(
        name,
        round(statistics.fmean(values), 6),
        unit,
        "lower",
        standard_error=None if error is None else round(error, 6),
        by_seed={str(seed): round(value, 6) for seed, value in by_seed.items()},
        missing_seeds=runs - len(by_seed),
        **context,
    )


def _ratios(rows: Sequence[Row], other: str) -> dict[int, float]:
    return {row.seed: row.over[other] for row in rows if other in row.over}


def grouped(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, float, str, str], list[Row]]]:
    """Rows by model, auxiliary loss, system and activations, in the order of the first of each."""
    groups: dict[tuple[str, float, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.aux, row.system, row.activations), []).append(row)
    yield from groups.items()
