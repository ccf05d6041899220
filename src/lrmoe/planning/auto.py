"""`drop="auto"`: the drop of least estimated time to loss, inside the limits.

    time(d)  = forward peak rows + ratio * backward peak rows(d) + CHOOSING * forward peak rows, the last where d > 0
    steps(d) = 1 + NOISE_SHARE * added(d)                                over the steps with nothing dropped
    chosen d = argmin time(d) * steps(d)

`ratio`, what a backward row costs over a forward row, is measured in the layer's first exact calls and then frozen, so
that a run decides alike on all ranks and after a restart. Without exact calls it is what a layer was measured to take
whose exchange is a third of its time (benchmarks/auto.py), and so is CHOOSING: scores, selection, and handling rows by
lists.

added(d) is the sampled estimator's added variance over the gradient's own (variance.py). If progress per step is slowed
by gradient noise of share s, as in large-batch analyses (McCandlish et al., 2018: steps = least steps * (1 + noise /
batch)), noise that grows by the factor 1 + a costs steps by the factor 1 + s a. NOISE_SHARE is that s, fitted to
training runs at fixed drops (docs/estimators.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lrmoe.errors import InfeasibleError
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import FloatArray
from lrmoe.planning.restore import checked

NOISE_SHARE = 0.6
# Backward over forward per row where nothing was timed: 2 and 3 by products alone, less by the exchange of rows, which
# takes as long in both passes.
STASH_RATIO, RECOMPUTE_RATIO = 1.5, 2.0
CHOOSING = 0.2  # what choosing the kept set costs, in forward rows per row of the call
EVERY = 50  # pruned calls between two decisions
_GRID = 8  # drops that are weighed, beside none
_MEASURED = 16  # exact calls that calibrate, the first left out (it warms up)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One weighed drop: time of a call and steps to a loss, both over those with nothing dropped."""

    drop: float
    time: float
    steps: float

    @property
    def cost(self) -> float:
        """Estimated time to loss over that with nothing dropped."""
        return self.time * self.steps


@dataclass(kw_only=True)
class AutoDrop:
    """The layer's calibration and its latest decision.

    Attributes:
        forward_ms, backward_ms: summed over ranks and measured calls; forward_rows, backward_rows: of the same.
        calls: calls measured. frozen: whether a pruned call has come, after which nothing is measured.
        unmeasured: the ratio while nothing is measured; follows the configuration, and is no state.
        drop, time, steps: the decision in force. age: pruned calls since it.
        knew: what it was made with: 0 there is none, 1 bounds only, 2 past scores.
    """

    unmeasured: float = STASH_RATIO
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    forward_rows: float = 0.0
    backward_rows: float = 0.0
    calls: int = 0
    frozen: bool = False
    drop: float = 0.0
    time: float = 1.0
    steps: float = 1.0
    age: int = 0
    knew: int = 0

    @property
    def measuring(self) -> bool:
        """Whether more exact calls are to be timed."""
        return not self.frozen and self.calls <= _MEASURED

    def measure(self, told_R4: FloatArray) -> None:
        """Add an exact call that ranks timed; the first one warms up and is left out.

        Args:
            told_R4: float64 (R, 4), forward and backward milliseconds, forward and backward rows; zeros where a rank
                timed nothing.
        """
        if not self.measuring or not told_R4.any():
            return
        self.calls += 1
        if self.calls > 1:
            for row in told_R4.tolist():
                self.forward_ms += row[0]
                self.backward_ms += row[1]
                self.forward_rows += row[2]
                self.backward_rows += row[3]

    @property
    def ratio(self) -> float:
        """Cost of a backward row over a forward row."""
        if min(self.forward_ms, self.backward_ms, self.forward_rows, self.backward_rows) <= 0:
            return self.unmeasured
        return (self.backward_ms / self.backward_rows) / (self.forward_ms / self.forward_rows)

    def due(self, *, known: bool) -> bool:
        """Whether this pruned call decides anew; counts it.

        Args:
            known: whether past scores are known by now.
        """
        self.frozen = True
        self.age += 1
        knows = 2 if known else 1
        if self.age < EVERY and self.knew >= knows:
            return False
        self.age, self.knew = 0, knows
        return True

    def decide(
        self, plan_at: Callable[[float], LayerPlan], added: Callable[[LayerPlan], float], most: float
    ) -> None:
        """Weigh the drops of a grid on this call's counts, and keep the best.

        Args:
            plan_at: the plan under a cap on the dropped share; drops whose plan fits no budget are left out.
            added: what a plan is predicted to add, over the gradient's own variance. most: `max_drop`.
        """
        plans = [(drop, plan) for drop in grid(most) if (plan := _feasible(plan_at, drop)) is not None]
        if not plans:
            return
        best = min(weigh(plans, added, self.ratio), key=lambda one: one.cost)
        self.drop, self.time, self.steps = best.drop, best.time, best.steps

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {name: value for name, value in asdict(self).items() if name != "unmeasured"}

    def checked(self, state: Any, where: str = "auto") -> dict[str, Any]:
        """The values of what `state` gave, for `load`; changes nothing.

        Raises:
            ConfigError: they are not what `state` gives; names the field, below `where`.
        """
        return checked(self, state, but="unmeasured", where=where)

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave.

        Raises:
            ConfigError: see `checked`; nothing is changed then.
        """
        for name, value in self.checked(state).items():
            setattr(self, name, value)


def grid(most: float) -> list[float]:
    """Drops to weigh: none, and even steps up to the cap."""
    return [most * step / _GRID for step in range(_GRID + 1)]


def weigh(
    plans: Sequence[tuple[float, LayerPlan]], added: Callable[[LayerPlan], float], ratio: float
) -> list[Choice]:
    """Time and steps of every drop, over those of the same call with nothing dropped."""
    found = []
    for drop, plan in plans:
        forward, backward = plan.peak_rows
        whole = forward * (1 + ratio)
        choosing = 0.0 if plan.exact else CHOOSING * forward
        time = (forward + choosing + ratio * backward) / whole if whole else 1.0
        found.append(Choice(drop=drop, time=time, steps=1 + NOISE_SHARE * added(plan)))
    return found


def _feasible(plan_at: Callable[[float], LayerPlan], drop: float) -> LayerPlan | None:
    try:
        return plan_at(drop)
    except InfeasibleError:
        return None
