"""Where a call gets its experts' weights from, and where their gradients go: one class per storage kind.

Shape letters: L home experts, F foreign seats, S seats of this rank, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from lrmoe.distributed.replicas import fetch_replicas, return_gradients
from lrmoe.layer.buffers import WeightGrads, Weights

if TYPE_CHECKING:
    from lrmoe.layer.call import Call

Lease = Callable[[], Weights]  # waits for what was fetched; every call gives the same


class Storage(Protocol):
    """A storage kind, as forward and backward meet it. Every rank makes the same calls in the same order."""

    @property
    def homes(self) -> bool:
        """Whether every home expert has a seat (a rank owns its weights) or only the plan's instances."""

    def borrow(self, call: Call, gate_up: Tensor, down: Tensor) -> Lease:
        """Start to bring the weights of this rank's seats here; the result waits for them."""

    def give_back(self, call: Call, grads: WeightGrads) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the parameters from those of this rank's seats."""


@dataclass(frozen=True)
class Owned:
    """The home rank holds an expert's weights and optimizer state; foreign seats borrow copies for a call."""

    homes: bool = True

    def borrow(self, call: Call, gate_up: Tensor, down: Tensor) -> Lease:
        """Home weights where they lie; copies of foreign experts into slots."""
        home_gate_up, home_down = call.cast(gate_up), call.cast(down)
        if not call.seats.spread:
            home = Weights(gate_up=home_gate_up, down=home_down, activation=call.activation)
            return lambda: home
        with call.open_call.clock.phase("replicas"):
            pending = fetch_replicas(call.comm, call.seats, home_gate_up, home_down)
        call.open_call.sent("replicas", pending.sent_bytes)

        @cache
        def wait() -> Weights:
            with call.open_call.clock.phase("replicas"):
                slot_gate_up, slot_down = pending.wait()
            return Weights(
                gate_up=home_gate_up,
                down=home_down,
                activation=call.activation,
                slot_gate_up=slot_gate_up,
                slot_down=slot_down,
            )

        return wait

    def give_back(self, call: Call, grads: WeightGrads) -> tuple[Tensor | None, Tensor | None]:
        """Home gradients, those of copies added once in a fixed order."""
        if call.seats.spread and (grads.gate_up is not None or grads.down is not None):
            with call.open_call.clock.phase("replicas"):
                sent = return_gradients(
                    call.comm, call.seats, (grads.slot_gate_up, grads.slot_down), (grads.gate_up, grads.down)
                )
            call.open_call.sent("replicas", sent)
        return grads.gate_up, grads.down
