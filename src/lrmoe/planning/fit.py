"""A plan and the way to run it that fit a byte budget on every rank, by the rungs of the budget ladder.

    0 it fits                         3 rows and activations are not saved
    1 replicas, where they save       4 each rank's rows in chunks, forward and backward apart
    2 backward drops the deficiency   5 InfeasibleError, with the numbers

The predictor decides, in bytes; nothing here knows what a row costs. Everything is integer and the same on all ranks.
Every policy's plan may be recomputed or chunked; only a policy that adapts is asked again with other limits.

Shape letters: R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from lrmoe.errors import InfeasibleError
from lrmoe.planning.plan import LayerPlan
from lrmoe.planning.problem import IntArray, Problem
from lrmoe.planning.refusal import refusal

Policy = Callable[[Problem], LayerPlan]
Predict = Callable[[LayerPlan], tuple[IntArray, IntArray]]  # bytes (R,) of forward and of backward

# Whether rows and activations are dropped after forward and made again, in the order tried.
RECOMPUTES = {"auto": (False, True), "stash": (False,), "recompute": (True,)}
_ANY_CHUNKS = 2**40  # the policy's own ladder must not refuse: this module chunks


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """What to run, how, and the bytes it was predicted to need at the largest moment of each pass, int64 (R,)."""

    plan: LayerPlan
    forward_R: IntArray
    backward_R: IntArray

    @property
    def need(self) -> int:
        """Bytes of the neediest rank at its largest moment."""
        return max(self.forward, self.backward)

    @property
    def forward(self) -> int:
        """Bytes of the neediest rank in forward."""
        return int(self.forward_R.max())

    @property
    def backward(self) -> int:
        """Bytes of the neediest rank in backward."""
        return int(self.backward_R.max())


def fit(
    problem: Problem,
    policy: Policy,
    predict: Predict,
    budget: int | None,
    *,
    activations: str = "auto",
    adapts: bool = False,
    name: str = "layer_budget",
) -> Fitted:
    """The first plan of the ladder whose prediction is within the budget on every rank.

    Args:
        problem: counts and limits; `replica_rows` is what a replica counts in rows where places are weighed,
            `max_chunks` the most chunks of a pass. Its `budget_rows` must be None.
        policy: what plans; asked again with fewer slots or pairs only where it `adapts`.
        predict: bytes per rank of a plan, at the largest moment of forward and of backward.
        budget: bytes per rank, or None for no limit: the policy's plan as it is.
        activations: "auto", "stash" (never recompute) or "recompute" (never stash).
        name: what the budget is called in the error.

    Raises:
        InfeasibleError: nothing fits; says which rank needs how much, what is available, the drop cap, the smallest
            budget that this function accepts and about the largest micro-batch.
    """
    ladder = Ladder(
        problem=problem,
        policy=policy,
        predict=predict,
        budget=budget,
        recomputes=RECOMPUTES[activations],
        adapts=adapts,
    )
    first = ladder.price(policy(problem), 0)
    if budget is None or first.need <= budget:
        return first
    if problem.copy_rows:  # too many bytes: replicas are weighed by what they save of them
        ladder.problem, ladder.priced = replace(problem, copy_rows=0.0), True
    ladder.variants = _variants(ladder, first.plan)
    found = ladder.climb() or ladder.scan()
    if found.need > budget:
        raise refusal(ladder, first, found, name)
    return found


def fit_backward(plan: LayerPlan, predict: Predict, budget: int, *, name: str = "layer_budget") -> int:
    """Fewest chunks, at least the plan's, with which its backward fits now that more is known of it.

    Raises:
        InfeasibleError: no number of chunks fits.
    """
    rows = max(int(plan.backward_load_R.max()), 1)
    chunks = plan.backward_chunks
    while True:
        _, backward_R = predict(replace(plan, backward_chunks=chunks))
        need = int(backward_R.max())
        if need <= budget:
            return chunks
        if chunks >= rows:
            raise InfeasibleError(
                f"{name}: rank {int(np.argmax(backward_R))} needs {need} bytes in {chunks} chunks of its backward and "
                f"{budget} are available"
            )
        chunks = min(chunks + max(chunks // 4, 1), rows)


@dataclass(kw_only=True, eq=False)
class Ladder:
    """One call's plans and their bytes. A refusal climbs it under many budgets: what was asked once is kept.

    Attributes:
        problem, policy, predict, budget, adapts: as given to `fit`. recomputes: levels of what is saved.
        priced: whether replicas are weighed by the bytes they save. variants: the plans that are chunked.
        asked, predicted: what the policy planned and what the predictor said, by what they were asked.
    """

    problem: Problem
    policy: Policy
    predict: Predict
    budget: int | None
    recomputes: tuple[bool, ...]
    adapts: bool
    priced: bool = False
    variants: list[LayerPlan] = field(default_factory=list)
    asked: dict[tuple[int, int, str, str | None], LayerPlan] = field(default_factory=dict)
    predicted: dict[tuple[int, int, int, int], tuple[LayerPlan, Fitted]] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """The budget."""
        assert self.budget is not None, "a ladder is climbed under a budget"
        return self.budget

    @property
    def _may_drop(self) -> bool:
        return self.adapts and self.problem.drop == "overload" and self.problem.drop_cap > 0

    def price(self, plan: LayerPlan, saved: int, forward_chunks: int = 1, backward_chunks: int = 1) -> Fitted:
        """A plan run with what the level `saved` keeps, in chunks."""
        key = id(plan), saved, forward_chunks, backward_chunks
        if key not in self.predicted:
            run = replace(
                plan,
                recompute=self.recomputes[saved],
                forward_chunks=forward_chunks,
                backward_chunks=backward_chunks,
            )
            forward_R, backward_R = self.predict(run)
            # With the plan itself, so that it stays and its id is no other's.
            self.predicted[key] = plan, Fitted(plan=run, forward_R=forward_R, backward_R=backward_R)
        return self.predicted[key][1]

    def climb(self) -> Fitted | None:
        """The lowest rung that fits, searched where bytes fall with the means used; None where no search found one."""
        last = len(self.recomputes) - 1
        for saved in range(len(self.recomputes)):
            whole = sorted((self.price(plan, saved) for plan in self.variants), key=lambda one: one.need)
            for one in whole:
                if one.need <= self.limit:
                    return one
            fits = [one for one in whole if one.forward <= self.limit]
            if fits and (dropped := self._drop(fits[0], saved)):
                return dropped
            if saved == last:
                return self._chunk(whole, saved)
        return None

    def ask(self, rows: int, slots: int, reason: str | None = None) -> LayerPlan:
        """The policy's plan for `rows` rows a rank, replicas charged; how it runs is decided here."""
        key = rows, slots, self.problem.drop, reason
        if key not in self.asked:
            problem = replace(
                self.problem,
                budget_rows=max(rows, 1),
                max_chunks=_ANY_CHUNKS,
                slots=slots,
            )
            plan = self.policy(problem)
            self.asked[key] = replace(
                plan,
                forward_chunks=1,
                backward_chunks=1,
                recompute=False,
                reason=plan.reason if reason is None else reason,
            )
        return self.asked[key]

    def _drop(self, whole: Fitted, saved: int, forward_chunks: int = 1) -> Fitted | None:
        """The fewest pairs left out so that an unchunked backward fits; None where the drop cap does not reach."""
        if not self._may_drop:
            return None
        slots = self.problem.slots if whole.plan.replicas_R.any() else 0
        always = replace(self, problem=replace(self.problem, drop="always"))
        best = self.price(always.ask(self.problem.pairs, slots, reason="budget"), saved, forward_chunks)
        if best.need > self.limit:
            return None
        low, high, over, turn = self._rows(best.plan), self._rows(whole.plan), whole.need, 0
        # Bytes grow about by a line in the rows a rank may hold; every third step bisects.
        while high - low > 1:
            share = (self.limit - best.need) / max(over - best.need, 1) if turn % 3 < 2 else 0.5
            rows = min(max(low + int(share * (high - low)), low + 1), high - 1)
            one = self.price(self.ask(rows, slots), saved, forward_chunks)
            if one.need <= self.limit:
                low, best = rows, one
            else:
                high, over = rows, one.need
            turn += 1
        return best

    def _rows(self, plan: LayerPlan) -> int:
        """Rows of the fullest rank in backward, replicas charged."""
        return int((plan.backward_load_R + self.problem.replica_rows * plan.replicas_R).max())

    def _chunk(self, whole: list[Fitted], saved: int) -> Fitted | None:
        """Fewest chunks: of forward, then of backward, which drops the deficiency first where the cap reaches."""
        found = []
        for one in whole:
            forward = self._fewest(one.plan, saved)
            if forward is None:
                continue
            chunks = forward.plan.forward_chunks
            if forward.backward <= self.limit:
                found.append(forward)
            elif dropped := self._drop(forward, saved, chunks):
                found.append(dropped)
            elif backward := self._fewest(one.plan, saved, chunks):
                found.append(backward)
        return min(found, key=lambda x: (x.plan.forward_chunks, x.plan.backward_chunks), default=None)

    def _fewest(self, plan: LayerPlan, saved: int, forward_chunks: int | None = None) -> Fitted | None:
        """Fewest chunks with which backward fits, or forward where its own are not given: gallop, then bisect."""

        def price(chunks: int) -> tuple[Fitted, bool]:
            if forward_chunks is None:
                one = self.price(plan, saved, chunks)
                return one, one.forward <= self.limit
            one = self.price(plan, saved, forward_chunks, chunks)
            return one, one.backward <= self.limit

        low, high, most = 0, 1, self.problem.max_chunks
        one, fits = price(high)
        while not fits:
            if high == most:
                return None
            low, high = high, min(2 * high, most)
            one, fits = price(high)
        while high - low > 1:
            middle = (low + high) // 2
            trial, fits = price(middle)
            if fits:
                one, high = trial, middle
            else:
                low = middle
        return one

    def scan(self) -> Fitted:
        """What needs least of all variants, levels and chunks, with the whole drop."""
        return min(self._floors(), key=lambda one: one.need)

    def _floors(self) -> Iterator[Fitted]:
        most_chunks = self.problem.max_chunks
        # Bytes fall with the chunks, nearly always.
        chunks = sorted({1, *range(max(most_chunks - 3, 1), most_chunks + 1)})
        most = replace(self.problem, drop="always") if self._may_drop else self.problem
        plans = _variants(replace(self, problem=most), self.policy(most)) if self._may_drop else self.variants
        for plan in plans:
            for saved in range(len(self.recomputes)):
                forward = [self.price(plan, saved, c) for c in chunks]
                # Forward in one piece may keep what forward in chunks does not.
                for few in sorted({1, chunks[int(np.argmin([one.forward for one in forward]))]}):
                    backward = [self.price(plan, saved, few, c) for c in chunks]
                    yield min(backward, key=lambda one: one.backward)


def _variants(ladder: Ladder, first: LayerPlan) -> list[LayerPlan]:
    """The policy's plan; where it adapts, also one whose replicas are weighed by bytes, and one without any."""
    plans, problem = [first], ladder.problem
    if ladder.adapts and problem.slots:
        if ladder.priced:
            plans.append(ladder.policy(problem))
        if problem.pairs and problem.replica_rows:
            plans.append(ladder.ask(problem.pairs, problem.slots))
        plans.append(ladder.policy(replace(problem, slots=0)))
    return plans
