"""Which source sends how many pairs to which instance of one expert: the splitters that systems differ by.

Every function handles one expert: counts_R[r] pairs of it wait on source rank r, and instance j lives on rank
hosts_J[j] and should run quota_J[j] pairs. All return int64 (R, J) with exact row sums unless said otherwise.
`split_instances` does `local_node_rest` for all experts of a plan at once.

Shape letters: R ranks, E experts, J instances.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from lrmoe.planning.problem import IntArray

_WIDE = 2**62  # products beyond this are taken in Python integers


def even(counts_R: ArrayLike, instances: int, rotate: bool = True) -> IntArray:
    """Every source spreads its pairs evenly; single pairs that remain go to the first instances.

    With `rotate`, source r starts at instance r mod J, so that not all sources favour the first one.
    """
    counts = _vector(counts_R)
    base, extra = np.divmod(counts, instances)
    start = np.arange(counts.size) if rotate else np.zeros(counts.size, dtype=np.int64)
    turn = (np.arange(instances) - start[:, None]) % instances
    return base[:, None] + (turn < extra[:, None])


def node_even(counts_R: ArrayLike, hosts_J: ArrayLike, node_R: ArrayLike) -> IntArray:
    """Every source spreads evenly over the instances of its own node, over all of them where its node has none."""
    counts, hosts, node = _vector(counts_R), _vector(hosts_J), _vector(node_R)
    result = np.zeros((counts.size, hosts.size), dtype=np.int64)
    for one in np.unique(node):
        sources, inside = np.flatnonzero(node == one), np.flatnonzero(node[hosts] == one)
        chosen = inside if inside.size else np.arange(hosts.size)
        base, extra = np.divmod(counts[sources], chosen.size)
        turn = (np.arange(chosen.size) - sources[:, None]) % chosen.size
        result[np.ix_(sources, chosen)] = base[:, None] + (turn < extra[:, None])
    return result


def quota_prop(counts_R: ArrayLike, quota_J: ArrayLike) -> IntArray:
    """Every source splits in proportion to the quotas, by largest remainder (ties: lower instance).

    Rounded per source, so column sums can miss the quotas by a few pairs. Quotas that are all zero count as equal.
    """
    counts, quota = _vector(counts_R), _vector(quota_J)
    if not quota.any():
        quota = np.ones_like(quota)
    wide = (int(counts.max(initial=0)) + 1) * (int(quota.max(initial=0)) + 1) >= _WIDE
    product = counts.astype(object)[:, None] * quota if wide else counts[:, None] * quota
    total = int(quota.sum())
    result, fraction = (product // total).astype(np.int64), product % total
    order = np.argsort(-fraction, axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(quota.size), order.shape), axis=1)
    return result + (place < (counts - result.sum(axis=1))[:, None])


def interval(counts_R: ArrayLike, quota_J: ArrayLike) -> IntArray:
    """Sources and instances laid end to end on one line: entry (r, j) is the overlap of their intervals.

    Row and column sums are exact where both sides have one sum; else the longer side keeps its surplus.
    """
    counts, quota = _vector(counts_R), _vector(quota_J)
    end_R, end_J = np.cumsum(counts), np.cumsum(quota)
    high = np.minimum(end_R[:, None], end_J)
    low = np.maximum((end_R - counts)[:, None], end_J - quota)
    return np.maximum(high - low, 0)


def local_first(counts_R: ArrayLike, hosts_J: ArrayLike, quota_J: ArrayLike) -> IntArray:
    """Local pairs first, the rest of each source in proportion to what the other instances still lack.

    Rounded per source, as published: column sums can miss the quotas by a few pairs.
    """
    left, hosts = _vector(counts_R).copy(), _vector(hosts_J)
    lack = _vector(quota_J).copy()
    result = np.zeros((left.size, hosts.size), dtype=np.int64)
    for j, host in enumerate(hosts):
        taken = min(left[host], lack[j])
        result[host, j] = taken
        left[host] -= taken
        lack[j] -= taken
    guests = np.flatnonzero((left > 0) & ~np.isin(np.arange(left.size), hosts))
    result[guests] = quota_prop(left[guests], lack)
    for source in np.unique(hosts[left[hosts] > 0]):
        elsewhere = np.flatnonzero(hosts != source)
        others = elsewhere if elsewhere.size else np.arange(hosts.size)
        result[source, others] += quota_prop(left[source : source + 1], lack[others])[0]
    return result


def local_node_rest(
    counts_R: ArrayLike, hosts_J: ArrayLike, quota_J: ArrayLike, node_R: ArrayLike
) -> IntArray:
    """Pairs whose source is the instance's rank first, then those of its node, then the rest, by overlapping intervals.

    Row and column sums are exact. The local share sum_j min(counts[host j], quota j) and the share that stays inside
    its node are the largest of any split: each is bounded by what the rank (the node) sends and takes, and reached.

    Raises:
        ValueError: counts and quotas have different sums.
    """
    counts, hosts, quota = _vector(counts_R), _vector(hosts_J), _vector(quota_J)
    if int(counts.sum()) != int(quota.sum()):
        raise ValueError(
            f"counts_R sums to {int(counts.sum())} and quota_J to {int(quota.sum())}: must be equal"
        )
    expert = np.zeros(hosts.size, dtype=np.int64)
    return split_instances(counts[:, None], expert, hosts, quota, _vector(node_R))


def bfs_dfs(counts_R: ArrayLike, slot_quota_J: ArrayLike) -> IntArray:
    """ECHO's split of what leaves home: proportional floors first, intervals for what remains.

    Quotas are those of the foreign slots alone; a row sums to at most the source's count, and the rest stays home.
    """
    counts, quota = _vector(counts_R), _vector(slot_quota_J)
    total = max(int(counts.sum()), 1)
    wide = (int(counts.max(initial=0)) + 1) * (int(quota.max(initial=0)) + 1) >= _WIDE
    product = counts.astype(object)[:, None] * quota if wide else counts[:, None] * quota
    first = (product // total).astype(np.int64)
    return first + interval(counts - first.sum(axis=1), quota - first.sum(axis=0))


def split_instances(
    counts_RE: IntArray, expert_J: IntArray, rank_J: IntArray, pairs_J: IntArray, node_R: IntArray
) -> IntArray:
    """`local_node_rest` for every expert of a plan at once, int64 (R, J).

    Args:
        counts_RE: int64 (R, E). expert_J, rank_J: int64 (J,), every expert with pairs has an instance.
        pairs_J: int64 (J,), pairs each instance runs; per expert their sum is the expert's count.
        node_R: int64 (R,), non-decreasing.
    """
    several = np.bincount(expert_J, minlength=counts_RE.shape[1])[expert_J] > 1
    if not several.any():
        return np.take(counts_RE, expert_J, axis=1)
    result = np.empty((counts_RE.shape[0], expert_J.size), dtype=np.int64)
    result[:, np.flatnonzero(~several)] = np.take(counts_RE, expert_J[~several], axis=1)
    result[:, np.flatnonzero(several)] = _split_shared(
        counts_RE, expert_J[several], rank_J[several], pairs_J[several], node_R
    )
    return result


def _split_shared(
    counts_RE: IntArray, expert_J: IntArray, rank_J: IntArray, pairs_J: IntArray, node_R: IntArray
) -> IntArray:
    experts, column_J = np.unique(expert_J, return_inverse=True)
    left_RE = np.take(counts_RE, experts, axis=1)
    local_J = np.minimum(left_RE[rank_J, column_J], pairs_J)
    left_RE[rank_J, column_J] -= local_J
    lack_J = pairs_J - local_J
    near = node_R[-1] != node_R[0]
    if near:
        source_SJ, near_SJ = _overlap_in_nodes(left_RE, column_J, rank_J, lack_J, node_R)
        np.subtract.at(left_RE, (source_SJ, column_J), near_SJ)
        lack_J = lack_J - near_SJ.sum(axis=0)
    start_J = _starts(column_J, lack_J)
    end_RE = np.cumsum(left_RE, axis=0)
    reached = np.take(end_RE, column_J, axis=1)
    np.clip(reached, start_J, start_J + lack_J, out=reached)
    result = np.empty_like(reached)
    result[0] = reached[0] - start_J
    np.subtract(reached[1:], reached[:-1], out=result[1:])
    if near:
        np.add.at(result, (source_SJ, np.arange(rank_J.size)), near_SJ)
    result[rank_J, np.arange(rank_J.size)] += local_J
    return result


def _overlap_in_nodes(
    left_RE: IntArray, column_J: IntArray, rank_J: IntArray, lack_J: IntArray, node_R: IntArray
) -> tuple[IntArray, IntArray]:
    """Overlaps of sources and instances of the same node: every node has a stretch of the line for itself.

    Returns the S ranks of each instance's node and their overlaps, int64 (S, J) each.
    """
    nodes, experts = int(node_R[-1]) + 1, left_RE.shape[1]
    first_N = np.searchsorted(node_R, np.arange(nodes))
    sent_NE = np.add.reduceat(left_RE, first_N, axis=0)
    taken_NE = np.zeros((nodes, experts), dtype=np.int64)
    np.add.at(taken_NE, (node_R[rank_J], column_J), lack_J)
    room_NE = np.maximum(sent_NE, taken_NE)
    offset_NE = np.cumsum(room_NE, axis=0) - room_NE
    before_NE = np.cumsum(sent_NE, axis=0) - sent_NE
    end_RE = np.cumsum(left_RE, axis=0) + (offset_NE - before_NE)[node_R]
    start_J = _starts(column_J * nodes + node_R[rank_J], lack_J) + offset_NE[node_R[rank_J], column_J]
    size_N, node_J = np.bincount(node_R, minlength=nodes), node_R[rank_J]
    turn_S = np.arange(int(size_N.max()))[:, None]
    there_SJ = turn_S < size_N[node_J]  # smaller nodes have fewer sources
    source_SJ = np.where(there_SJ, first_N[node_J] + turn_S, 0)
    end_SJ = end_RE[source_SJ, column_J]
    high = np.minimum(end_SJ, start_J + lack_J)
    low = np.maximum(end_SJ - left_RE[source_SJ, column_J], start_J)
    return source_SJ, np.where(there_SJ, np.maximum(high - low, 0), 0)


def _starts(key_J: IntArray, length_J: IntArray) -> IntArray:
    """Start of each stretch when stretches of one key are laid end to end in the order given."""
    order = np.argsort(key_J, kind="stable")
    key, length = key_J[order], length_J[order]
    before = np.cumsum(length) - length
    first = np.concatenate(([True], key[1:] != key[:-1]))
    base = before[first][np.cumsum(first) - 1]
    result = np.empty_like(length_J)
    result[order] = before - base
    return result


def _vector(values: ArrayLike) -> IntArray:
    return np.asarray(values, dtype=np.int64)
