"""Problems and variants that the policies' tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lrmoe.planning import LayerPlan, Problem, Topology, get_policy
from lrmoe.planning.policies import EPLB, LLEP, FasterMoE, FlexMoE, Laer, SmartMoE, Symi, TopoEP, UltraEP
from lrmoe.planning.problem import History, IntArray
from lrmoe.simulate.generators import generate

CURRENT = ("megatron", "fastermoe", "ultraep", "topoep", "llep")
PAST = ("flexmoe", "smartmoe", "symi", "laer", "eplb")

# Every policy, and the options that change what it does; intervals of 1 so that short runs see every step.
VARIANTS: dict[str, Callable[[Problem], LayerPlan]] = {
    **{name: get_policy(name) for name in (*CURRENT, *PAST)},
    "fastermoe code": FasterMoE(rule="code"),
    "fastermoe limited": FasterMoE(max_shadows=1),
    "flexmoe laer": FlexMoE(variant="laer", interval=1, threshold=1.0),
    "flexmoe pack": FlexMoE(variant="pack", interval=1, threshold=1.0, sync_seconds=0.0),
    "smartmoe often": SmartMoE(interval=1),
    "symi capacity": Symi(capacity_factor=1.0),
    "laer kept": Laer(regather=False),
    "ultraep quota_prop": UltraEP(split="quota_prop", confine=False, allow_zero_master=True),
    "topoep two": TopoEP(cross_cost=2.0, iterations=5),
    "eplb global": EPLB(mode="global", interval=1),
    "eplb hierarchical": EPLB(groups=2, interval=1),
    "llep limited": LLEP(slots=1, min_tokens=8, threshold=1.0),
    "llep experts": LLEP(test="expert", alpha=1.1, min_tokens=0),
}


@dataclass(frozen=True)
class Shape:
    ranks: int
    experts: int
    ranks_per_node: int | None = None


SHAPES = (Shape(8, 32, 4), Shape(4, 8), Shape(6, 6, 2), Shape(1, 4))


def ask(
    counts: object, *, ranks_per_node: int | None = None, past: object = None, **options: object
) -> Problem:
    """A problem from a table of counts; `past` is the table of the call before, the first of the layer."""
    table = np.asarray(counts, dtype=np.int64)
    if past is not None:
        options["history"] = History(counts=(np.asarray(past, dtype=np.int64),), step=1)
    return Problem(
        counts_RE=table,
        topology=Topology(ranks=table.shape[0], experts=table.shape[1], ranks_per_node=ranks_per_node),
        **options,  # type: ignore[arg-type]
    )


def loads(load_E: object, ranks: int) -> IntArray:
    """Counts whose sums over sources are `load_E`, spread over the sources as evenly as whole pairs allow."""
    load = np.asarray(load_E, dtype=np.int64)
    return load // ranks + (np.arange(ranks)[:, None] < load % ranks)


def series(name: str, shape: Shape, *, steps: int, seed: int = 0, tokens: int = 200) -> IntArray:
    """Counts of a named generator, (steps, R, E)."""
    return generate(
        name,
        ranks=shape.ranks,
        experts=shape.experts,
        top_k=min(4, shape.experts),
        tokens=tokens,
        seed=seed,
        steps=steps,
    )


def run(
    policy: Callable[[Problem], LayerPlan], counts: IntArray, shape: Shape, slots: int
) -> list[tuple[Problem, LayerPlan]]:
    """Plan consecutive calls, each with the history of those before it."""
    topology = Topology(ranks=shape.ranks, experts=shape.experts, ranks_per_node=shape.ranks_per_node)
    slots = min(slots, shape.experts - topology.experts_per_rank)
    done: list[tuple[Problem, LayerPlan]] = []
    history = History()
    for step, table in enumerate(counts):
        problem = Problem(counts_RE=table, topology=topology, slots=slots, history=history)
        plan = policy(problem)
        done.append((problem, plan))
        history = replace(history, counts=(*history.counts, table), previous=plan, step=step + 1)
    return done


def copies(plan: LayerPlan) -> IntArray:
    """Slots of every rank that hold every expert, int64 (R, E)."""
    table = np.zeros((plan.topology.ranks, plan.topology.experts), dtype=np.int64)
    table[plan.instance_rank_J, plan.instance_expert_J] = 1 if plan.copies_J is None else plan.copies_J
    return table


def peak(plan: LayerPlan) -> float:
    """Most loaded rank over the mean."""
    return float(plan.forward_load_R.max() * plan.topology.ranks / plan.pairs)
