"""Storage of the executed systems: what each really moves is executed under the clock and counted, the rest is not.

    KeptCopies      copies fetched at the call, kept until its backward           FasterMoE, LLEP
    Residents       copies that stay with their ranks; layout changes and the     FlexMoE, SmartMoE, EPLB
                    sum of copies' gradients are executed and counted
    FromShards      experts built from shards on all ranks, at every call or      LAER-MoE
                    where the step or the layout changed; gradients scattered     SYMI
                    to the shards at every call, or once a step

A system that the rig only executes trains nothing, so its copies have to be brought up to date, and gradients brought
home to be compared, where the real system does neither: that is done outside the clock and not counted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lrmoe.distributed import Comm
from lrmoe.distributed.replicas import fetch_replicas, return_gradients
from lrmoe.distributed.sharded import Cuts, gather_homes, return_shards, scatter_homes
from lrmoe.experiments.systems.residence import Hosts, change, hosts_of, synchronise
from lrmoe.layer.call import Call
from lrmoe.layer.seat_weights import Pair, Slots, WeightGrads, Weights
from lrmoe.layer.sharded import Sharded
from lrmoe.layer.weights import Home, Owned
from lrmoe.planning import LayerPlan

Ends = Callable[[], bool]  # whether the micro-batch that is executed is the last of its step


class KeptCopies:
    """Owned weights; the copies of a call serve its backward too, where the plan says so.

    Plans of the package's systems say it in their traffic; without one, copies are fetched again.
    """

    homes = True

    def __init__(self) -> None:
        self._owned = Owned()
        self._held: tuple[Call, Weights] | None = None

    def borrow(self, call: Call, gate_up: Tensor, down: Tensor) -> Weights:
        """Fetched in forward; in backward what forward left."""
        if self._held is not None and self._held[0] is call:
            weights, self._held = self._held[1], None
            return weights
        weights = self._owned.borrow(call, gate_up, down)
        if not call.plan.moved.refetch_R.any():
            self._held = (call, weights)
        return weights

    def give_back(self, call: Call, grads: WeightGrads) -> Home:
        """As owned weights do."""
        return self._owned.give_back(call, grads)


class Residents:
    """Copies that stay with their ranks between calls, each with its optimizer state.

    Args:
        ends: whether the step ends with this micro-batch.
        state_bytes: of optimizer state for each parameter.
    """

    homes = True

    def __init__(self, ends: Ends, state_bytes: int) -> None:
        self._ends, self._state_bytes = ends, state_bytes
        self._hosts_RE: Hosts | None = None  # before the first call: its layout, which costs nothing to reach
        self._sums: dict[int, Tensor] = {}
        self._open = False  # whether sums of this step are still to be synchronised, on all ranks alike
        self._held: tuple[Call, Weights] | None = None

    def settle(self, plan: LayerPlan) -> None:
        """Take a plan's layout for the present one, without moving anything: of a step that is not executed."""
        self._hosts_RE = hosts_of(plan)

    def borrow(self, call: Call, gate_up: Tensor, down: Tensor) -> Weights:
        """In forward the layout changes to the plan's; in backward it is there."""
        if self._held is not None and self._held[0] is call:
            weights, self._held = self._held[1], None
            return weights
        self._move(call, gate_up, down)
        weights = _uncounted(call, gate_up, down)
        self._held = (call, weights)
        return weights

    def give_back(self, call: Call, grads: WeightGrads) -> Home:
        """Add up this rank's copies over the step, sum over copies at its end; bring home what the caller compares."""

        def home() -> Pair:
            self._collect(call, grads)
            self._open = not self._ends()
            if not self._open:
                self._synchronise(call)
            if call.seats.spread:
                return_gradients(call.comm, call.seats, grads.foreign, grads.home)
            return grads.home

        return home

    def _move(self, call: Call, gate_up: Tensor, down: Tensor) -> None:
        new_RE, old_RE = hosts_of(call.plan), self._hosts_RE
        if old_RE is not None and (new_RE != old_RE).any():
            if self._open:  # gradients of this step's earlier micro-batches belong to the old copies
                self._synchronise(call)
            params = gate_up[0].numel() + down[0].numel()
            size = params * (call.compute_dtype.itemsize + self._state_bytes)
            with call.open_call.clock.phase("replicas"):
                sent = change(call.comm, old_RE, new_RE, expert_bytes=size)
            call.open_call.sent("replicas", sent)
        self._hosts_RE = new_RE

    def _collect(self, call: Call, grads: WeightGrads) -> None:
        """Add up the gradients of experts that other ranks host too."""
        hosts_RE, rank = self._layout, call.comm.rank
        shared_E = hosts_RE[rank] & (hosts_RE.sum(axis=0) > 1)
        homes = call.seats.topology.experts_per_rank
        for seat, expert in enumerate(call.seats.expert_Q[call.seats.of(rank)].tolist()):
            if shared_E[expert]:
                parts = grads.of(slice(seat, seat + 1), homes)
                flat = torch.cat([p.reshape(-1).to(call.scale_dtype()) for p in parts if p is not None])
                self._sums[expert] = self._sums[expert].add_(flat) if expert in self._sums else flat

    def _synchronise(self, call: Call) -> None:
        if not (self._layout.sum(axis=0) > 1).any():
            return
        with call.open_call.clock.phase("replicas"):
            sent = synchronise(call.comm, self._layout, self._sums)
        call.open_call.sent("replicas", sent)
        self._sums = {}

    @property
    def _layout(self) -> Hosts:
        assert self._hosts_RE is not None, "forward has set it"
        return self._hosts_RE


