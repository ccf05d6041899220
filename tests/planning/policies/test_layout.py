"""Shared parts: even spreading over copies equals the slot-by-slot splitters, layouts, options, calls that are due."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.errors import PlanError
from lrmoe.planning import Topology
from lrmoe.planning.policies import EPLB, LLEP, FasterMoE, FlexMoE, Laer, SmartMoE, Symi, TopoEP, UltraEP
from lrmoe.planning.policies._layout import due, even_layout, home_layout, slot_loads, split_evenly
from lrmoe.planning.problem import History
from lrmoe.planning.split import even, node_even
from tests.planning.policies.helpers import ask


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_even_spreading_equals_the_splitters_over_slots(seed: int, by_node: bool) -> None:
    rng = np.random.default_rng(seed)
    nodes, inside, experts = rng.integers(1, 4), rng.integers(1, 4), rng.integers(1, 6)
    ranks = int(nodes * inside)
    node_R = np.repeat(np.arange(nodes), inside)
    copies_RE = rng.integers(0, 3, (ranks, experts)) * (rng.random((ranks, experts)) < 0.6)
    copies_RE[rng.integers(ranks), copies_RE.sum(axis=0) == 0] = 1
    counts_RE = rng.integers(0, 40, (ranks, experts))
    found = split_evenly(counts_RE, copies_RE, node_R if by_node else None)
    rank_J, expert_J = np.nonzero(copies_RE)
    for expert in range(experts):
        hosts_C = np.repeat(np.arange(ranks), copies_RE[:, expert])
        counts_R = counts_RE[:, expert]
        slots_RC = node_even(counts_R, hosts_C, node_R) if by_node else even(counts_R, hosts_C.size)
        for j in np.flatnonzero(expert_J == expert):
            assert np.array_equal(found[:, j], slots_RC[:, hosts_C == rank_J[j]].sum(axis=1))


@pytest.mark.parametrize(("ranks", "experts"), [(1, 4), (2, 4), (4, 4), (4, 12), (8, 32)])
def test_even_layouts_fill_every_slot_with_distinct_and_equally_many_experts(
    ranks: int, experts: int
) -> None:
    topology = Topology(ranks=ranks, experts=experts)
    n = experts // ranks
    for slots in range(experts - n + 1):
        copies_RE = even_layout(topology, slots)
        assert (copies_RE >= home_layout(topology)).all()
        assert copies_RE.max() == 1
        assert (copies_RE.sum(axis=1) == n + slots).all()
        assert np.ptp(copies_RE.sum(axis=0)) <= 1


def test_loads_of_slots_round_up() -> None:
    copies_RE = np.array([[2, 0], [1, 1]])
    assert slot_loads(np.array([10, 3]), copies_RE).tolist() == [7, 4 + 3]


@pytest.mark.parametrize(
    ("interval", "first", "steps"), [(3, 1, [1, 4, 7, 10]), (10, 10, [10]), (1, 1, list(range(1, 11)))]
)
def test_calls_that_are_due(interval: int, first: int, steps: list[int]) -> None:
    found = [step for step in range(11) if due(ask([[1]], history=History(step=step)), interval, first=first)]
    assert found == steps


BAD: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (FasterMoE, {"rule": "both"}, "rule='both'"),
    (FasterMoE, {"bandwidth": 0.0}, "bandwidth=0.0"),
    (FasterMoE, {"flops": float("nan")}, "flops=nan"),
    (FasterMoE, {"max_shadows": -1}, "max_shadows=-1"),
    (FlexMoE, {"variant": "other"}, "variant='other'"),
    (FlexMoE, {"threshold": 0.9}, "threshold=0.9"),
    (FlexMoE, {"interval": 0}, "interval=0"),
    (FlexMoE, {"sync_seconds": -1.0}, "sync_seconds=-1.0"),
    (FlexMoE, {"pair_seconds": 0.0}, "pair_seconds=0.0"),
    (SmartMoE, {"interval": 0}, "interval=0"),
    (SmartMoE, {"window": 0}, "window=0"),
    (Symi, {"slots_per_rank": 0}, "slots_per_rank=0"),
    (Symi, {"capacity_factor": 0.0}, "capacity_factor=0.0"),
    (Laer, {"intra_bandwidth": -1.0}, "intra_bandwidth=-1.0"),
    (UltraEP, {"balance_threshold": 0.5}, "balance_threshold=0.5"),
    (UltraEP, {"min_tokens_per_replica": 0}, "min_tokens_per_replica=0"),
    (UltraEP, {"split": "even"}, "split='even'"),
    (TopoEP, {"cross_cost": 0.5}, "cross_cost=0.5"),
    (TopoEP, {"iterations": 0}, "iterations=0"),
    (EPLB, {"mode": "flat"}, "mode='flat'"),
    (EPLB, {"groups": 0}, "groups=0"),
    (EPLB, {"window": 0}, "window=0"),
    (LLEP, {"alpha": 0.0}, "alpha=0.0"),
    (LLEP, {"threshold": -0.1}, "threshold=-0.1"),
    (LLEP, {"test": "mean"}, "test='mean'"),
    (LLEP, {"min_tokens": -1}, "min_tokens=-1"),
    *((policy, {"slots": -1}, "slots=-1") for policy in (FlexMoE, Laer, UltraEP, TopoEP, EPLB, LLEP)),
    *((policy, {"slots": 1.5}, "slots=1.5") for policy in (FlexMoE, Laer, UltraEP, TopoEP, EPLB, LLEP)),
]


@pytest.mark.parametrize(
    ("policy", "options", "message"), BAD, ids=lambda value: getattr(value, "__name__", None)
)
def test_bad_options_are_named(policy: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=f"{message}: must be"):
        policy(**options)


def test_options_that_contradict_the_layout_are_named() -> None:
    problem = ask(np.ones((2, 8)), past=np.ones((2, 8)), ranks_per_node=1)
    with pytest.raises(PlanError, match=r"slots_per_rank=3: must be at least experts / ranks = 4"):
        Symi(slots_per_rank=3)(problem)
    with pytest.raises(PlanError, match="groups=3: must divide experts=8"):
        EPLB(groups=3)(problem)
    with pytest.raises(PlanError, match="groups=1: mode='hierarchical' needs a multiple of nodes=2"):
        EPLB(mode="hierarchical")(problem)
    with pytest.raises(TypeError):
        UltraEP(2)  # type: ignore[call-arg]
