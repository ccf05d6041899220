"""What a benchmarked layer call computes with: inputs, routing, parameters and the gradient at its output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """One rank's inputs and parameters; all but the ids and the upstream gradient need gradients.

    Attributes:
        x, grad: (T, H), inputs and the gradient at the output. ids: int64 (T, K). alpha: (T, K).
        gate_up: (E, 2I, H). down: (E, H, I), of the experts that live at the rank.
    """

    x: Tensor
    ids: Tensor
    alpha: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What gets gradients."""
        return self.x, self.alpha, self.gate_up, self.down

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters."""
        return self.gate_up.nbytes + self.down.nbytes

    def clear(self) -> None:
        """Forget gradients."""
        for tensor in self.leaves:
            tensor.grad = None
