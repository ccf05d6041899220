"""What history-based policies know of calls that are not executed: they plan through every step of a trajectory.

A stage executes every tenth step. A policy that plans from the past would take the call ten steps ago for the last one;
here it is shown the counts of every step, and the plan it would have made for the step before.

Shape letters: S steps, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lrmoe.layer.past import PastCalls
from lrmoe.planning import LayerPlan, Problem
from lrmoe.planning.policies import Policy
from lrmoe.planning.problem import History, IntArray


class EveryStep:
    """A policy of one layer that plans as if every step before had been executed.

    Args:
        policy: of the system. name: the system's policy, as in the configuration.
        counts_SRE: int64 (S, R, E), counts of every step, from step 1 on.
        problem: the question put at a step, from its counts.

    Attributes:
        previous: the plan of the step before the prepared one, or None.
    """

    def __init__(
        self, policy: Policy, name: str, counts_SRE: IntArray, problem: Callable[[IntArray], Problem]
    ) -> None:
        self._policy, self._counts_SRE, self._problem = policy, counts_SRE, problem
        self._past = PastCalls(name)
        self._planned = 0
        self._history: History | None = None
        self.previous: LayerPlan | None = None

    def prepare(self, step: int) -> None:
        """Plan the steps up to the one before `step`; outside the clock.

        Raises:
            ValueError: a step before one that was prepared.
        """
        if step <= self._planned:
            raise ValueError(f"step={step}: steps up to {self._planned} are planned already")
        while self._planned < step - 1:
            problem = self._problem(self._counts_SRE[self._planned])
            self.previous = self._policy(replace(problem, history=self._past.history()))
            self._past.add(self.previous)
            self._planned += 1
        self._history = self._past.history()

    def __call__(self, problem: Problem) -> LayerPlan:
        """Plan the prepared step."""
        return self._policy(replace(problem, history=self._history))
