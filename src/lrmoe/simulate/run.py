"""A whole simulation: from settings to the summary that tables, JSON lines and the page are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lrmoe.errors import ConfigError, PlanError
from lrmoe.planning.hardware import get_hardware
from lrmoe.planning.memory import ExpertShape
from lrmoe.planning.problem import Topology
from lrmoe.planning.shapes import get_shape
from lrmoe.simulate.cluster import Calls, Outcome, mean_rows, simulate
from lrmoe.simulate.generators import Shape
from lrmoe.simulate.scenario import SYSTEMS, Allowance, Layer, System, fairness, make_systems
from lrmoe.simulate.sources import from_generator, from_trace
from lrmoe.simulate.summary import BASELINE, capacity_rows, system_summary, throughputs
from lrmoe.telemetry.traces import Trace

_EXPERTS_BY_RANKS = ((32, 128), (128, 256), (512, 512))  # up to so many ranks, so many experts; 1024 beyond
MAX_RANKS = 4096
MODEL = "Qwen3-30B-A3B"
STEPS, SKIP = (
    4,
    12,
)  # of a generator; the longest interval between looks at a placement is SmartMoE's, 10 calls
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `lrmoe simulate` is asked.

    Attributes:
        systems: names. ranks: one cluster each. experts: of each cluster; empty: the trace's, or by the ranks.
        generator: name of a pattern; trace: counts instead, trace_file: where they are from. options: of the generator.
        model: whose expert sizes and experts per token; None: those that the trace names, or Qwen3-30B-A3B.
        top_k: instead of the model's.
        tokens: per source rank and call. steps: measured calls (of a trace: most per layer); None: 4, of a trace all.
        skip: calls before them, which only make history; None: 12, of a trace 0. seeds: sequences of the generator.
        allowance: what every system is given. hardware: device. ranks_per_node: None takes the device's.
    """

    systems: Sequence[str] = SYSTEMS
    ranks: Sequence[int] = ()
    experts: Sequence[int] = ()
    generator: str = "lognormal"
    options: Mapping[str, Any] = field(default_factory=dict)
    trace: Trace | None = None
    trace_file: str | None = None
    model: str | None = None
    top_k: int | None = None
    tokens: int = 32768
    steps: int | None = None
    skip: int | None = None
    seeds: Sequence[int] = (0,)
    allowance: Allowance = field(default_factory=Allowance)
    hardware: str = "h100"
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("skip", 0), ("top_k", 1), ("ranks_per_node", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value}: must be at least {least}")
        if self.experts and len(self.experts) not in (1, len(self.ranks)):
            raise ConfigError(
                f"experts={list(self.experts)}: one number, or one for each of ranks={list(self.ranks)}"
            )
        for ranks in self.ranks:
            if not 1 <= ranks <= MAX_RANKS:
                raise ConfigError(f"ranks={ranks}: must lie in [1, {MAX_RANKS}]")
        if any(seed < 0 for seed in self.seeds):
            raise ConfigError(f"seed={min(self.seeds)}: must be at least 0")
        if len(set(self.ranks)) != len(self.ranks):
            raise ConfigError(f"ranks={list(self.ranks)}: each once")

    @property
    def history(self) -> int:
        """Calls that only make history."""
        return (SKIP if self.trace is None else 0) if self.skip is None else self.skip

    @property
    def measured(self) -> int | None:
        """Measured calls; None for all of a trace."""
        return STEPS if self.steps is None and self.trace is None else self.steps

    @property
    def layer(self) -> Layer:
        """The layer and its devices."""
        try:
            shape, hardware = get_shape(self.model or MODEL), get_hardware(self.hardware)
        except PlanError as error:
            raise ConfigError(str(error)) from error
        top_k = self.top_k or (self._said("top_k") if self.model is None else None) or shape.top_k
        return Layer(shape=self._trace_shape() or shape.expert(), top_k=top_k, hardware=hardware)

    def _trace_shape(self) -> ExpertShape | None:
        """Sizes of an expert, bf16, where the trace names them and no model is given."""
        hidden, width = self._said("hidden"), self._said("width")
        if self.model is not None or hidden is None or width is None:
            return None
        return ExpertShape(hidden=hidden, width=width, element_bytes=2)

    def _said(self, name: str) -> int | None:
        """A positive number of the trace's metadata."""
        value = None if self.trace is None else self.trace.about.get(name)
        return value if isinstance(value, int) and value > 0 else None

    def topologies(self) -> list[Topology]:
        """One for each cluster."""
        ranks = list(self.ranks) or [8 if self.trace is None else self.trace.ranks]
        experts = list(self.experts)
        if self.trace is not None:
            if any(e != self.trace.experts for e in experts):
                raise ConfigError(f"experts={experts}: the trace has {self.trace.experts}")
            experts = [self.trace.experts]
        experts = experts or [experts_for(r) for r in ranks]
        if len(experts) == 1:
            experts = experts * len(ranks)
        return [self._topology(r, e) for r, e in zip(ranks, experts, strict=True)]

    def _topology(self, ranks: int, experts: int) -> Topology:
        per_node = self.ranks_per_node or get_hardware(self.hardware).gpus_per_node
        try:
            nodes = None if ranks <= per_node else per_node
            topology = Topology(ranks=ranks, experts=experts, ranks_per_node=nodes)
        except PlanError as error:
            raise ConfigError(str(error)) from error
        foreign = experts - topology.experts_per_rank
        if ranks > 1 and self.allowance.slots > foreign:
            raise ConfigError(
                f"slots={self.allowance.slots}: must be at most {foreign}, the experts homed elsewhere"
            )
        return topology


