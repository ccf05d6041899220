"""What a layer remembers of its past calls, for policies that plan from history. Never the current call."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from lrmoe.planning import LayerPlan, Topology, policy_info
from lrmoe.planning.problem import History, IntArray
from lrmoe.planning.saved import history_state, read_history

_CALLS = 16  # more than any policy's window


class PastCalls:
    """Counts of the last calls and the last plan; remembers nothing where the policy reads no history.

    Args:
        policy: name of the policy, as in the configuration.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
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

    def state(self) -> dict[str, Any] | None:
        """JSON-able, the same on all ranks; None where nothing is remembered."""
        history = self.history()
        if history is None or not history.step:
            return None
        return {"policy": self._policy, "ranks": history.counts[-1].shape[0], **history_state(history)}

    def lost(self, state: Any, topology: Topology) -> str:
        """Why this layer cannot go on with what another one remembered; empty where it can.

        Args:
            state: what `state` gave, or None.
        """
        if not self._needed or not isinstance(state, Mapping):
            return ""
        told = f"policy={self._policy!r} begins anew: past counts and placements are those"
        if state.get("policy") != self._policy:
            return f"{told} of policy {state.get('policy')!r}"
        if state.get("ranks") != topology.ranks:
            return f"{told} of another number of ranks: {state.get('ranks')}, not {topology.ranks}"
        return ""

    def checked(self, state: Any, topology: Topology) -> History:
        """What `load` takes from a state; changes nothing. Empty where there is none, or where it is `lost`.

        Raises:
            ConfigError: the state is not what `state` gives; names the field.
        """
        if not self._needed or state is None or self.lost(state, topology):
            return History()
        return read_history(state, topology)

    def load(self, history: History) -> None:
        """Go on from what `checked` gave."""
        self._counts = deque(history.counts, maxlen=_CALLS)
        self._previous, self._step = history.previous, history.step
