"""What tables and plots read: runs as typed, immutable values. load.py makes them from run folders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASELINE = "megatron"


@dataclass(frozen=True, kw_only=True)
class Series:
    """What happened step by step; all tuples have one entry per step.

    Attributes:
        step: optimizer steps, from 1.
        loss: global mean training loss.
        smoothed: smoothed loss, None while the window fills.
        eval_loss: loss on held-out text, None at steps without an evaluation.
        critical_s: MoE-layer time so far, critical path, in seconds; empty where no link speed is stated.
        critical_bytes: bytes so far that `critical_s` puts on the link; empty where it is.
        wall_s: MoE-layer time so far, wall, in seconds.
        kept_share: share of pairs that backward kept.
        dropped_energy: share of the scores' energy that left-out pairs held; None where nothing was scored.
        added_variance: by sampling, over the scores' energy; None where nothing was scored.
        variance_mean, variance_predicted: running mean of what calls added over the gradient's own variance, worst
            layer, and what the quotas were predicted to add; None where no limit governed the step.
        check_cosine, check_error, check_layer: the pruned gradient of a layer against the exact one: cosine, relative
            error, and which layer; None at steps without a check.
        forward_peak, backward_peak: rows of the most loaded rank over the mean load, worst layer; empty where
            unknown.
    """

    step: tuple[int, ...] = ()
    loss: tuple[float | None, ...] = ()
    smoothed: tuple[float | None, ...] = ()
    eval_loss: tuple[float | None, ...] = ()
    critical_s: tuple[float, ...] = ()
    critical_bytes: tuple[float, ...] = ()
    wall_s: tuple[float, ...] = ()
    kept_share: tuple[float | None, ...] = ()
    dropped_energy: tuple[float | None, ...] = ()
    added_variance: tuple[float | None, ...] = ()
    variance_mean: tuple[float | None, ...] = ()
    variance_predicted: tuple[float | None, ...] = ()
    check_cosine: tuple[float | None, ...] = ()
    check_error: tuple[float | None, ...] = ()
    check_layer: tuple[int | None, ...] = ()
    forward_peak: tuple[float, ...] = ()
    backward_peak: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """Mean rows per rank of one layer in the steps where backward was pruned (all steps where it never was).

    Attributes:
        layer: index of the MoE layer.
        forward_R: rows each rank computed forward.
        backward_R: rows each rank computed backward.
    """

    layer: int
    forward_R: tuple[float, ...]
    backward_R: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean load of a rank with nothing dropped."""
        return sum(self.forward_R) / max(1, len(self.forward_R))


@dataclass(frozen=True, kw_only=True)
class LayerSteps:
    """Loads of one MoE layer step by step; long runs are thinned, so that a page stays small.

    Attributes:
        layer: index of the MoE layer.
        step: which steps, S of them.
        forward_SR, backward_SR: rows each rank computed.
        counts_SE, quota_SE: pairs routed to each expert, and those of them that backward kept; empty where unknown.
    """

    layer: int
    step: tuple[int, ...]
    forward_SR: tuple[tuple[float, ...], ...]
    backward_SR: tuple[tuple[float, ...], ...]
    counts_SE: tuple[tuple[int, ...], ...] = ()
    quota_SE: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by part on the fullest rank.

    Attributes:
        stacks: name of a bar ("measured", "predicted") -> part -> bytes, in order.
        budget: bytes that the parts must fit into, or None. budget_name: which budget that is.
        what: what the parts belong to, in words.
    """

    stacks: Mapping[str, Mapping[str, float]]
    budget: float | None = None
    budget_name: str = "budget"
    what: str = ""


@dataclass(frozen=True, kw_only=True)
class SystemRun:
    """One system's part of a run; a training run has exactly one.

    Attributes:
        name: how plots and tables call it.
        key: its name in files and figures; empty where that is `name`.
        figures: its entry of summary.json (numbers, flags, and nested mappings).
        series: step by step.
        loads: rows per rank, one entry per layer.
        layers: loads step by step, one entry per layer.
        memory: bytes by part, where the run has them.
        phase_ms: per phase, milliseconds of a layer call on the slowest rank; "wire" is bytes over the link.
        config: the LRMoEConfig it ran with.
        colour, dash: how curves are drawn; an empty colour is the plots' own choice.
    """

    name: str
    key: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    series: Series = field(default_factory=Series)
    loads: tuple[LayerRows, ...] = ()
    layers: tuple[LayerSteps, ...] = ()
    memory: Memory | None = None
    phase_ms: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    colour: str = ""
    dash: str = "solid"

    def number(self, name: str) -> float | None:
        """A finite figure of the summary, or None."""
        value = self.figures.get(name)
        finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if finite and value is not None else None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder.

    Attributes:
        name: the folder's name.
        kind: which command made it, as KINDS of sections.py names them; "pair" is two that were trained, in one.
        summary: summary.json as it is.
        config: the resolved configuration, tables of config.toml.
        systems: what ran.
        unfinished: what is missing where the run has no summary of its own, or empty.
    """

    name: str
    kind: str
    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    systems: tuple[SystemRun, ...]
    unfinished: str = ""

    @property
    def baseline(self) -> SystemRun | None:
        """The system that others are measured against, where it ran: the one asked for, or fixed ownership."""
        against = self.summary.get("against") or BASELINE
        named = (s for s in self.systems if (s.key or s.name) == against)
        return next(named, None) if self.kind == "compare" else None

    @property
    def target_loss(self) -> float | None:
        """The loss that ends the comparison; None for a training run."""
        value = self.summary.get("target_loss")
        return float(value) if isinstance(value, int | float) else None
