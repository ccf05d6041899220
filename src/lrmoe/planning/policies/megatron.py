"""Fixed expert ownership, as in Megatron-LM's dropless mode: every expert runs at home, nothing moves or is dropped."""

from __future__ import annotations

from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import Problem


def plan(problem: Problem) -> LayerPlan:
    """Every pair at home, every pair kept. No history, no decision."""
    return LayerPlan.at_home(problem, problem.counts_E, "off")