def experts_for(ranks: int) -> int:
    """Experts of a cluster where none are given: 128 up to 32 ranks, then 256, 512, 1024."""
    return next((experts for most, experts in _EXPERTS_BY_RANKS if ranks <= most), 1024)


def run(settings: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """Simulate every cluster under every system.

    Args:
        settings: what is asked. progress: told a text, units done and units in all.

    Returns:
        JSON-able: "scenarios", one per cluster, each with its "systems"; "fairness"; "settings".

    Raises:
        ConfigError: settings that do not fit each other. InfeasibleError: the budget does not hold the home experts.
        PlanError: a policy broke the rules.
    """
    layer, topologies = settings.layer, settings.topologies()
    systems = make_systems(list(settings.systems), settings.allowance.slots)
    sources = sources_per_cluster(settings)
    told = _Told(progress, len(topologies) * len(systems) * sources)
    scenarios = []
    for topology in topologies:
        sequences = calls(settings, layer, topology)
        outcomes = simulate(systems, sequences, topology, layer, settings.allowance, progress=told.one)
        scenarios.append(scenario_summary(outcomes, sequences, topology, layer, settings.allowance))
    return {
        "kind": "simulate",
        "settings": describe(settings, layer),
        "scenarios": scenarios,
        "fairness": fairness_table(systems, layer, settings.allowance, scenarios),
    }


def fairness_table(
    systems: Sequence[System], layer: Layer, allowance: Allowance, scenarios: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What every system was given, and what its plans in all clusters did."""
    return {
        s.name: dict(fairness(s, layer, allowance, [scenario["systems"][s.name] for scenario in scenarios]))
        for s in systems
    }


def sources_per_cluster(settings: Settings) -> int:
    """Sequences that each cluster is simulated on."""
    return len(settings.seeds) if settings.trace is None else len(settings.trace.layers)


def calls(settings: Settings, layer: Layer, topology: Topology) -> list[Calls]:
    """The calls of one cluster."""
    if settings.trace is not None:
        return from_trace(settings.trace, topology.ranks, steps=settings.steps, skip=settings.history)
    shape = Shape(ranks=topology.ranks, experts=topology.experts, top_k=layer.top_k, tokens=settings.tokens)
    return from_generator(
        settings.generator,
        seeds=settings.seeds,
        steps=STEPS if settings.steps is None else settings.steps,
        skip=settings.history,
        options=settings.options,
        ranks=shape.ranks,
        experts=shape.experts,
        top_k=shape.top_k,
        tokens=shape.tokens,
    )


def scenario_summary(
    outcomes: Sequence[Outcome],
    sequences: Sequence[Calls],
    topology: Topology,
    layer: Layer,
    allowance: Allowance,
) -> dict[str, Any]:
    """One cluster's part of the summary."""
    found: dict[str, Any] = {o.system.name: system_summary(o, allowance.budget_bytes) for o in outcomes}
    fixed = next((o.calls for o in outcomes if o.system.name == BASELINE), ())
    budget = allowance.budget_rows(layer, topology)
    capacity = float(budget) if budget is not None else (capacity_rows(fixed) if fixed else None)
    if capacity is not None:
        for name, reached in throughputs(outcomes, capacity).items():
            found[name]["throughput"] = reached
    return {
        "ranks": topology.ranks,
        "experts": topology.experts,
        "nodes": topology.nodes,
        "mean_rows": mean_rows(sequences, topology.ranks),
        "sequences": [sequence.name for sequence in sequences],
        "capacity_rows": capacity,
        "capacity_rule": "the budget" if budget is not None else "fixed ownership reaches 40 % at 20x",
        "systems": found,
        "at_home": {o.system.name: o.system.info.acts for o in outcomes if topology.ranks > 1 and _stayed(o)},
    }


def _stayed(outcome: Outcome) -> bool:
    """Whether a system that plans from history left every expert at home in all measured calls."""
    return (
        outcome.system.remembers
        and bool(outcome.calls)
        and not any(call.replicas or call.weight_traffic for call in outcome.calls)
    )


def describe(settings: Settings, layer: Layer) -> dict[str, Any]:
    """The settings as they are shown and stored."""
    allowance = settings.allowance
    generated = {
        "generator": settings.generator,
        "options": dict(settings.options),
        "seeds": list(settings.seeds),
        "tokens": settings.tokens,
    }
    source = (
        generated
        if settings.trace is None
        else {"trace": settings.trace_file, "trace_system": settings.trace.system or None}
    )
    return {
        **source,
        "steps": settings.measured,
        "skip": settings.history,
        "systems": list(settings.systems),
        "model": settings.model or (MODEL if settings.trace is None else settings.trace.about.get("model")),
        "hidden": layer.shape.hidden,
        "expert_width": layer.shape.width,
        "top_k": layer.top_k,
        "hardware": layer.hardware.name,
        "row_bytes": layer.row_bytes,
        "expert_bytes": layer.expert_bytes,
        "slots": allowance.slots,
        "budget_bytes": allowance.budget_bytes,
        "max_drop": allowance.max_drop,
        "drop": allowance.drop,
    }


class _Told:
    """Counts units of work for a progress callback."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def one(self, text: str) -> None:
        """One unit is done."""
        self._done += 1
        if self._progress is not None:
            self._progress(text, self._done, self._total)
