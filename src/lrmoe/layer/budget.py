"""Byte budgets of calls: what a call may need, what it is predicted to need, and what other layers hold meanwhile.

    layer budget    this call's largest moment, its parameters included
    memory budget   parameters and gradients of all layers + stashes that wait for their backward + this call's moment

Everything is computed from numbers that all ranks have, in the order in which all ranks call their layers, so that they
choose alike and are refused alike.

Shape letters: R ranks, Q seats of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch

from lrmoe.config import LRMoEConfig
from lrmoe.errors import InfeasibleError
from lrmoe.planning import LayerPlan, Problem
from lrmoe.planning.call_memory import CallMemory, CallSizes, CallWalk
from lrmoe.planning.fit import Policy, fit, fit_backward
from lrmoe.planning.problem import IntArray
from lrmoe.sizes import parse_size

_T = TypeVar("_T")


def device_bytes(device: torch.device) -> int:
    """All memory of a device; of the host for CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(kw_only=True, eq=False)
class Waiting:
    """What the layers of one model hold, as every rank knows it.

    Attributes:
        parameters: parameters on this rank (the same number on all), by layer.
        stashes: bytes (R,) of forwards that wait for their backward, in order: (layer, bytes).
    """

    parameters: dict[int, int] = field(default_factory=dict)
    stashes: list[tuple[int, IntArray]] = field(default_factory=list)

    def clear(self) -> None:
        """An optimizer step is done: nothing waits."""
        self.stashes.clear()

    def outside(self, layer: int, kept_R: IntArray) -> IntArray:
        """Bytes of stashes beside a call of `layer` that keeps `kept_R`: later layers are taken to keep as much."""
        busy = {index for index, _ in self.stashes} | {layer}
        later = sum(index not in busy for index in self.parameters)
        return sum((size for _, size in self.stashes), start=later * kept_R)


