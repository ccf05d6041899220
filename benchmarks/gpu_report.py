"""What the checks of a machine share: the layer they run, and the figures and verdicts they leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from plain import Case, Shape, over_limit
from torch import Tensor

from lrmoe import LRMoEConfig, MoELayer
from lrmoe.telemetry.figures import figure


def make_layer(shape: Shape, **fields: Any) -> MoELayer:
    """A layer on one device that prunes from the first step."""
    return MoELayer(
        num_experts=shape.experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        config=LRMoEConfig(warmup_steps=0, **fields),
    )


def run_layer(layer: MoELayer, case: Case) -> list[Tensor]:
    """Output and gradients of the layer."""
    out = layer(case.hidden, case.ids, case.weights, case.gate_up, case.down, training=True)
    return [out.detach(), *torch.autograd.grad(out, case.leaves(), case.grad)]


class Report:
    """Figures as they come, and which checks failed."""

    def __init__(self, *, seed: int, device: torch.device) -> None:
        self.figures: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self._context = {"seed": seed, "device": device.type}

    def add(self, name: str, value: float, unit: str) -> None:
        """One figure; all of this script's are better when lower."""
        self.figures.append(figure(f"gpu_check.{name}", value, unit, "lower", **self._context))

    def check(
        self, name: str, actual: Sequence[Tensor], exact: Sequence[Tensor], plain: Sequence[Tensor]
    ) -> None:
        """Largest error over the allowed one, over all tensors given."""
        worst = max(over_limit(*triple) for triple in zip(actual, exact, plain, strict=True))
        self.at_most(f"{name}.error_over_limit", worst, 1, "ratio", failed=name)

    def at_most(self, name: str, value: float, limit: float, unit: str, *, failed: str | None = None) -> None:
        """A figure that fails above a limit, or where it is not a number.

        Args:
            failed: what is said to have failed; the figure's name by default.
        """
        self.add(name, value, unit)
        if not value <= limit:
            self.failed.append(failed or name)
