"""Slow, obvious optima of the quota problem with every expert at home."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from lrmoe.planning import Problem, Topology


def every_legal_quota(problem: Problem) -> np.ndarray:
    """All quota vectors inside the floors and the drop cap, (options, E)."""
    ranges = [
        range(int(low), int(high) + 1) for low, high in zip(problem.floor_E, problem.counts_E, strict=True)
    ]
    vectors = np.array(list(itertools.product(*ranges)), dtype=np.int64).reshape(-1, len(ranges))
    return vectors[problem.pairs - vectors.sum(axis=1) <= problem.drop_cap]


def peaks(problem: Problem, quotas_XE: np.ndarray) -> np.ndarray:
    """Most loaded rank under each quota vector."""
    return quotas_XE.reshape(len(quotas_XE), problem.topology.ranks, -1).sum(axis=2).max(axis=1)


def water_level(problem: Problem, cap: int | None = None) -> int:
    """Least peak by trying every level from 0 upward; floors count as load that cannot go."""
    cap = problem.drop_cap if cap is None else cap
    shape = (problem.topology.ranks, -1)
    load = problem.counts_E.reshape(shape).sum(axis=1).tolist()
    floor = problem.floor_E.reshape(shape).sum(axis=1).tolist()
    for level in itertools.count(max(floor)):
        if sum(max(0, one - level) for one in load) <= cap:
            return level
    raise AssertionError


def overload_goal(problem: Problem) -> int:
    """The load that `overload` aims at."""
    return math.ceil(problem.peak_target * problem.pairs / problem.topology.ranks)


@st.composite
def problems(draw: st.DrawFn, *, max_ranks: int = 8, max_local: int = 6, max_count: int = 300) -> Problem:
    """Problems with skew, idle experts, idle ranks and empty sources."""
    ranks = draw(st.integers(1, max_ranks))
    experts = ranks * draw(st.integers(1, max_local))
    scale = draw(st.sampled_from([0, 1, 5, max_count]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    popularity = rng.lognormal(0, draw(st.sampled_from([0.0, 1.0, 2.0])), experts)
    popularity *= rng.random(experts) < draw(st.sampled_from([1.0, 0.5]))
    source = rng.random(ranks) < draw(st.sampled_from([1.0, 0.5]))
    counts = rng.poisson(scale * popularity[None, :] * source[:, None]).clip(max=4 * max_count)
    return Problem(
        counts_RE=counts.astype(np.int64),
        topology=Topology(ranks=ranks, experts=experts),
        max_drop=draw(st.sampled_from([0.0, 0.01, 0.2, 0.3, 0.5, 0.9])),
        drop=draw(st.sampled_from(["always", "overload"])),
        min_keep=draw(st.sampled_from([0, 1, 3])),
        peak_target=draw(st.sampled_from([0.5, 1.0, 1.3])),
        score_mean_E=draw(st.sampled_from([None, rng.random(experts)])),
    )


def max_flow(arcs: list[tuple[int, int, int]], nodes: int) -> int:
    """Maximum flow from node 0 to the last node (SciPy's Dinic, capacities below 2^31)."""
    tail, head, room = (np.array(column, dtype=np.int32) for column in zip(*arcs, strict=True))
    graph = csr_matrix((room, (tail, head)), shape=(nodes, nodes))
    return int(maximum_flow(graph, 0, nodes - 1).flow_value)
