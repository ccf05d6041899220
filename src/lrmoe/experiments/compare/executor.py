"""Executes the recorded calls of another system's trajectory, and holds the results to those of its trainer.

Systems with exact gradients would train the same weights: one of them trains, the others run every layer call with its
inputs, weights and upstream gradients, each with its own plans, transport and clock. What a system's own calls take and
send are its figures; what the rig does around them is not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.checkpoint.agree import rank_of, size_of
from lrmoe.errors import InfeasibleError, LRMoEError
from lrmoe.experiments.trajectories.recorder import INPUTS, RecordedCall
from lrmoe.layer import MoELayer, StepClock
from lrmoe.telemetry import CallRecord, Telemetry

# Largest difference from the trainer, in eps of the largest entry. Sums of a thousand products in another order differ
# by some eps; types whose sums are made in fp32 differ by the rounding of a few parts.
LIMIT = {torch.float64: 64.0, torch.float32: 64.0, torch.bfloat16: 8.0, torch.float16: 8.0}
_TENSORS = ("output", *(f"gradient of {name}" for name in INPUTS))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference of one system's execution from the trainer's results.

    Attributes:
        eps: in eps of the largest entry of the tensor. limit: what is allowed for its dtype.
        layer, tensor, rank: where.
    """

    eps: float = 0.0
    limit: float = 1.0
    layer: int = 0
    tensor: str = ""
    rank: int = 0

    @property
    def share(self) -> float:
        """Of what is allowed."""
        return self.eps / self.limit


def differs_by(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference in eps of the largest entry; infinite where only one is finite."""
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel() or torch.equal(found, expected):
        return 0.0
    largest = expected.abs().max().item()
    if not expected.isfinite().all():
        return 0.0 if not found.isfinite().all() else math.inf
    off = (found - expected).abs().max().item()
    if math.isnan(off):
        return math.inf
    return off / (torch.finfo(expected.dtype).eps * largest) if largest else math.inf


class Executor:
    """One system's layers, run on recorded calls.

    Args:
        name: of the system. build: makes its layer in the place of the trainer's.
        group: of the ranks.

    Attributes:
        worst: the largest difference so far. infeasible: why the system cannot run in its budget, or empty.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[MoELayer, StepClock, Telemetry], MoELayer],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.name = name
        self.worst = Difference()
        self.infeasible = ""
        self._build = build
        self._group = group
        self._clock, self._telemetry = StepClock(), Telemetry()
        self._clock.expected = True
        self._layers: dict[int, MoELayer] = {}

    def execute(self, calls: Sequence[RecordedCall]) -> None:
        """Run one micro-batch: all layers forward, then all layers backward. Every rank calls it.

        A call that does not fit the budget, which all ranks find alike, sets `infeasible` and ends the system.

        Raises:
            LRMoEError: a result differs from the trainer's by more than rounding, on any rank; on every rank.
        """
        try:
            self._execute(calls)
        except InfeasibleError as error:
            self.infeasible = str(error)

    def _execute(self, calls: Sequence[RecordedCall]) -> None:
        runs = [_Run(call, self._layer(call)) for call in calls]
        for run in runs:
            run.forward()
        for run in reversed(runs):
            run.backward()
        self._check([found for run in runs for found in run.differences()])

    def end_step(self) -> list[CallRecord]:
        """The optimizer step is done: this rank's records of it, in the order of the calls."""
        self._clock.advance()
        return self._telemetry.drain()

    def _layer(self, call: RecordedCall) -> MoELayer:
        number = call.layer.layer
        if number not in self._layers:
            self._layers[number] = self._build(call.layer, self._clock, self._telemetry)
        return self._layers[number]

    def _check(self, found: Sequence[Difference]) -> None:
        worst = max(found, key=lambda difference: difference.share, default=Difference())
        worst = self._worst_of_all(dataclasses.replace(worst, rank=rank_of(self._group)))
        if worst.share > self.worst.share:
            self.worst = worst
        if not worst.share <= 1:
            raise LRMoEError(
                f"system {self.name!r}, step {self._clock.step + 1}, layer {worst.layer}, rank {worst.rank}: the "
                f"{worst.tensor} differs from the trainer's by {worst.eps:.3g} eps of its largest entry; rounding "
                f"explains {worst.limit:g}"
            )

    def _worst_of_all(self, mine: Difference) -> Difference:
        """The largest over all ranks, the same on all of them."""
        if size_of(self._group) == 1:
            return mine
        place = _TENSORS.index(mine.tensor) if mine.tensor else 0
        row = torch.tensor([mine.eps, mine.limit, mine.layer, place], dtype=torch.float64)
        table = [torch.empty_like(row) for _ in range(size_of(self._group))]
        dist.all_gather(table, row, group=self._group)
        by_rank = [
            Difference(eps=eps, limit=limit, layer=int(layer), tensor=_TENSORS[int(place)], rank=rank)
            for rank, (eps, limit, layer, place) in enumerate(torch.stack(table).tolist())
        ]
        return max(by_rank, key=lambda difference: difference.share)


class _Run:
    """One recorded call in another system's layer."""

    def __init__(self, call: RecordedCall, layer: MoELayer) -> None:
        self._call, self._layer = call, layer
        self._inputs = {
            name: getattr(call, name).detach().requires_grad_(call.gradients[name] is not None)
            for name in INPUTS
        }

    def forward(self) -> None:
        x, alpha, gate_up, down = (self._inputs[name] for name in INPUTS)
        self._output = self._layer(x, self._call.ids, alpha, gate_up, down, training=True)

    def backward(self) -> None:
        self._output.backward(self._call.upstream)

    def differences(self) -> Iterator[Difference]:
        pairs: list[tuple[Tensor | None, Tensor | None]] = [(self._output.detach(), self._call.output)]
        pairs += [(self._inputs[name].grad, self._call.gradients[name]) for name in INPUTS]
        for tensor, (found, expected) in zip(_TENSORS, pairs, strict=True):
            if expected is None:
                continue
            eps = math.inf if found is None else differs_by(found, expected)
            yield Difference(
                eps=eps, limit=LIMIT[expected.dtype], layer=self._call.layer.layer, tensor=tensor
            )
