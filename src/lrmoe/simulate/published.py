"""The published comparison, defined so that figures mean the same thing: all systems, one budget, one skew.

What the account leaves open, and how it is read here, is written down in docs/published.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lrmoe.planning.problem import Topology
from lrmoe.simulate.cluster import Outcome, simulate
from lrmoe.simulate.measure import CallFigures
from lrmoe.simulate.run import Settings, calls, describe, fairness_table, scenario_summary
from lrmoe.simulate.scenario import SYSTEMS, Allowance, make_systems
from lrmoe.simulate.summary import BASELINE, BASELINE_PRESSURE, capacity_rows, throughput

OURS = "lrmoe"
RANKS, EXPERTS, TOP_K, TOKENS = 8, 128, 8, 32768  # 262,144 pairs per rank
SEEDS = tuple(range(20))
SKIP, STEPS = 24, 8
FIXED_PEAK = 2.49
SIGMA = (
    2.06640625  # of the lognormal generator: fixed ownership's mean peak is FIXED_PEAK over SEEDS (tested)
)
PLANNED_AT = {1: 1, 2: 1, 5: 1, 10: 20, 20: 20}  # pressure -> the batch whose plans stand for it
FIXED_MS, PEAK_MS = 1.44, 11.3  # backward of a layer: a fixed part, and one per (peak / mean)

# quantity -> (published value, what it says)
PUBLISHED: Mapping[str, tuple[float, str]] = {
    "memory_reduction": (1 - 5.44 / 12.88, "experts, replicas and token buffers: 12.88 -> 5.44 GiB"),
    "token_buffer_reduction": (1 - 4.97 / 12.46, "token buffers: 12.46 -> 4.97 GiB"),
    "backward_speedup": (29.64 / 12.69, "backward subtotal: 29.64 -> 12.69 ms"),
    "effective_throughput_20x.lrmoe": (1.0, "at 20x batch pressure"),
    "effective_throughput_20x.ultraep": (0.584, "at 20x batch pressure"),
    "effective_throughput_20x.symi": (0.449, "at 20x batch pressure"),
    "effective_throughput_20x.megatron": (0.4, "at 20x batch pressure; sets the budget here"),
    "step_time_over_symi": (
        (36.7 / 8693) / (64.6 / 8440),
        "MoE-layer time per step: 36.7 min / 8693 steps against 64.6 min / 8440",
    ),
}


def published_settings(
    systems: Sequence[str] = SYSTEMS, slots: int = 2, seeds: Sequence[int] = SEEDS
) -> Settings:
    """The settings of the published comparison; `systems` and `slots` may be varied, and are then stated."""
    return Settings(
        systems=systems,
        ranks=(RANKS,),
        experts=(EXPERTS,),
        generator="lognormal",
        options={"sigma": SIGMA, "sampling": "counts"},
        model="Qwen3-30B-A3B",
        top_k=TOP_K,
        tokens=TOKENS,
        steps=STEPS,
        skip=SKIP,
        seeds=seeds,
        allowance=Allowance(slots=slots, max_drop=0.2),
        hardware="h100",
    )


def run_published(
    settings: Settings, progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Any]:
    """Simulate the published comparison.

    The calls are planned at the batch of the account and anew at 20 times it, as some rules depend on the batch.

    Args:
        settings: from `published_settings`; megatron must be among its systems.
        progress: told a text, units done and units in all.

    Returns:
        the summary of `run`, and "published": quantity -> value, and the list of comparisons.
    """
    layer, topology = settings.layer, Topology(ranks=RANKS, experts=EXPERTS)
    systems = make_systems(list(settings.systems), settings.allowance.slots)
    sequences = calls(settings, layer, topology)
    batches = tuple(dict.fromkeys(PLANNED_AT.values()))
    done, total = 0, len(batches) * len(systems) * len(sequences)

    def told(text: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(text, done, total)

    at = {
        pressure: simulate(
            systems, sequences, topology, layer, settings.allowance, pressure=pressure, progress=told
        )
        for pressure in batches
    }
    scenario = scenario_summary(at[1], sequences, topology, layer, settings.allowance)
    capacity = capacity_rows(_of(at[BASELINE_PRESSURE], BASELINE), BASELINE_PRESSURE)
    scenario["capacity_rows"] = capacity
    for name, figures in scenario["systems"].items():
        figures["throughput"] = {
            str(p): throughput(_of(at[batch], name), capacity, p, planned_at=batch)
            for p, batch in PLANNED_AT.items()
        }
    values = quantities(at[1], scenario)
    return {
        "kind": "simulate",
        "preset": "published",
        "settings": describe(settings, layer),
        "scenarios": [scenario],
        "fairness": fairness_table(systems, layer, settings.allowance, [scenario]),
        "published": values,
        "comparison": comparison(values),
    }


def _of(outcomes: Sequence[Outcome], name: str) -> tuple[CallFigures, ...]:
    return next(o.calls for o in outcomes if o.system.name == name)


def backward_ms(peak: float) -> float:
    """Modelled backward of a layer, fitted to the account: 1.44 ms + 11.3 ms x (peak / mean)."""
    return FIXED_MS + PEAK_MS * peak


def quantities(outcomes: Sequence[Outcome], scenario: Mapping[str, Any]) -> dict[str, float]:
    """Every figure of the comparison, without the leading "published."; "<quantity>" is lrmoe against megatron."""
    found: dict[str, float] = {}
    fixed = _of(outcomes, BASELINE)
    for outcome in outcomes:
        name = outcome.system.name
        figures = scenario["systems"][name]
        own = _reductions(fixed, outcome.calls)
        own["backward_speedup"] = _mean_ms(fixed) / _mean_ms(outcome.calls)
        own |= {quantity: figures[quantity] for quantity in ("forward_peak", "backward_peak", "kept_share")}
        own["peak"] = figures["peak"]
        for quantity, value in own.items():
            found[f"{quantity}.{name}"] = value
            if name == OURS:
                found[quantity] = value
        found[f"effective_throughput_20x.{name}"] = figures["throughput"][str(BASELINE_PRESSURE)]
    ours, symi = (scenario["systems"].get(name) for name in (OURS, "symi"))
    if ours and symi:
        found["step_time_over_symi"] = ours["layer_ms"] / symi["layer_ms"]
    return found


def _reductions(fixed: Sequence[CallFigures], own: Sequence[CallFigures]) -> dict[str, float]:
    """How much less memory than fixed ownership, from mean subtotals over the calls."""

    def less(size: Callable[[CallFigures], float]) -> float:
        return 1 - float(np.mean([size(c) for c in own])) / float(np.mean([size(c) for c in fixed]))

    return {
        "forward_subtotal_reduction": less(lambda c: c.forward_subtotal),
        "backward_subtotal_reduction": less(lambda c: c.backward_subtotal),
        "memory_reduction": less(lambda c: max(c.forward_subtotal, c.backward_subtotal)),
        "token_buffer_reduction": less(lambda c: c.peak),
        "backward_token_buffer_reduction": less(lambda c: c.backward_peak),
    }


def _mean_ms(own: Sequence[CallFigures]) -> float:
    return float(np.mean([backward_ms(call.backward_peak) for call in own]))


def comparison(values: Mapping[str, float]) -> list[dict[str, Any]]:
    """Published and simulated side by side: the ratio is simulated / published."""
    return [
        {
            "quantity": name,
            "published": value,
            "simulated": values[name],
            "ratio": values[name] / value,
            "what": what,
        }
        for name, (value, what) in PUBLISHED.items()
        if name in values
    ]
