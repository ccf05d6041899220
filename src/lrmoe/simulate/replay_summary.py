"""From measured lanes to the summary of a replay: times with the modelled exchange, bytes, ratios to megatron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.simulate.generators import fixed_peak
from lrmoe.simulate.measure import measure
from lrmoe.simulate.replay import OURS, Lane, Question
from lrmoe.simulate.replay_link import RULE, Bytes, backward_bytes, exchange_ms, forward_bytes, link_of_rule
from lrmoe.simulate.replay_times import clock_kind
from lrmoe.simulate.summary import BASELINE

_PASSES = ("forward", "backward")
MEANING = {
    "recompute": "nothing stays at the experts; backward sends the kept pairs' inputs again and computes their first "
    "projection again, in every system. A stash of two expert widths per pair would outweigh narrow rows, and "
    "backward's memory would be the complete forward's",
    "stash": "rows and first projections stay at the experts until backward has ended, in every system",
}


def summarise(question: Question, lanes: Sequence[Lane]) -> dict[str, Any]:
    """JSON-able: "kind", "settings", "systems" (name -> figures), "measured" and "modelled" in words.

    Every system's figures: ms of both passes and of the layer, "<pass>_compute_ms" of them measured and
    "<pass>_exchange_ms" modelled, "phases" (pass -> phase -> both), peaks, kept and moved share, bytes, ratios.
    """
    bytes_of = {lane.name: _bytes(question, lane) for lane in lanes}
    base = next(lane for lane in lanes if lane.name == BASELINE)
    link = question.link_bytes_per_s
    if link is None:
        even = sum(base.times.mean(side, question.topology.ranks) for side in _PASSES)
        link = link_of_rule(even, list(bytes_of[BASELINE].values()))
    systems = {lane.name: _figures(question, lane, bytes_of[lane.name], link) for lane in lanes}
    for figures in systems.values():
        figures |= _ratios(figures, systems[BASELINE])
    return {
        "kind": "replay",
        "settings": _settings(question, link),
        "systems": systems,
        "measured": measured(question),
        "modelled": "exchange of rows, scores and replicas: bytes of the rank that moves most over the stated link",
    }


def measured(question: Question) -> str:
    """What ran, and which clock timed it."""
    clock = clock_kind(question.device)
    return (
        f"{clock} time of planning, sorting, packing, experts, combining, scores, selection, re-routing and return "
        f"on {question.device.type}, {question.workers} rank{'s' * (question.workers > 1)} at a time"
        f"{', one thread each' if question.device.type == 'cpu' else ''}; the slowest rank of each phase counts"
    )


def _bytes(question: Question, lane: Lane) -> dict[str, Bytes]:
    shape, scored = question.layer.shape, not lane.plan.exact
    return {
        "forward": forward_bytes(lane.plan, lane.seats, shape, scored=scored),
        "backward": backward_bytes(lane.plan, lane.seats, lane.kept, shape, scored=scored),
    }


def _figures(question: Question, lane: Lane, moved: Mapping[str, Bytes], link: float) -> dict[str, Any]:
    planned = measure(lane.plan, question.layer, 0.0)
    found: dict[str, Any] = {
        "forward_peak": planned.forward_peak,
        "backward_peak": planned.backward_peak,
        "kept_share": planned.kept_share,
        "moved_share": _moved_share(lane),
        "energy_dropped": lane.energy_dropped,
        "replicas": planned.replicas,
        "extra_slots": planned.extra_slots,
        "row_traffic": planned.row_traffic,
        "weight_traffic": planned.weight_traffic,
        **lane.most,
        "memory": max(lane.most[f"{side}_subtotal"] for side in _PASSES),
        "parts": {side: dict(parts) for side, parts in lane.parts.items()},
        "repeats": lane.repeats,
        "phases": {},
    }
    for side in _PASSES:
        compute, exchange = lane.times.slowest(side), exchange_ms(moved[side], link)
        found["phases"][side] = {"measured": compute, "modelled": exchange}
        found[f"{side}_compute_ms"] = sum(compute.values())
        found[f"{side}_exchange_ms"] = sum(exchange.values())
        found[f"{side}_ms"] = found[f"{side}_compute_ms"] + found[f"{side}_exchange_ms"]
    found["layer_ms"] = found["forward_ms"] + found["backward_ms"]
    return found


def _moved_share(lane: Lane) -> float:
    return lane.kept.moved / lane.plan.kept if lane.plan.kept else 0.0


def _ratios(own: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float]:
    """Beside fixed ownership: how many times as fast, and how much smaller."""
    found = {}
    for name in ("forward", "backward", "layer"):
        found[f"{name}_speedup"] = _over(base[f"{name}_ms"], own[f"{name}_ms"])
    for name in _PASSES:
        found[f"{name}_compute_speedup"] = _over(base[f"{name}_compute_ms"], own[f"{name}_compute_ms"])
        found[f"{name}_time_reduction"] = 1 - _over(own[f"{name}_ms"], base[f"{name}_ms"])
        found[f"{name}_subtotal_reduction"] = 1 - own[f"{name}_subtotal"] / base[f"{name}_subtotal"]
        found[f"{name}_memory_reduction"] = 1 - _over(own[f"{name}_memory"], base[f"{name}_memory"])
    found["memory_reduction"] = 1 - own["memory"] / base["memory"]
    return found


def _over(value: float, other: float) -> float:
    return value / other if other else 1.0


def _settings(question: Question, link: float) -> dict[str, Any]:
    layer, allowance, config = question.layer, question.allowance, question.config
    counts_RE = question.calls.counts[-1]
    return {
        "systems": list(question.systems),
        "call": question.calls.name,
        "history": len(question.calls.counts) - 1,
        "ranks": question.topology.ranks,
        "experts": question.topology.experts,
        "pairs": int(counts_RE.sum()),
        "fixed_peak": fixed_peak(counts_RE),
        "top_k": layer.top_k,
        "hidden": layer.shape.hidden,
        "expert_width": layer.shape.width,
        "dtype": question.dtype,
        "device": question.device.type,
        "clock": clock_kind(question.device),
        "slots": allowance.slots,
        "max_drop": allowance.max_drop,
        "estimator": config.estimator,
        "score": config.score,
        "selection": "global",
        "activations": question.activations,
        "activations_mean": MEANING[question.activations],
        "wire": "one row per pair",
        "seed": config.seed,
        "repeats": question.repeats,
        "workers": question.workers,
        "link_bytes_per_s": link,
        "link": RULE if question.link_bytes_per_s is None else "given",
        "ours": OURS,
    }
