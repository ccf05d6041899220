"""What a layer remembers of its past calls, for policies that plan from history. Never the current call."""

from __future__ import annotations

from collections import deque

from lrmoe.planning import LayerPlan, policy_info
from lrmoe.planning.problem import History, IntArray

_CALLS = 16  # more than any policy's window


class PastCalls:
    """Counts of the last calls and the last plan; remembers nothing where the policy reads no history.

    Args:
        policy: name of the policy, as in the configuration.
    """

    def __init__(self, policy: str) -> None:
        self._needed = policy_info(policy).inputs in ("history", "both")
        self._counts: deque[IntArray] = deque(maxlen=_CALLS)
        self._previous: LayerPlan | None = None
        self._step = 0

    def history(self) -> History | None:
        """What the policy may know now."""
        if not self._needed:
            return None
        return History(counts=tuple(self._counts), previous=self._previous, step=self._step)

    def add(self, plan: LayerPlan) -> None:
        """A training call was planned."""
        if self._needed:
            self._counts.append(plan.counts_RE)
            self._previous = plan
            self._step += 1
