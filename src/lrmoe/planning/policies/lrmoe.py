"""LRMoE: experts at home, quotas that lower the most loaded rank first (current counts; score history where known)."""

from __future__ import annotations

from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import Problem
from lrmoe.planning.quotas import home_quotas


def plan(problem: Problem) -> LayerPlan:
    """Least backward peak under the drop cap, then least loss. This version places no replicas."""
    quota_E = home_quotas(problem)
    dropped = int(quota_E.sum()) < problem.pairs
    return LayerPlan.at_home(problem, quota_E, problem.drop if dropped else "off")
