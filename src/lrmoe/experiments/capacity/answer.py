"""How much fits: one model on some GPUs under a budget, planned by a policy from a stated skew.

The question is answered for one layer call and for the whole model, with every MoE layer as loaded as that call.
What does not fit as asked is tried with less kept for backward, in the order of `_modes`.

Shape letters: S steps, R ranks, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lrmoe.errors import InfeasibleError
from lrmoe.experiments.capacity.model import reserved_estimate
from lrmoe.experiments.capacity.question import MAX_TOKENS, Question, question_calls
from lrmoe.planning import LayerPlan, Problem, get_policy
from lrmoe.planning.cost import LayerTime, predict_layer
from lrmoe.planning.memory import Execution, PassBytes, call_bytes, training_execution
from lrmoe.planning.model_memory import OPTIMIZERS, Training, model_bytes, rows_within
from lrmoe.planning.policies import fit_policy
from lrmoe.planning.problem import History, IntArray
from lrmoe.simulate.generators import fixed_peak

_MOST = 4096  # largest micro-batch that is looked for


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """A plan under one way of keeping activations, and what it needs.

    Attributes:
        question: what was asked. plan: of the layer call. run: how calls run. checkpointing: layers run twice.
        counts_RE: the call's counts, int64 (R, E). call, model: bytes of one call and of the model's MoE part.
        reserved: bytes per rank by part that are not MoE. time: of one layer call.
        over: what does not fit, as "limit: needs .. of ..", empty where everything fits.
    """

    question: Question
    plan: LayerPlan
    run: Execution
    checkpointing: bool
    counts_RE: IntArray
    call: PassBytes
    model: PassBytes
    reserved: Mapping[str, int]
    time: LayerTime

    @property
    def reserved_bytes(self) -> int:
        """Bytes per rank that are not MoE."""
        return sum(self.reserved.values())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes per rank of the experts' optimizer states."""
        return int(self.model.forward["optimizer"][0])

    @property
    def rank(self) -> int:
        """The rank that needs most."""
        return int(self.model.peak_R.argmax())

    @property
    def device_need(self) -> int:
        """Bytes of the fullest rank, everything counted."""
        return int(self.model.peak_R.max()) + self.reserved_bytes

    @property
    def budget_need(self) -> int:
        """Bytes of the MoE part that a budget counts (no optimizer states) on the fullest rank."""
        return int(self.model.peak_R.max()) - self.optimizer_bytes

    @property
    def call_need(self) -> int:
        """Bytes of one layer call on the fullest rank."""
        return int(self.call.peak_R.max())

    @property
    def limits(self) -> dict[str, tuple[int, int]]:
        """Limit -> (needed, available) bytes of the fullest rank."""
        q = self.question
        found = {"device": (self.device_need, q.device_bytes)}
        if q.budget is not None:
            found["budget"] = (self.budget_need, q.budget)
        if q.layer_budget is not None:
            found["layer budget"] = (self.call_need, q.layer_budget)
        return found

    @property
    def fits(self) -> bool:
        """Whether every limit holds."""
        return all(need <= limit for need, limit in self.limits.values())

    @property
    def chunks(self) -> int:
        """Parts in which the rows of a rank run, in the pass with more of them."""
        return max(self.plan.forward_chunks, self.plan.backward_chunks)

    @property
    def moe_ms(self) -> float:
        """MoE time of one micro-batch over all layers; a checkpointed layer's forward counts twice."""
        once = self.time.total_ms + (self.time.forward_ms if self.checkpointing else 0.0)
        return once * self.question.model.moe_layers

    @property
    def fixed_peak(self) -> float:
        """Peak of fixed ownership on the same counts."""
        return fixed_peak(self.counts_RE)

    @property
    def forward_peak(self) -> float:
        """Most loaded rank in forward over the mean load."""
        return self._peak(self.plan.forward_load_R)

    @property
    def backward_peak(self) -> float:
        """Most loaded rank in backward over the mean load of the complete call."""
        return self._peak(self.plan.backward_load_R)

    @property
    def beyond_R(self) -> IntArray:
        """Weight slots of each rank beyond its equal share of the experts, int64 (R,).

        Their sum is the number of copies beyond one per expert: an expert that merely lives elsewhere is none.
        """
        plan = self.plan
        copies_R = np.zeros(plan.topology.ranks, dtype=np.int64)
        np.add.at(copies_R, plan.instance_rank_J, 1 if plan.copies_J is None else plan.copies_J)
        return copies_R - plan.topology.experts_per_rank

    def _peak(self, load_R: IntArray) -> float:
        return int(load_R.max()) * self.plan.topology.ranks / max(self.plan.pairs, 1)


def solve(question: Question) -> Answer:
    """The first way of running that fits, or the leanest one tried (`fits` says which).

    Without a budget that binds the policy plans freely; where that does not fit, it is told how many rows do.
    """
    leanest: Answer | None = None
    chunked: Answer | None = None
    for stash, checkpointing in _modes(question):
        for budgeted in (False, True) if question.plans_under_budget else (False,):
            answer = _answer(question, stash, checkpointing, budgeted)
            if answer is None:
                continue
            if answer.fits and answer.chunks == 1:
                return answer
            if answer.fits and (chunked is None or answer.moe_ms < chunked.moe_ms):
                chunked = answer
            if leanest is None or _excess(answer) < _excess(leanest):
                leanest = answer
    assert leanest is not None, "planning without a budget always gives an answer"
    return leanest if chunked is None else chunked


