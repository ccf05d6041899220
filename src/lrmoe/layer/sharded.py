"""Sharded storage as a call meets it: seats are built from shards, their gradients go back to shards.

Shape letters: E experts, P elements of a shard, S seats of this rank, H hidden, I expert width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lrmoe.distributed import Comm
from lrmoe.distributed.sharded import Cuts, KeptShards, fetch_shards, return_shards
from lrmoe.layer.seat_weights import Pair, Slots, Wait, WeightGrads, Weights
from lrmoe.layer.weights import Home

if TYPE_CHECKING:
    from lrmoe.layer.call import Call


class Sharded:
    """Every rank holds a part of every expert; a rank's seats are the plan's instances, wherever homes are.

    Parameters of a call are shards: gate_up (E, P), down (E, P), P by projection.

    Args:
        comm: the ranks. cuts: `expert_cuts(H, I, ranks)`.
        per_step: what training calls build stays until `release`, for calls with the same layout; otherwise it is
            built at each call, and again in backward.
    """

    homes = False

    def __init__(self, comm: Comm, cuts: Cuts, *, per_step: bool) -> None:
        self._cuts = cuts
        self._kept = KeptShards(comm, cuts) if per_step else None

    def borrow(self, call: Call, gate_up: Tensor, down: Tensor) -> Weights:
        """Begin to build this rank's seats, which are slots like those of copies."""
        shards = (call.cast(gate_up), call.cast(down))
        if not call.open_call.ledger.sealed:
            call.open_call.ledger.add("weights", *shards)
        if call.comm.size == 1:
            whole = fetch_shards(call.comm, call.seats, *shards, self._cuts).wait()
            return Weights(gate_up=whole[0], down=whole[1], activation=call.activation)
        with call.open_call.clock.phase("replicas"):
            if self._kept is not None and call.moment is not None:
                pending = self._kept.fetch(call.seats, *shards)
            else:
                pending = fetch_shards(call.comm, call.seats, *shards, self._cuts)
        call.open_call.sent("replicas", pending.sent_bytes)

        def begin() -> Wait:  # no rank has home seats to compute with meanwhile
            with call.open_call.clock.phase("replicas"):
                gate_up, down = pending.wait()
            call.book_slots(gate_up, down)
            return lambda: (gate_up, down)

        none = [s.new_empty((0, cut.rows, cut.columns)) for s, cut in zip(shards, self._cuts, strict=True)]
        slots = Slots(len(call.seated), begin)
        return Weights(gate_up=none[0], down=none[1], activation=call.activation, slots=slots)

    def give_back(self, call: Call, grads: WeightGrads) -> Home:
        """Gradients of this rank's shards: those of all seats, added once in a fixed order."""
        alone = call.comm.size == 1

        def wait() -> Pair:
            seats = grads.home if alone else grads.foreign
            with call.open_call.clock.phase("replicas"):
                shards, sent = return_shards(call.comm, call.seats, *seats, self._cuts)
            call.open_call.sent("replicas", sent)
            call.open_call.ledger.add("grads", *shards)
            return shards

        return wait

    def release(self) -> None:
        """Forget what was built: the optimizer has changed the shards."""
        if self._kept is not None:
            self._kept.release()
