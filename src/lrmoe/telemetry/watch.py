"""Watches the energy that a biased rule leaves out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from lrmoe.telemetry.record import CallRecord

log = logging.getLogger(__name__)

# Share of the squared scores that `topk` may leave out. Experiments with it cost no measurable loss below 0.1 % and a
# clear one above 0.2 %: what is always dropped is coherent, and a larger batch does not help.
DROPPED_ENERGY_LEVEL = 0.002
_DECAY = 0.9  # of the running sums, by call
_FIRST = 10  # calls of a layer before it is judged


class EnergyWatch:
    """Says once per layer that the running share of dropped energy is above `DROPPED_ENERGY_LEVEL`, on the first rank.

    It reads finished records, so it never waits for a device.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, float, float]] = {}  # calls, running energy, running energy dropped
        self._said: set[int] = set()

    def look(self, call: Sequence[CallRecord]) -> None:
        """Take one call in, and mark its records where the layer's running share is too high.

        Args:
            call: all ranks' records of it, or this rank's alone.
        """
        energy, dropped = (sum(getattr(r, name) for r in call) for name in ("energy", "energy_dropped"))
        if not energy or call[0].kept == call[0].pairs:
            return
        calls, energy_before, dropped_before = self._sums.get(call[0].layer, (0, 0.0, 0.0))
        calls, energy = calls + 1, _DECAY * energy_before + energy
        dropped = _DECAY * dropped_before + dropped
        self._sums[call[0].layer] = calls, energy, dropped
        if calls < _FIRST or dropped / energy <= DROPPED_ENERGY_LEVEL:
            return
        for record in call:
            record.dropped_energy_high = True
        self._say(call[0].layer, dropped / energy)

    def _say(self, layer: int, share: float) -> None:
        if layer in self._said:
            return
        self._said.add(layer)
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        log.warning(
            "lrmoe: MoE layer %d: what backward leaves out holds %.2f %% of the scores' energy (running mean), above "
            "%.1f %%: estimator='topk' is biased by it and may cost loss. Lower max_drop, or use estimator='sampled'.",
            layer,
            100 * share,
            100 * DROPPED_ENERGY_LEVEL,
        )
