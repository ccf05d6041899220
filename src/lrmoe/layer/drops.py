"""How much of a call backward may leave out: `max_drop`, lowered by `max_added_variance` and by `drop="auto"`.

All of it is derived from what every rank has (the gathered table, the configuration), so all ranks decide alike.

Shape letters: R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError
from lrmoe.planning import LayerPlan
from lrmoe.planning.auto import RECOMPUTE_RATIO, STASH_RATIO, AutoDrop, grid
from lrmoe.planning.problem import FloatArray
from lrmoe.planning.score_bins import ScoreHistory
from lrmoe.planning.variance import VarianceLimit, largest_drop, predicted_variance, scaled

PlanAt = Callable[[float], LayerPlan]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """A call's plan and why it drops what it drops.

    Attributes:
        predicted: added over own variance as history predicts it, uncorrected; None without history.
        told: what telemetry shows of the decision.
    """

    plan: LayerPlan
    predicted: float | None
    told: dict[str, float]


class DropControl:
    """The limit on added variance and the choice of the drop, of one layer."""

    def __init__(self, config: LRMoEConfig) -> None:
        self._most, self._overload = config.max_drop, config.drop == "overload"
        limit = config.max_added_variance
        self.variance = None if limit is None else VarianceLimit(limit=limit)
        ratio = RECOMPUTE_RATIO if config.recompute else STASH_RATIO
        self.auto = AutoDrop(unmeasured=ratio) if config.drop == "auto" else None

    @property
    def active(self) -> bool:
        """Whether anything but `max_drop` decides."""
        return self.variance is not None or self.auto is not None

    def book(self, told_R3: FloatArray, predicted: float | None) -> None:
        """What calls measured, from every rank's message.

        Args:
            told_R3: float64 (R, 3), calls, added variance, energy of each rank. Where ranks counted differently
                (somebody ran a backward twice) nothing is concluded.
            predicted: the sum of the calls' predictions.
        """
        calls = int(told_R3[0, 0])
        if self.variance is None or not calls or (told_R3[:, 0] != calls).any():
            return
        added, own = (sum(column) for column in told_R3[:, 1:].T.tolist())
        if own > 0:
            self.variance.book(added / own, None if predicted is None else predicted / calls, calls)
        else:  # no gradient arrived, or none that is finite: it adds nothing, and says nothing of the prediction
            self.variance.book(0.0, None, calls)

    def measure(self, told_R4: FloatArray) -> None:
        """What an exact call took on each rank; see `AutoDrop.measure`."""
        if self.auto is not None:
            self.auto.measure(told_R4)

    def choose(self, plan_at: PlanAt, probe: PlanAt, history: ScoreHistory | None) -> Chosen:
        """The plan of a call that may drop pairs.

        Args:
            plan_at: the call's plan under a cap on the dropped share. probe: the same, dropping all of the cap.
            history: scores of past calls, None where there are none.
        """
        factor = 1.0 if self.variance is None or history is None else self.variance.factor

        def added(plan: LayerPlan) -> float:
            return factor * predicted_variance(plan.counts_E, plan.quota_E, history)

        most, told = self._most, dict[str, float]()
        if self.auto is not None:
            due = self.auto.due(known=history is not None)
            if due:
                self.auto.decide(plan_at, added, most)
            # A call that drops nothing teaches nothing: where none is best, the deciding call alone drops a little.
            most = grid(most)[1] if due and self.auto.drop == 0 else min(most, self.auto.drop)
            told |= {
                "auto_drop": self.auto.drop,
                "auto_time": self.auto.time,
                "auto_steps": self.auto.steps,
                "auto_ratio": self.auto.ratio,
            }
        if self.variance is None:
            plan = plan_at(most)
        else:
            plan = self._within(plan_at, probe, added, most, told, known=history is not None)
        raw = predicted_variance(plan.counts_E, plan.quota_E, history)
        told["variance_predicted"] = factor * raw
        if self.auto is not None and plan.reason == "always":
            plan = replace(plan, reason="auto")
        if self.variance is not None and plan.exact:
            self.variance.book(0.0, None)
        return Chosen(plan=plan, predicted=None if history is None else raw, told=told)

    def _within(
        self,
        plan_at: PlanAt,
        probe: PlanAt,
        added: Callable[[LayerPlan], float],
        most: float,
        told: dict[str, float],
        *,
        known: bool,
    ) -> LayerPlan:
        """The plan inside the limit on added variance."""
        limit = self.variance
        assert limit is not None, "asked under a limit only"
        allowed = limit.allowed()
        # Before anything is known: sampling with equal chances adds 1 / kept share - 1 at most.
        start = bound = allowed / (1 + allowed)
        if self._overload:
            start = most  # the cap is seldom used up: the fewest drops are those under the largest cap
        elif limit.drop:
            start = scaled(limit.drop, limit.predicted, allowed)
        found = largest_drop(plan_at, added, most=most, allowed=allowed, start=start)
        if found.drop > 0:
            limit.drop, limit.predicted = found.drop, found.added
        told |= {
            "variance_allowed": allowed,
            "variance_mean": limit.mean,
            "variance_drop": found.drop,
        }
        if found.drop >= most or (found.spare and not self._overload):
            return found.plan
        plan = found.plan
        if plan.exact and not known and allowed > 0:  # a call that drops nothing teaches nothing, for ever
            plan = probe(min(bound, most))
        return replace(plan, reason="variance")

    def state(self) -> dict[str, Any]:
        """JSON-able, the same on all ranks."""
        parts = {"variance": self.variance, "auto": self.auto}
        return {name: part.state() for name, part in parts.items() if part is not None}

    def checked(self, state: Any) -> dict[str, dict[str, Any]]:
        """What `load` takes from a state, by part; changes nothing.

        Raises:
            ConfigError: a part is not what `state` gives; names the field.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"drops={state!r}: must be a table")
        parts = {"variance": self.variance, "auto": self.auto}
        return {
            name: part.checked(state[name], f"drops.{name}")
            for name, part in parts.items()
            if part is not None and name in state
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave; what it lacks (another configuration, an older version) begins anew.

        Raises:
            ConfigError: see `checked`; nothing is changed then.
        """
        values = self.checked(state)
        for name, part in (("variance", self.variance), ("auto", self.auto)):
            if part is not None and name in values:
                part.load(values[name])
