"""Splitters: exact sums where promised, and the local share against maximum flow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.planning import split
from tests.planning.oracles import max_flow

MODEST = settings(deadline=None, max_examples=300, derandomize=True)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Counts per source, hosts, quotas of the same sum, nodes."""
    per_node, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = per_node * nodes
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = rng.poisson(draw(st.sampled_from([0.3, 5, 10**6])), ranks) * (rng.random(ranks) < 0.8)
    hosts = np.sort(rng.choice(ranks, draw(st.integers(1, ranks)), replace=False))
    quota = rng.multinomial(int(counts.sum()), rng.dirichlet(np.full(hosts.size, 0.7)))
    return counts.astype(np.int64), hosts, quota.astype(np.int64), np.arange(ranks) // per_node


def inside(counts: np.ndarray, group_R: np.ndarray, hosts: np.ndarray, quota: np.ndarray) -> int:
    """Most pairs that can stay inside their group, by maximum flow over allowed (source, instance) arcs."""
    ranks, instances = counts.size, hosts.size
    arcs = [(0, 1 + r, int(c)) for r, c in enumerate(counts)]
    arcs += [
        (1 + r, 1 + ranks + j, int(counts[r]))
        for r in range(ranks)
        for j, host in enumerate(hosts)
        if group_R[host] == group_R[r]
    ]
    arcs += [(1 + ranks + j, 1 + ranks + instances, int(q)) for j, q in enumerate(quota)]
    return max_flow(arcs, 2 + ranks + instances)


@MODEST
@given(cases())
def test_local_node_rest_is_exact_and_stays_nearest(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    counts, hosts, quota, node = case
    share = split.local_node_rest(counts, hosts, quota, node)
    assert share.dtype == np.int64
    assert (share >= 0).all()
    assert np.array_equal(share.sum(axis=1), counts)
    assert np.array_equal(share.sum(axis=0), quota)
    for group in (np.arange(counts.size), node):
        same = group[hosts][None, :] == group[:, None]
        assert int(share[same].sum()) == inside(counts, group, hosts, quota)


@MODEST
@given(cases())
def test_every_splitter_keeps_row_sums(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    counts, hosts, quota, node = case
    results = {
        "even": split.even(counts, hosts.size),
        "still": split.even(counts, hosts.size, rotate=False),
        "node_even": split.node_even(counts, hosts, node),
        "quota_prop": split.quota_prop(counts, quota),
        "interval": split.interval(counts, quota),
        "local_first": split.local_first(counts, hosts, quota),
    }
    for name, share in results.items():
        assert share.dtype == np.int64, name
        assert share.min(initial=0) >= 0, name
        assert np.array_equal(share.sum(axis=1), counts), name
    assert np.array_equal(results["interval"].sum(axis=0), quota)
    assert np.abs(results["quota_prop"].sum(axis=0) - quota).max() <= counts.size
    assert np.ptp(results["even"], axis=1).max() <= 1
    local = results["local_first"][hosts, np.arange(hosts.size)]
    assert (local >= np.minimum(counts[hosts], quota)).all()


@MODEST
@given(cases())
def test_bfs_dfs_fills_its_slots_and_leaves_the_rest(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    counts, _, quota, _ = case
    share = split.bfs_dfs(counts, quota[:-1])
    assert (share >= 0).all()
    assert (share.sum(axis=1) <= counts).all()
    assert np.array_equal(share.sum(axis=0), quota[:-1])
    assert (share >= counts[:, None] * quota[:-1] // max(int(counts.sum()), 1)).all()


@MODEST
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_all_experts_at_once_equals_one_by_one(seed: int, ranks: int, local: int, nodes: bool) -> None:
    rng = np.random.default_rng(seed)
    experts = ranks * local
    counts = rng.poisson(rng.lognormal(1, 1, (ranks, experts)))
    hosted = rng.random((ranks, experts)) < 0.3
    hosted[np.arange(experts) // local, np.arange(experts)] = True
    rank_J, expert_J = np.nonzero(hosted)
    pairs_J = np.zeros(rank_J.size, dtype=np.int64)
    for e in range(experts):
        mine = np.flatnonzero(expert_J == e)
        pairs_J[mine] = rng.multinomial(int(counts[:, e].sum()), rng.dirichlet(np.ones(mine.size)))
    node = np.arange(ranks) // 2 if nodes else np.zeros(ranks, dtype=np.int64)
    together = split.split_instances(counts, expert_J, rank_J, pairs_J, node)
    for e in range(experts):
        mine = np.flatnonzero(expert_J == e)
        alone = split.local_node_rest(counts[:, e], rank_J[mine], pairs_J[mine], node)
        assert np.array_equal(together[:, mine], alone)


def test_the_toy_splits_by_hand() -> None:
    assert split.even([5, 5], 2).tolist() == [[3, 2], [2, 3]]
    assert split.even([5, 5], 2, rotate=False).tolist() == [[3, 2], [3, 2]]
    assert split.node_even([4, 4, 4], [0, 2], [0, 0, 1]).tolist() == [[4, 0], [4, 0], [0, 4]]
    assert split.quota_prop([10], [1, 2]).tolist() == [[3, 7]]
    assert split.interval([3, 4], [5, 2]).tolist() == [[3, 0], [2, 2]]
    assert split.local_first([4, 6], [0, 1], [7, 3]).tolist() == [[4, 0], [3, 3]]
    assert split.local_node_rest([4, 6], [0, 1], [7, 3], [0, 0]).tolist() == [[4, 0], [3, 3]]
    assert split.bfs_dfs([4, 6], [5]).tolist() == [[2], [3]]


def test_huge_counts_do_not_wrap() -> None:
    share = split.quota_prop([2**40, 3], [2**40, 2**41])
    assert share.sum(axis=1).tolist() == [2**40, 3]
    assert abs(int(share[0, 1]) - 2**41 // 3) <= 1
    assert split.bfs_dfs([2**40, 2**40], [2**40]).sum() == 2**40


def test_sums_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="sums to 3 and quota_J to 4"):
        split.local_node_rest([1, 2], [0, 1], [2, 2], [0, 0])