class FromShards:
    """Sharded storage, as a layer has it, behind a caller that gives and takes whole home experts.

    Args:
        comm, cuts, per_step: as of `Sharded`; per_step also keeps gradients where they are until the step ends.
        ends: whether the step ends with this micro-batch.
    """

    homes = False

    def __init__(self, comm: Comm, cuts: Cuts, ends: Ends, *, per_step: bool) -> None:
        self._sharded = Sharded(comm, cuts, per_step=per_step)
        self._cuts, self._ends, self._per_step = cuts, ends, per_step
        self._step: int | None = None  # that the shards are of
        self._shards: list[Tensor] = []

    def borrow(self, call: Call, gate_up: Tensor, down: Tensor) -> Weights:
        """Cut the home experts once a step; the rest is the sharded storage's."""
        step = -1 if call.moment is None else call.moment.step
        if step != self._step:
            self._sharded.release()
            whole = zip((gate_up, down), self._cuts, strict=True)
            self._shards = [scatter_homes(call.comm, call.cast(weight), cut) for weight, cut in whole]
            self._step = step
        return self._sharded.borrow(call, self._shards[0], self._shards[1])

    def give_back(self, call: Call, grads: WeightGrads) -> Home:
        """Gradients to the shards, and from there home, where the caller compares them."""

        def home() -> Pair:
            if self._per_step and not self._ends():
                shards, _ = return_shards(call.comm, call.seats, *grads.foreign, self._cuts)
            else:
                shards = self._sharded.give_back(call, grads)()
            pairs = zip(shards, self._cuts, strict=True)
            gate_up, down = (None if s is None else gather_homes(call.comm, s, cut) for s, cut in pairs)
            return gate_up, down

        return home


def _uncounted(call: Call, gate_up: Tensor, down: Tensor) -> Weights:
    """Weights of all seats, brought here outside the clock."""
    gate_up, down = call.cast(gate_up), call.cast(down)
    slots = None
    if call.seats.spread:
        there = fetch_replicas(call.comm, call.seats, gate_up, down).wait()
        call.book_slots(*there)
        slots = Slots.here(*there)
    return Weights(gate_up=gate_up, down=down, activation=call.activation, slots=slots)
