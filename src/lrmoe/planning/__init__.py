"""The control plane: which instances exist, who sends what where, how many pairs of each expert backward keeps.

NumPy and integers only: no torch, no process groups, no clocks. A plan is a pure function of its Problem.
"""

from lrmoe.planning.memory import Execution, ExpertShape, predict_bytes
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.policies import Policy, get_policy, policy_info
from lrmoe.planning.problem import Problem, Topology
from lrmoe.planning.quotas import fewest_drops, fill, split_quota

__all__ = [
    "Execution",
    "ExpertShape",
    "LayerPlan",
    "Policy",
    "Problem",
    "Topology",
    "fewest_drops",
    "fill",
    "get_policy",
    "policy_info",
    "predict_bytes",
    "split_quota",
]
