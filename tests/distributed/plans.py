"""Legal plans that no policy would make, drawn from a seed: copies anywhere, homes left empty, any split, any way back.

Shape letters: R ranks, E experts, J instances.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from lrmoe.planning import LayerPlan, Problem, get_policy
from lrmoe.planning.problem import IntArray

Holds = np.ndarray  # bool (E, R): which rank holds which expert
LAYOUTS = ("few", "many", "home and more", "everywhere", "one rank", "moved", "shifted", "home")
WAYS_BACK = ("home", "any", "away", "one")


@dataclasses.dataclass(kw_only=True)
class Crafted:
    """A policy that draws a plan from `seed`; set another seed between two calls.

    Attributes:
        layout: a name of LAYOUTS, or None to draw it. back: a name of WAYS_BACK, or None to draw it.
        chunks: most parts of a pass. drop: "any" quotas within the cap, "all" of the cap, or the "floor" on rank 0.
        calls: how often it was asked.
    """

    seed: int = 0
    layout: str | None = None
    back: str | None = None
    chunks: int = 7
    recompute: bool | None = None
    drop: str = "any"
    calls: int = 0
    last: LayerPlan | None = None

    def __call__(self, problem: Problem) -> LayerPlan:
        """A legal plan; the same on every rank."""
        rng = np.random.default_rng([self.seed, 7])
        layout = self.layout or LAYOUTS[self.seed % len(LAYOUTS)]
        back = self.back or WAYS_BACK[(self.seed // len(LAYOUTS)) % len(WAYS_BACK)]
        holds_ER = _layout(layout, problem, rng)
        rank_J, expert_J = np.nonzero(holds_ER.T)
        assign_RJ = _split_counts(problem.counts_RE, rank_J, expert_J, rng)
        quota_E = _quotas(problem, self.drop, rng)
        forward, backward = (int(n) for n in rng.integers(1, self.chunks + 1, size=2))
        plan = LayerPlan(
            topology=problem.topology,
            counts_RE=problem.counts_RE,
            instance_expert_J=expert_J.astype(np.int64),
            instance_rank_J=rank_J.astype(np.int64),
            assign_RJ=assign_RJ,
            quota_E=quota_E,
            reason="off" if problem.max_drop == 0 else "always",
            backward_J=_way_back(back, assign_RJ, quota_E, expert_J, rng),
            forward_chunks=forward if rng.random() < 0.5 else 1,
            backward_chunks=backward if rng.random() < 0.7 else 1,
            recompute=bool(rng.random() < 0.3) if self.recompute is None else self.recompute,
        )
        plan.check(problem)
        self.calls, self.last = self.calls + 1, plan
        return plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed:
    """A policy of one rank with given quotas: what the spread call must keep as well."""

    quota_E: IntArray

    def __call__(self, problem: Problem) -> LayerPlan:
        """Everything at home."""
        return LayerPlan.at_home(problem, self.quota_E, "always")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InParts:
    """Another policy's plans, run in parts or without a stash."""

    policy: Callable[[Problem], LayerPlan]
    forward: int = 1
    backward: int = 1
    recompute: bool = False

    def __call__(self, problem: Problem) -> LayerPlan:
        """The other policy's plan with the given chunks."""
        return dataclasses.replace(
            self.policy(problem),
            forward_chunks=self.forward,
            backward_chunks=self.backward,
            recompute=self.recompute,
        )


def unpriced(problem: Problem) -> LayerPlan:
    """This package's plan where copies cost nothing: at the sizes of tests they would never pay."""
    return get_policy("lrmoe")(dataclasses.replace(problem, copy_rows=0.0, cross_rows=0.0))


def _layout(name: str, problem: Problem, rng: np.random.Generator) -> Holds:
    """Bool (E, R) of a named layout; every expert lives somewhere."""
    topology = problem.topology
    shape, experts = (topology.experts, topology.ranks), np.arange(topology.experts)
    holds_ER = np.zeros(shape, dtype=np.bool_)
    if name in ("home", "home and more"):
        holds_ER[experts, topology.home_E] = True
    if name == "shifted":  # nobody at home
        holds_ER[experts, (topology.home_E + 1) % topology.ranks] = True
    if name in ("moved", "few", "many"):
        holds_ER[experts, rng.integers(0, topology.ranks, size=topology.experts)] = True
    if name in ("few", "many", "home and more"):
        holds_ER |= rng.random(shape) < (0.6 if name == "many" else 0.2)
    if name == "everywhere":
        holds_ER[:] = True
    if name == "one rank":
        holds_ER[:, int(rng.integers(0, topology.ranks))] = True
    return holds_ER


def _split(total: int, places: int, rng: np.random.Generator) -> IntArray:
    """A random division of a number: now even, now all to one place."""
    if places == 0:
        return np.zeros(0, dtype=np.int64)
    odds = rng.dirichlet(np.full(places, rng.choice([0.05, 1.0, 20.0])))
    return rng.multinomial(total, odds)


def _split_counts(
    counts_RE: IntArray, rank_J: IntArray, expert_J: IntArray, rng: np.random.Generator
) -> IntArray:
    """Every source's pairs of each expert over its instances, int64 (R, J)."""
    assign_RJ = np.zeros((counts_RE.shape[0], rank_J.size), dtype=np.int64)
    for expert in range(counts_RE.shape[1]):
        places = np.flatnonzero(expert_J == expert)
        for source in range(counts_RE.shape[0]):
            assign_RJ[source, places] = _split(int(counts_RE[source, expert]), places.size, rng)
    return assign_RJ


def _quotas(problem: Problem, drop: str, rng: np.random.Generator) -> IntArray:
    """Quotas between the floor and the counts, int64 (E,)."""
    slack_E = problem.counts_E - problem.floor_E
    if drop == "floor":
        slack_E = np.where(problem.topology.home_E == 0, slack_E, 0)
        assert int(slack_E.sum()) <= problem.drop_cap, "the case must allow one rank at its floors"
        return problem.counts_E - slack_E
    most = min(problem.drop_cap, int(slack_E.sum()))
    dropped = most if drop == "all" else int(rng.integers(0, most + 1))
    return problem.counts_E - rng.multivariate_hypergeometric(slack_E, dropped)


def _way_back(
    name: str, assign_RJ: IntArray, quota_E: IntArray, expert_J: IntArray, rng: np.random.Generator
) -> IntArray | None:
    """Kept pairs of each instance in backward: at home, anywhere, or where forward ran least, int64 (J,)."""
    if name == "home":
        return None
    found_J, load_J = np.zeros(expert_J.size, dtype=np.int64), assign_RJ.sum(axis=0)
    for expert, quota in enumerate(quota_E):
        places = np.flatnonzero(expert_J == expert)
        if name == "any":
            found_J[places] = _split(int(quota), places.size, rng)
        else:
            best = np.argmin(load_J[places]) if name == "away" else rng.integers(0, places.size)
            found_J[places[best]] = quota
    return found_J
