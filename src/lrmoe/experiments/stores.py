"""Storage of the executed systems: what each really moves is executed under the clock and counted, the rest is not.

    KeptCopies      copies fetched at the call, kept until its backward           FasterMoE, LLEP
    Residents       copies that stay with their ranks; layout changes and the     FlexMoE, SmartMoE, EPLB
                    sum of copies' gradients are executed and counted
    Rebuilt         experts built from shards on all ranks, at every call or      LAER-MoE
                    where the step or the layout changed; gradients scattered     SYMI
                    to the shards at every call, or once a step

A system that the rig only executes trains nothing, so its copies have to be brought up to date, and gradients brought
home to be compared, where the real system does neither: that is done outside the clock and not counted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lrmoe.distributed.replicas import fetch_replicas, return_gradients
from lrmoe.distributed.sharded import fetch_shards, gather_homes, return_shards, scatter_homes
from lrmoe.experiments.residence import Hosts, change, hosts_of, synchronise
from lrmoe.layer.call import Call
from lrmoe.layer.experts import WeightGrads, Weights
from lrmoe.layer.weights import Lease, Owned
from lrmoe.planning.problem import IntArray
from lrmoe.planning.shards import Cut

Ends = Callable[[], bool]  # whether the micro-batch that is executed is the last of its step


class KeptCopies:
    """Owned weights; the copies of a call serve its backward too, where the plan says so.

    Plans of the package's systems say it in their traffic; without one, copies are fetched again.
    """

    homes = True

    def __init__(self) -> None:
        self._owned = Owned()
        self._held: tuple[Call, Lease] | None = None

    def borrow(self, call: Call, gate_up: Tensor, down: Tensor) -> Lease:
        """Fetched in forward; in backward what forward left."""
        if self._held is not None and self._held[0] is call:
            lease, self._held = self._held[1], None
            return lease
        lease = self._owned.borrow(call, gate_up, down)
        if not call.plan.moved.refetch_R.any():
            self._held = (call, lease)
        return lease

    def give_back(self, call: Call, grads: WeightGrads) -> tuple[Tensor | None, Tensor | None]:
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
        self._held: tuple[Call, Lease] | None = None

    def borrow(self, call: Call, gate_up: Tensor, down: Tensor) -> Lease:
        """In forward the layout changes to the plan's; in backward it is there."""
        if self._held is not None and self._held[0] is call:
            lease, self._held = self._held[1], None
            return lease
        self._move(call, gate_up, down)
        lease = _uncounted(call, gate_up, down)
        self._held = (call, lease)
        return lease

    def give_back(self, call: Call, grads: WeightGrads) -> tuple[Tensor | None, Tensor | None]:
        """Add up this rank's copies over the step, sum over copies at its end; bring home what the caller compares."""
        self._collect(call, grads)
        if self._ends():
            self._synchronise(call)
        if call.seats.spread:
            foreign = (grads.slot_gate_up, grads.slot_down)
            return_gradients(call.comm, call.seats, foreign, (grads.gate_up, grads.down))
        return grads.gate_up, grads.down

    def _move(self, call: Call, gate_up: Tensor, down: Tensor) -> None:
        new_RE, old_RE = hosts_of(call.plan), self._hosts_RE
        if old_RE is not None and (new_RE != old_RE).any():
            if self._sums:  # gradients of this step's earlier micro-batches belong to the old copies
                self._synchronise(call)
            params = gate_up[0].numel() + down[0].numel()
            size = params * (call.compute_dtype.itemsize + self._state_bytes)
            with call.open_call.clock.phase("replicas"):
                sent = change(call.comm, old_RE, new_RE, expert_bytes=size)
            call.open_call.sent("replicas", sent)
        self._hosts_RE = new_RE

    def _collect(self, call: Call, grads: WeightGrads) -> None:
        assert self._hosts_RE is not None, "forward has set it"
        mine = call.seats.of(call.comm.rank)
        homes = call.seats.topology.experts_per_rank
        for seat, expert in enumerate(call.seats.expert_Q[mine].tolist()):
            if not self._hosts_RE[call.comm.rank, expert]:
                continue  # the home of an expert that lives elsewhere
            parts = grads.of(slice(seat, seat + 1), homes)
            flat = torch.cat([p.reshape(-1).to(call.scale_dtype()) for p in parts if p is not None])
            self._sums[expert] = self._sums[expert].add_(flat) if expert in self._sums else flat

    def _synchronise(self, call: Call) -> None:
        assert self._hosts_RE is not None, "forward has set it"
        with call.open_call.clock.phase("replicas"):
            sent = synchronise(call.comm, self._hosts_RE, self._sums)
        call.open_call.sent("replicas", sent)
        self._sums = {}


