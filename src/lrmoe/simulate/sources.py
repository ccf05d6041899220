"""Where the calls come from: a generator or a trace, cut to a number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lrmoe.errors import ConfigError
from lrmoe.planning.problem import IntArray
from lrmoe.simulate.cluster import Calls
from lrmoe.simulate.generators import generate
from lrmoe.telemetry._trace_rows import MOST_CELLS
from lrmoe.telemetry.traces import Trace


def from_generator(
    name: str,
    *,
    seeds: Sequence[int],
    steps: int,
    skip: int,
    options: Mapping[str, Any] | None = None,
    **sizes: int,
) -> list[Calls]:
    """One sequence of calls per seed; the first `skip` of `skip + steps` calls only make history.

    Args:
        name: of the generator. seeds: one sequence each. steps: measured calls. skip: calls before them.
        options: of the generator. sizes: ranks, experts, top_k, tokens.
    """
    return [
        Calls(
            name=f"seed {seed}",
            counts=list(generate(name, seed=seed, steps=skip + steps, **sizes, **(options or {}))),
            skip=skip,
        )
        for seed in seeds
    ]


def from_trace(
    trace: Trace, ranks: int, *, steps: int | None = None, skip: int = 0, layers: Sequence[int] | None = None
) -> list[Calls]:
    """One sequence of calls per layer of a trace.

    Args:
        trace: the counts. ranks: of the simulated cluster; neighbouring source ranks are put together.
        steps: most calls measured per layer. skip: calls before them that only make history.
        layers: which; None takes all.

    Raises:
        ConfigError: ranks that the trace cannot be folded to, or a layer with too few calls.
    """
    chosen = trace.layers if layers is None else tuple(layers)
    sequences = []
    for layer in chosen:
        counts = fold(trace.of_layer(layer), ranks)
        if len(counts) <= skip:
            raise ConfigError(
                f"skip={skip}: layer {layer} of the trace has {len(counts)} calls, none would be measured"
            )
        end = None if steps is None else skip + steps
        sequences.append(Calls(name=f"layer {layer}", counts=list(counts[:end]), skip=skip))
    return sequences


def enlarge(trace: Trace, ranks: Sequence[int], experts: Sequence[int]) -> Trace:
    """A trace without stated sizes whose last ranks or experts were idle, with the sizes that were asked for.

    Args:
        trace: returned as it is where it states its sizes. ranks, experts: asked for; smaller ones change nothing.

    Raises:
        ConfigError: more counts than are held at once.
    """
    if trace.sized:
        return trace
    extra = [max(size, *asked, 0) - size for asked, size in ((ranks, trace.ranks), (experts, trace.experts))]
    if not any(extra):
        return trace
    wanted = len(trace.counts_CRE) * (trace.ranks + extra[0]) * (trace.experts + extra[1])
    if wanted > MOST_CELLS:
        raise ConfigError(
            f"ranks={list(ranks)}, experts={list(experts)}: {wanted:,} counts of calls; at most {MOST_CELLS:,}"
        )
    counts = np.pad(trace.counts_CRE, ((0, 0), (0, extra[0]), (0, extra[1])))
    return dataclasses.replace(trace, counts_CRE=counts)


def fold(counts_SRE: IntArray, ranks: int) -> IntArray:
    """The same tokens on fewer ranks: sums over equal blocks of neighbouring sources, int64 (S, ranks, E).

    Raises:
        ConfigError: ranks do not divide the sources, or do not divide the experts.
    """
    steps, sources, experts = counts_SRE.shape
    if ranks < 1 or sources % ranks or experts % ranks:
        raise ConfigError(
            f"ranks={ranks}: the trace has {sources} source ranks and {experts} experts; must divide both"
        )
    return counts_SRE.reshape(steps, ranks, sources // ranks, experts).sum(axis=2)