@dataclass(kw_only=True, eq=False)
class CallBudget:
    """The memory of one call: its predictions, and the limit if there is one.

    Attributes:
        sizes: the call's, by whether backward keeps every pair.
        limit, model_limit: bytes per rank for this call, and for the whole model, or None.
        waiting: what the model's layers hold. checkpointed: a forward that keeps nothing and is run again later.
        again: it is being run again, and now keeps what backward needs.
        memory: the prediction of the call as it runs.
    """

    config: LRMoEConfig
    layer: int
    sizes: Callable[[bool], CallSizes]
    limit: int | None = None
    model_limit: int | None = None
    waiting: Waiting = field(default_factory=Waiting)
    checkpointed: bool = False
    again: bool = False
    memory: CallMemory | None = None
    _walks: dict[tuple[int, int], CallWalk] = field(default_factory=dict)
    _stash: tuple[int, IntArray] | None = None

    @property
    def binds(self) -> bool:
        """Whether the call has a budget."""
        return self.limit is not None or self.model_limit is not None

    @property
    def _name(self) -> str:
        if self.model_limit is None:
            return "layer_budget"
        return "memory_budget" if self.limit is None else "layer_budget and memory_budget together"

    def plan(self, problem: Problem, policy: Policy, *, adapts: bool) -> LayerPlan:
        """The plan of the call: the policy's, or what fits the budget.

        Raises:
            InfeasibleError: nothing fits; the same on all ranks.
        """
        if not self.binds:
            return policy(problem)
        problem = replace(problem, replica_rows=_replica_rows(self.sizes(True)))
        return self._met(
            lambda one: (
                fit(
                    problem,
                    policy,
                    lambda plan: one._needs(one.predict(plan)),
                    one._budget,
                    activations=one.config.activations,
                    adapts=adapts,
                    name=one._name,
                ).plan
            )
        )

    def predict(
        self, plan: LayerPlan, kept_RQ: IntArray | None = None, *, overlaps: bool = False
    ) -> CallMemory:
        """The memory of a plan's call, parameters included; `overlaps` as in `CallWalk.memory`."""
        key = (id(plan.assign_RJ), id(plan.quota_E))
        walk = self._walks.get(key)
        if walk is None:
            walk = self._walks[key] = CallWalk(self.sizes(plan.exact), plan)
        if self.config.recompute and not plan.recompute:
            plan = replace(plan, recompute=True)
        return walk.memory(plan, kept_RQ, overlaps=overlaps)

    def peak(self, plan: LayerPlan, rank: int) -> int:
        """Predicted bytes of the call on a rank at its largest moment, parameters included."""
        if self.memory is None:
            self.memory = self.predict(plan)
        return int(self.memory.peak_R[rank])

    def begin(self, plan: LayerPlan) -> None:
        """A forward that a backward follows: what it keeps waits."""
        self.end()  # of a forward that is run once more
        if self.model_limit is not None and (self.again or not self.checkpointed):
            self._stash = (self.layer, self._kept(self.predict(plan)))
            self.waiting.stashes.append(self._stash)

    def refit(self, plan: LayerPlan, kept_RQ: IntArray) -> LayerPlan:
        """The plan at the start of a backward, where it is known what every source keeps: chunks are chosen anew."""
        if plan.exact or not self.binds:
            return plan
        chunks = self._met(
            lambda one: fit_backward(
                plan, lambda part: one._needs(one.predict(part, kept_RQ)), one._budget, name=one._name
            )
        )
        plan = replace(plan, backward_chunks=chunks)
        self.memory = self.predict(plan, kept_RQ)
        return plan

    def overlaps(self, plan: LayerPlan, kept_RQ: IntArray) -> bool:
        """Whether weight gradients may wait until input gradients travel: always, or where that fits on all ranks."""
        if not self.binds:
            return True
        memory = self.predict(plan, kept_RQ, overlaps=True)
        fits = bool((self._needs(memory)[1] <= self._budget).all())
        if fits:
            self.memory = memory
        return fits

    def end(self) -> None:
        """The backward is done: nothing of the call waits."""
        self.waiting.stashes = [one for one in self.waiting.stashes if one is not self._stash]
        self._stash = None

    @property
    def _budget(self) -> int:
        budget = self.limit if self.model_limit is None else self.model_limit
        assert budget is not None, "asked under a budget only"
        return budget

    def _met(self, attempt: Callable[[CallBudget], _T]) -> _T:
        """What `attempt` finds; of two limits that cannot be met the error speaks of the one that stands in the way."""
        try:
            return attempt(self)
        except InfeasibleError:
            if self.limit is not None and self.model_limit is not None:
                for one in (replace(self, model_limit=None), replace(self, limit=None)):
                    attempt(one)
            raise

    def _needs(self, memory: CallMemory) -> tuple[IntArray, IntArray]:
        """Bytes (R,) of both passes in the terms of the limit that `plan` names."""
        if self.model_limit is None:
            return memory.forward_R, memory.backward_R
        extra = self._beside(memory)
        if self.limit is not None:  # both limits in terms of the model's
            extra = np.maximum(extra, self.model_limit - self.limit)
        return memory.forward_R + extra, memory.backward_R + extra

    def _beside(self, memory: CallMemory) -> IntArray:
        """Bytes (R,) that the model holds beside the call: its other parameters, all gradients, waiting stashes."""
        sizes, parameters = self.sizes(True), self.waiting.parameters
        own = parameters.get(self.layer, 0)
        fixed = sum(parameters.values()) * sizes.weight_bytes * (1 + sizes.needs_gate_up)
        beside = fixed - own * sizes.weight_bytes + np.zeros_like(memory.kept_R)
        others = [one for one in self.waiting.stashes if one is not self._stash]
        if self.checkpointed:  # so are the layers that come, it is taken
            return sum((size for _, size in others), start=beside)
        waiting = Waiting(parameters=parameters, stashes=others)
        return beside + waiting.outside(self.layer, self._kept(memory))

    @staticmethod
    def _kept(memory: CallMemory) -> IntArray:
        """Bytes (R,) that stay for backward, parameters left out."""
        return memory.kept_R - memory.forward["weights"]


def budget_limits(config: LRMoEConfig, whole: int) -> tuple[int | None, int | None]:
    """Bytes of the layer's and of the model's budget on devices of `whole` bytes, None where not set."""
    layer, model = (
        None if size is None else parse_size(name, size, whole)
        for name, size in (("layer_budget", config.layer_budget), ("memory_budget", config.memory_budget))
    )
    return layer, model


def _replica_rows(sizes: CallSizes) -> int:
    """One copy in rows, where places of copies are weighed: both passes' bytes over those of a row."""
    shape = sizes.shape
    copy = shape.weight_bytes + sum(sizes.projections) * sizes.sum_bytes
    return max(copy // (4 * shape.row_bytes + 6 * shape.width * shape.element_bytes), 1)