def largest_micro_batch(question: Question) -> int:
    """The largest micro-batch that fits, everything else as asked; 0 where none does."""

    def fits(size: int) -> bool:
        known = size * question.sequence <= MAX_TOKENS
        return known and solve(question.change(micro_batch=size)).fits

    if not fits(1):
        return 0
    low = 1
    while low < _MOST and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1 and low < _MOST:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _modes(question: Question) -> Iterator[tuple[bool, bool]]:
    """(stash, checkpointing) in the order of what they cost in time."""
    checkpointing = {"none": (False,), "layer": (True,), "auto": (False, True)}[question.checkpointing]
    stash = {"stash": (True,), "recompute": (False,), "auto": (True, False)}[question.activations]
    for layer in checkpointing:
        for keep in stash:
            yield keep, layer


def _excess(answer: Answer) -> float:
    """How far the answer is over its tightest limit, as a ratio."""
    return max(need / limit for need, limit in answer.limits.values())


def _answer(question: Question, stash: bool, checkpointing: bool, budgeted: bool) -> Answer | None:
    """The plan of one mode; None where the policy finds none under the rows that fit."""
    training, tokens = question.training(checkpointing), question.tokens
    reserved = {"as given": question.reserved} if question.reserved is not None else None
    if reserved is None:
        reserved = reserved_estimate(question.model, tokens=tokens, gpus=question.gpus, training=training)
    calls_SRE = question_calls(question)
    rows = _rows(question, stash, training, sum(reserved.values())) if budgeted else {}
    if rows.get("budget_rows") == 0:
        return None
    try:
        plan = _plan(question, calls_SRE, rows)
    except InfeasibleError:
        return None
    shape, run = question.model.expert(), training_execution(plan, stash=stash)
    return Answer(
        question=question,
        plan=plan,
        run=run,
        checkpointing=checkpointing,
        counts_RE=calls_SRE[-1],
        call=call_bytes(shape, plan, run, gradient_bytes=question.gradient_bytes),
        model=model_bytes(shape, plan, run, training),
        reserved=reserved,
        time=predict_layer(
            shape, question.hardware, plan, calibration=question.calibration, top_k=question.model.top_k, stash=stash,
            planning_ms=None if question.policy != "megatron" else 0.0,
        ),
    )  # fmt: skip


def _rows(question: Question, stash: bool, training: Training, reserved: int) -> dict[str, int | None]:
    """The budget fields of a Problem: rows that fit a rank under the tightest limit (0: none), a replica in rows.

    Where activations need not be stashed, also the rows that fit if nothing is kept at the experts.
    """
    model, local = question.model, question.model.experts // question.ranks
    state = training.layers * local * model.expert().params * OPTIMIZERS[training.optimizer]
    available = question.device_bytes - reserved - state // training.optimizer_shards
    limits = [(min(available, question.budget or available), training)]
    if question.layer_budget is not None:
        limits.append((question.layer_budget, dataclasses.replace(training, layers=1)))

    def within(keeps: bool) -> tuple[int, int]:
        run = Execution(
            differentiable=True, stash=stash, norms=True, input_gradient=True, weight_gradient=True
        )
        found = [
            rows_within(
                limit, model.expert(), pairs=question.pairs, local_experts=local, run=run, training=each,
                alone=question.ranks == 1, keeps=keeps,
            )
            for limit, each in limits
        ]  # fmt: skip
        return max(min(rows for rows, _ in found), 0), max(replica for _, replica in found)

    kept, lean = within(True), (0, 0) if stash else within(False)
    if max(kept[0], lean[0]) < 1:
        return {"budget_rows": 0}
    return {
        "budget_rows": max(kept[0], 1),
        "recompute_rows": lean[0] or None,
        "replica_rows": max(kept[1], lean[1]),
    }


def _plan(question: Question, calls_SRE: IntArray, rows: Mapping[str, Any]) -> LayerPlan:
    """The policy's plan of the last call; policies that plan from history have seen the calls before."""
    topology = question.topology
    policy = fit_policy(
        get_policy(question.policy), question.model.expert(), question.hardware, nodes=topology.nodes,
        slots=question.slots, constants=question.calibration.constants,
    )  # fmt: skip
    foreign = topology.experts - topology.experts_per_rank
    previous: LayerPlan | None = None
    for step, counts_RE in enumerate(calls_SRE):
        previous = policy(
            Problem(
                counts_RE=counts_RE,
                topology=topology,
                slots=min(question.slots, foreign),
                max_drop=question.max_drop if question.plans_under_budget else 0.0,
                drop=question.drop,
                history=History(
                    counts=tuple(calls_SRE[max(step - 10, 0) : step]), previous=previous, step=step
                ),
                **rows,
            )
        )
    assert previous is not None
    return previous
