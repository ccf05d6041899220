"""Slow, obvious optima: quotas with every expert at home, routing among instances, placement of replicas.

Instances are given as expert_J, rank_J; R ranks, E experts, J instances.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix, lil_matrix
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


def feasible_flow(
    expert_J: np.ndarray, rank_J: np.ndarray, pairs_E: np.ndarray, level: int, ranks: int
) -> bool:
    """Whether every rank can stay at `level`, by SciPy's maximum flow."""
    experts, end = pairs_E.size, 1 + pairs_E.size + ranks
    arcs = [(0, 1 + e, int(k)) for e, k in enumerate(pairs_E)]
    arcs += [
        (1 + int(e), 1 + experts + int(r), int(pairs_E[e])) for e, r in zip(expert_J, rank_J, strict=True)
    ]
    arcs += [(1 + experts + r, end, level) for r in range(ranks)]
    return max_flow(arcs, end + 1) == int(pairs_E.sum())


def closed_form(
    expert_J: np.ndarray, rank_J: np.ndarray, pairs_E: np.ndarray, ranks: int, drop: int = 0
) -> int:
    """max over sets D of ranks of ceil((f(D) - drop) / |D|), at least 0: superset sums over bit masks (R <= 14)."""
    mask_E = np.zeros(pairs_E.size, dtype=np.int64)
    np.bitwise_or.at(mask_E, expert_J, 1 << rank_J.astype(np.int64))
    inside = np.zeros(1 << ranks, dtype=np.int64)
    np.add.at(inside, mask_E, pairs_E)
    for bit in range(ranks):
        halves = inside.reshape(-1, 2, 1 << bit)
        halves[:, 1] += halves[:, 0]
    size = np.array([bin(mask).count("1") for mask in range(1 << ranks)])
    return max(0, int((-(-(inside[1:] - drop) // size[1:])).max()))


def brute_force(expert_J: np.ndarray, rank_J: np.ndarray, pairs_E: np.ndarray, ranks: int) -> int:
    """Least peak by trying every way to split every expert's pairs (tiny cases only)."""
    loads = {(0,) * ranks}
    for e, pairs in enumerate(pairs_E.tolist()):
        hosts = rank_J[expert_J == e].tolist()
        grown = set()
        for cut in itertools.product(range(pairs + 1), repeat=len(hosts) - 1):
            if sum(cut) <= pairs:
                split = [*cut, pairs - sum(cut)]
                for load in loads:
                    more = list(load)
                    for host, part in zip(hosts, split, strict=True):
                        more[host] += part
                    grown.add(tuple(more))
        loads = grown
    return min(max(load) for load in loads)


def milp_peak(
    expert_J: np.ndarray,
    rank_J: np.ndarray,
    pairs_E: np.ndarray,
    ranks: int,
    *,
    floor_E: np.ndarray | None = None,
    drop: int = 0,
    cap_R: np.ndarray | None = None,
    local_J: np.ndarray | None = None,
    wire: int | None = None,
) -> int | None:
    """Least integer peak by mixed-integer programming over pairs per instance and the peak; None where infeasible.

    Kept pairs of an expert lie between its floor and its count, `drop` are left out at most, ranks keep their caps,
    and pairs beyond local_J enter over a wire that carries `wire` per rank.
    """
    instances, experts = expert_J.size, pairs_E.size
    columns = 2 * instances + 1
    table = lil_matrix((experts + 1 + 3 * ranks + instances, columns))
    low, high = np.full(table.shape[0], -np.inf), np.zeros(table.shape[0])
    for j, (e, r) in enumerate(zip(expert_J.tolist(), rank_J.tolist(), strict=True)):
        table[e, j] = table[experts, j] = table[experts + 1 + r, j] = table[experts + 1 + ranks + r, j] = 1
        table[experts + 1 + 2 * ranks + r, instances + j] = 1  # rows over the wire
        row = experts + 1 + 3 * ranks + j
        table[row, j], table[row, instances + j] = 1, -1
        high[row] = np.inf if local_J is None else local_J[j]
    low[:experts], high[:experts] = (pairs_E if floor_E is None else floor_E), pairs_E
    low[experts], high[experts] = pairs_E.sum() - drop, np.inf
    for r in range(ranks):
        table[experts + 1 + r, columns - 1] = -1
        high[experts + 1 + ranks + r] = np.inf if cap_R is None else cap_R[r]
        high[experts + 1 + 2 * ranks + r] = np.inf if wire is None else wire
    cost = np.zeros(columns)
    cost[-1] = 1
    answer = milp(
        cost,
        constraints=LinearConstraint(table.tocsr(), low, high),
        bounds=Bounds(np.zeros(columns), np.full(columns, np.inf)),
        integrality=np.ones(columns),
    )
    return None if answer.x is None else round(answer.fun)


def milp_wired(
    problem: Problem, expert_J: np.ndarray, rank_J: np.ndarray, wire: int | None, weight: float = 0.0
) -> float | None:
    """Least max over ranks of max(load, weight * entering rows) over whole kept and local pairs; None: infeasible.

    Of q[e] kept pairs at most C[d, e] q[e] / n[e] wait on rank d itself; what d runs beyond them enters it.
    """
    instances, experts, ranks = expert_J.size, problem.topology.experts, problem.topology.ranks
    own_J, counts_E = problem.counts_RE[rank_J, expert_J], problem.counts_E
    on_rank, of_expert = (
        np.equal.outer(np.arange(ranks), rank_J),
        np.equal.outer(np.arange(experts), expert_J),
    )
    none, peak = np.zeros((ranks, instances)), np.ones((ranks, 1))
    local = np.hstack([-own_J[:, None] * of_expert[expert_J], np.diag(counts_E[expert_J])])
    blocks = [
        (np.hstack([of_expert, np.zeros((experts, instances + 1))]), problem.floor_E, counts_E),
        (
            np.hstack([np.ones(instances), np.zeros(instances + 1)])[None],
            problem.pairs - problem.drop_cap,
            np.inf,
        ),
        (np.hstack([on_rank, none, -peak]), -np.inf, 0),
        (np.hstack([on_rank, -1.0 * on_rank, 0 * peak]), -np.inf, np.inf if wire is None else wire),
        (np.hstack([weight * on_rank, -weight * on_rank, -peak]), -np.inf, 0),
        (np.hstack([-np.eye(instances), np.eye(instances), np.zeros((instances, 1))]), -np.inf, 0),
        (np.hstack([local, np.zeros((instances, 1))]), -np.inf, 0),
    ]
    whole = np.append(np.ones(2 * instances), 0)
    answer = milp(
        1 - whole,
        constraints=[LinearConstraint(*block) for block in blocks],
        bounds=Bounds(0, np.inf),
        integrality=whole,
        options={"time_limit": 2},
    )
    if answer.status == 1:  # undecided: this example says nothing
        reject()
    return None if answer.x is None else float(answer.fun)


def fewest_moves(expert_J: np.ndarray, rank_J: np.ndarray, stay_J: np.ndarray, level: int, ranks: int) -> int:
    """Fewest pairs that must leave their place for every rank to stay at `level`: minimum-cost flow as an LP."""
    instances, experts = expert_J.size, int(expert_J.max()) + 1
    equal = lil_matrix((experts, 2 * instances))
    below = lil_matrix((ranks + instances, 2 * instances))
    pairs_E = np.bincount(expert_J, stay_J, minlength=experts)
    for j, (e, r) in enumerate(zip(expert_J.tolist(), rank_J.tolist(), strict=True)):
        equal[e, j] = below[r, j] = below[ranks + j, j] = 1
        below[ranks + j, instances + j] = -1  # pairs beyond those that stayed are moved in
    cost = np.concatenate([np.zeros(instances), np.ones(instances)])
    limit = np.concatenate([np.full(ranks, level), stay_J])
    answer = linprog(cost, A_ub=below.tocsr(), b_ub=limit, A_eq=equal.tocsr(), b_eq=pairs_E, method="highs")
    assert answer.status == 0, answer.message
    return round(answer.fun)


def milp_placement(counts_E: np.ndarray, ranks: int, slots: int, charge: int = 0) -> float:
    """Least peak (charges included) of any placement with `slots` foreign experts a rank, proven to 0.01 %."""
    experts = counts_E.size
    pairs, columns = experts * ranks, 2 * experts * ranks + 1
    home = np.arange(experts) // (experts // ranks)
    table = lil_matrix((experts + pairs + 2 * ranks, columns))
    low, high = np.full(table.shape[0], -np.inf), np.zeros(table.shape[0])
    low[:experts] = high[:experts] = counts_E
    high[experts + pairs + ranks :] = slots
    for e, d in itertools.product(range(experts), range(ranks)):
        column, row = e * ranks + d, experts + e * ranks + d
        table[e, column] = table[row, column] = table[experts + pairs + d, column] = 1
        table[row, pairs + column] = -float(counts_E[e])
        if home[e] != d:
            table[experts + pairs + d, pairs + column] = charge
            table[experts + pairs + ranks + d, pairs + column] = 1
    table[experts + pairs : experts + pairs + ranks, columns - 1] = -1
    cost, whole = np.zeros(columns), np.zeros(columns)
    cost[-1], whole[pairs : 2 * pairs] = 1, 1
    least, most = np.zeros(columns), np.full(columns, np.inf)
    most[pairs : 2 * pairs] = 1
    least[pairs + np.arange(experts) * ranks + home] = 1
    answer = milp(
        cost,
        constraints=LinearConstraint(table.tocsr(), low, high),
        bounds=Bounds(least, most),
        integrality=whole,
        options={"mip_rel_gap": 1e-4, "time_limit": 20},
    )
    assert answer.status == 0, answer.message
    return float(answer.fun)


Case = tuple[np.ndarray, np.ndarray, np.ndarray, int]


def case_of(kind: str, rng: np.random.Generator, *, max_ranks: int = 8, scale: float = 20.0) -> Case:
    """(expert_J, rank_J, stay_J, ranks) of a named shape (KINDS), with empty experts and ranks."""
    ranks = int(rng.integers(1, max_ranks + 1))
    if kind == "random":
        hosted = rng.random((ranks * int(rng.integers(1, 5)), ranks)) < rng.choice([0.1, 0.3, 0.6])
        hosted[np.arange(hosted.shape[0]), rng.integers(0, ranks, hosted.shape[0])] = True
    elif kind in ("chain", "ring"):
        hosted = np.eye(ranks, dtype=bool) | np.eye(ranks, k=1, dtype=bool)
        hosted[-1, 0] |= kind == "ring"
    elif kind == "nested":
        hosted = np.tri(ranks, dtype=bool)[rng.permutation(ranks)]
    else:  # a star: everyone shares one hub
        hosted = np.eye(ranks, dtype=bool)
        hosted[:, int(rng.integers(ranks))] = True
    pairs_E = rng.poisson(
        scale * rng.lognormal(0, 1.5, hosted.shape[0]) * (rng.random(hosted.shape[0]) < 0.85)
    )
    expert_J, rank_J = np.nonzero(hosted)
    stay_J = np.zeros(expert_J.size, dtype=np.int64)
    for e, pairs in enumerate(pairs_E):
        mine = np.flatnonzero(expert_J == e)
        share = rng.dirichlet(np.full(mine.size, 0.4)) if rng.random() < 0.8 else np.eye(mine.size)[0]
        stay_J[mine] = rng.multinomial(pairs, share)
    order = np.lexsort((expert_J, rank_J))
    return expert_J[order], rank_J[order], stay_J[order], ranks


KINDS = ("random", "chain", "ring", "nested", "star")


@st.composite
def routing_cases(draw: st.DrawFn, *, max_ranks: int = 8, scale: float = 20.0) -> Case:
    """Cases of every kind."""
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 2**32 - 1))
    return case_of(kind, np.random.default_rng(seed), max_ranks=max_ranks, scale=scale)