class Rebuilt:
    """Experts built from shards that all ranks hold equal parts of.

    Args:
        ends: whether the step ends with this micro-batch.
        cuts: how experts are cut.
        every_call: build and scatter at every call, in backward again; otherwise only what a step needs.
    """

    homes = False

    def __init__(self, ends: Ends, cuts: tuple[Cut, Cut], *, every_call: bool) -> None:
        self._ends, self._cuts, self._every_call = ends, cuts, every_call
        self._built: tuple[int, IntArray, IntArray] | None = None  # step, experts and ranks of the seats
        self._lease: Lease | None = None

    def borrow(self, call: Call, gate_up: Tensor, down: Tensor) -> Lease:
        """Build the experts of this rank's seats, unless those that it has are still the right ones."""
        if self._lease is None or not self._fits(call):
            self._lease = self._build(call, gate_up, down)
            self._built = (_step(call), call.seats.expert_Q, call.seats.rank_Q)
        lease = self._lease
        if self._every_call:
            self._lease = None
        return lease

    def give_back(self, call: Call, grads: WeightGrads) -> tuple[Tensor | None, Tensor | None]:
        """Scatter the gradients to their shards, and bring home what the caller compares."""
        wide = [None if g is None else g.to(call.scale_dtype()) for g in (grads.gate_up, grads.down)]
        cuts = self._cuts
        if self._every_call or self._ends():
            with call.open_call.clock.phase("replicas"):
                shards, sent = return_shards(call.comm, call.seats, wide[0], wide[1], cuts)
            call.open_call.sent("replicas", sent)
        else:  # it would stay where it is until the step ends
            shards, _ = return_shards(call.comm, call.seats, wide[0], wide[1], cuts)
        home = [
            None if s is None else gather_homes(call.comm, s, cut)
            for s, cut in zip(shards, cuts, strict=True)
        ]
        return home[0], home[1]

    def _fits(self, call: Call) -> bool:
        assert self._built is not None, "set with the lease"
        step, expert_Q, rank_Q = self._built
        same = np.array_equal(expert_Q, call.seats.expert_Q) and np.array_equal(rank_Q, call.seats.rank_Q)
        return same and step == _step(call)

    def _build(self, call: Call, gate_up: Tensor, down: Tensor) -> Lease:
        cuts = self._cuts
        shards = [
            scatter_homes(call.comm, call.cast(w), cut) for w, cut in zip((gate_up, down), cuts, strict=True)
        ]
        with call.open_call.clock.phase("replicas"):
            pending = fetch_shards(call.comm, call.seats, shards[0], shards[1], cuts)
        call.open_call.sent("replicas", pending.sent_bytes)

        def wait() -> Weights:
            with call.open_call.clock.phase("replicas"):
                whole = pending.wait()
            return Weights(gate_up=whole[0], down=whole[1], activation=call.activation)

        return wait


def _step(call: Call) -> int:
    return -1 if call.moment is None else call.moment.step


def _uncounted(call: Call, gate_up: Tensor, down: Tensor) -> Lease:
    """Weights of all seats, brought here outside the clock."""
    gate_up, down = call.cast(gate_up), call.cast(down)
    slots: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if call.seats.spread:
        slots = fetch_replicas(call.comm, call.seats, gate_up, down).wait()
    weights = Weights(
        gate_up=gate_up,
        down=down,
        activation=call.activation,
        slot_gate_up=slots[0],
        slot_down=slots[1],
    )
    return lambda: weights
