"""What the parts of one backward share: made by backward.py, read by kept_rows.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from lrmoe.layer.call import Call
from lrmoe.layer.forward import Walked
from lrmoe.layer.reroute import Route
from lrmoe.layer.seat_weights import WeightGrads, Weights
from lrmoe.layer.weights import Home


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which inputs of the layer need a gradient."""

    x: bool
    alpha: bool
    gate_up: bool
    down: bool


@dataclass(kw_only=True, eq=False)
class Later:
    """What is computed while input gradients travel: first projections' weight gradients, foreign seats' first.

    Attributes:
        gradients: compute them, of foreign or of home seats.
        home: gradients of the parameters; those of copies have begun to travel.
    """

    gradients: list[Callable[..., None]] = field(default_factory=list)
    home: Home | None = None

    def run(self, give_back: Callable[[], Home]) -> None:
        """Compute everything; copies' gradients go home as soon as they are there."""
        for gradient in self.gradients:
            gradient(foreign=True)
        self.home = give_back()
        for gradient in self.gradients:
            gradient(foreign=False)
        self.gradients.clear()


@dataclass(frozen=True, kw_only=True, eq=False)
class Back:
    """What the parts of a backward share.

    Attributes:
        walked: what forward left. x_TH: the layer's input in the compute dtype, where inputs travel again.
        g_TH: gradient at the output. order_N: flat pair ids by expert.
        scale_N: routing weight times 1/pi, weight_N: 1/pi or None for 1; both by expert.
        later: takes what is left for the time while input gradients travel; None where nothing is.
    """

    call: Call
    walked: Walked
    route: Route
    weights: Weights
    grads: WeightGrads
    add: bool
    x_TH: Tensor | None
    g_TH: Tensor
    alpha_TK: Tensor
    order_N: Tensor
    scale_N: Tensor
    weight_N: Tensor | None
    wanted: Wanted
    later: Later | None

    def source(self, at: Tensor | None) -> Tensor | None:
        """Positions, among this source's pairs by expert, of the kept pairs at positions of the order of sending."""
        source_P = self.route.source_P
        return at if source_P is None else source_P if at is None else source_P[at]
