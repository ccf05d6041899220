"""Where a call gets its experts' weights from, and where their gradients go: one class per storage kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from lrmoe.distributed.replicas import fetch_replicas, start_return
from lrmoe.layer.seat_weights import Pair, Slots, Wait, WeightGrads, Weights

if TYPE_CHECKING:
    from lrmoe.layer.call import Call

Home = Callable[[], Pair]  # gradients of the parameters, waited for


class Storage(Protocol):
    """A storage kind, as forward and backward meet it. Every rank makes the same calls in the same order."""

    @property
    def homes(self) -> bool:
        """Whether every home expert has a seat (a rank owns its weights) or only the plan's instances."""

    def borrow(self, call: Call, gate_up: Tensor, down: Tensor) -> Weights:
        """Weights of this rank's seats; those that lie elsewhere come once `Weights.start` has been called."""

    def give_back(self, call: Call, grads: WeightGrads) -> Home:
        """Start to turn the gradients of this rank's seats into those of the parameters; the result waits for them.

        Those of foreign seats are complete, those of home seats once the result is called.
        """


@dataclass(frozen=True)
class Owned:
    """The home rank holds an expert's weights and optimizer state; foreign seats borrow copies for a call."""

    homes: bool = True

    def borrow(self, call: Call, gate_up: Tensor, down: Tensor) -> Weights:
        """Home weights where they lie; copies of foreign experts into slots."""
        gate_up, down = call.cast(gate_up), call.cast(down)

        def begin() -> Wait:
            with call.open_call.clock.phase("replicas"):
                pending = fetch_replicas(call.comm, call.seats, gate_up, down)
            call.open_call.sent("replicas", pending.sent_bytes)
            call.book_slots(*pending.slots)

            def wait() -> tuple[Tensor, Tensor]:
                with call.open_call.clock.phase("replicas"):
                    return pending.wait()

            return wait

        slots = Slots(call.foreign, begin) if call.seats.spread else None
        return Weights(gate_up=gate_up, down=down, activation=call.activation, slots=slots)

    def give_back(self, call: Call, grads: WeightGrads) -> Home:
        """Home gradients, those of copies added once in a fixed order."""
        if not call.seats.spread or not (grads.needs(0) or grads.needs(1)):
            return lambda: grads.home
        with call.open_call.clock.phase("replicas"):
            returning = start_return(call.comm, call.seats, grads.foreign, grads.home)
        call.open_call.sent("replicas", returning.sent_bytes)

        def wait() -> Pair:
            with call.open_call.clock.phase("replicas"):
                returning.wait()
            return grads.home

        return wait
