"""The record of one layer call on one rank, and the list that collects them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lrmoe.planning.problem import IntArray
from lrmoe.telemetry.clock import PHASES, PhaseClock
from lrmoe.telemetry.ledger import Ledger, buffer_peak

if TYPE_CHECKING:
    from lrmoe.telemetry.watch import EnergyWatch

OBSERVED = "observed."


@dataclass(kw_only=True)
class CallRecord:
    """One layer call as this rank saw it.

    Loads, counts and quotas are global (every rank has them). Energies are this rank's share: sums over the pairs this
    rank chose among (those of its own experts, or with `selection="local"` its own pairs), so that adding the ranks'
    records gives the call's figures. `ms` is CPU time of the rank's own thread
    per phase (event time on CUDA), `bytes` what this rank sent to other ranks, `mem` bytes allocated per part.
    `bytes_saved_lean` is what one row per pair would have sent more than the lean wire did: rows, less what only a lean
    wire sends beside them (routing weights, row numbers, row counts). Under pruning it is that of the pairs that this
    call moved; one row per pair may seat others, and so move others.
    `peak_measured` is the most that booked buffers held at once (on CUDA, the allocator), `peak_predicted` what a call
    under a budget was predicted to need at most, index vectors and operators' results included.
    `check_cosine` and `check_relative_error` compare the pruned gradient of all ranks with the exact one, where
    `check_every` chose the call; else None.
    `dropped_energy_high`: with `estimator="topk"`, the layer's running share of dropped energy is above its level.
    `control` says how much could be dropped and why (names in docs/telemetry.md), the same on all ranks;
    `variance_known` is what past scores alone predicted of `added_variance`, None before there are any.
    `counts_RE`, int64 (R, E), pairs from each source to each expert, stays only where telemetry keeps it for a trace.
    """

    step: int
    micro_batch: int
    layer: int
    world_size: int
    tokens: int
    pairs: int
    kept: int
    drop_reason: str
    counts_E: list[int]
    quota_E: list[int]
    forward_load_R: list[int]
    backward_load_R: list[int]
    replicas_R: list[int] = field(default_factory=list)
    rows_forward_local: int = 0
    rows_backward_local: int = 0
    energy: float = 0.0
    energy_dropped: float = 0.0
    variance_added: float = 0.0
    nonfinite_scores: int = 0
    variance_known: float | None = None
    control: dict[str, float] = field(default_factory=dict)
    chunks: int = 1
    bytes_saved_lean: int = 0
    ms: dict[str, float] = field(default_factory=dict)
    wall_ms: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    mem: dict[str, int] = field(default_factory=dict)
    mem_predicted: dict[str, int] = field(default_factory=dict)
    peak_predicted: int = 0
    peak_measured: int = 0
    recomputed: bool = False
    observed: dict[str, float] = field(default_factory=dict)
    check_cosine: float | None = None
    check_relative_error: float | None = None
    dropped_energy_high: bool = False
    counts_RE: IntArray | None = field(default=None, compare=False, repr=False)

    @property
    def kept_share(self) -> float:
        """Kept pairs over all pairs; 1 for an empty call."""
        return self.kept / self.pairs if self.pairs else 1.0

    @property
    def forward_peak(self) -> float:
        """Most loaded rank in forward over the mean load."""
        return self._over_mean(self.forward_load_R)

    @property
    def backward_peak(self) -> float:
        """Most loaded rank in backward over the mean load of the complete call."""
        return self._over_mean(self.backward_load_R)

    @property
    def dropped_energy(self) -> float:
        """Share of the scores' energy (sum of squared scores) that left-out pairs held, on this rank."""
        return self.energy_dropped / self.energy if self.energy else 0.0

    @property
    def added_variance(self) -> float:
        """Variance added by sampling, over the sum of squared scores, on this rank."""
        return self.variance_added / self.energy if self.energy else 0.0

    @property
    def replicas(self) -> int:
        """Copies of experts away from their homes, over all ranks."""
        return sum(self.replicas_R)

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sent to other ranks in all phases."""
        return sum(self.bytes.values())

    @property
    def wire_bytes_row_per_pair(self) -> int:
        """Bytes this rank would have sent with one row per pair; equal to `wire_bytes` where that is what it sent."""
        return self.wire_bytes + self.bytes_saved_lean

    @property
    def buffer_peak_bytes(self) -> int:
        """Most bytes of token buffers alive at once on this rank."""
        return buffer_peak(self.mem)

    @property
    def wall_total_ms(self) -> float:
        """Wall milliseconds of all phases."""
        return sum(self.wall_ms.values())

    def _over_mean(self, load_R: list[int]) -> float:
        return max(load_R) * self.world_size / self.pairs if self.pairs else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Flat, JSON-able, under the names of the telemetry reference."""
        names = (
            "step micro_batch layer tokens pairs kept kept_share forward_peak backward_peak dropped_energy "
            "added_variance nonfinite_scores chunks replicas drop_reason wire_bytes wire_bytes_row_per_pair "
            "buffer_peak_bytes dropped_energy_high"
        )
        flat: dict[str, Any] = {name: getattr(self, name) for name in names.split()}
        for phase in PHASES:
            flat[f"bytes_{phase}"] = self.bytes.get(phase, 0)
            flat[f"ms_{phase}"] = self.ms.get(phase, 0.0)
            flat[f"wall_ms_{phase}"] = self.wall_ms.get(phase, 0.0)
        flat.update({f"mem_{part}_measured": size for part, size in self.mem.items()})
        flat.update({f"mem_{part}_predicted": size for part, size in self.mem_predicted.items()})
        flat["mem_peak_predicted"], flat["mem_peak_measured"] = self.peak_predicted, self.peak_measured
        flat.update(self.control)
        flat.update({f"observed_{name}": value for name, value in self.observed.items()})
        if self.check_cosine is not None:
            flat.update(check_cosine=self.check_cosine, check_relative_error=self.check_relative_error)
        return flat


@dataclass(eq=False)
class OpenCall:
    """A call in flight: its record, and the instruments that are read into it when somebody looks.

    `pending` holds device scalars by record field (or OBSERVED + name), so that the call itself never waits for them.
    `finished` is set by the call's first backward, `watched` when its energy has been looked at; an open call that is
    `repeated` stands for a further backward through a retained graph and is never recorded.
    """

    record: CallRecord
    clock: PhaseClock
    ledger: Ledger = field(default_factory=Ledger)
    pending: dict[str, Tensor] = field(default_factory=dict)
    finished: bool = False
    repeated: bool = False
    watched: bool = False

    def sent(self, phase: str, size: int) -> None:
        """Book bytes sent to other ranks under a phase."""
        self.record.bytes[phase] = self.record.bytes.get(phase, 0) + size

    def close(self) -> CallRecord:
        """Read clock, ledger and figures that are still on the device into the record."""
        for name, value in self.pending.items():
            self._store(name, value.item())
        self.pending.clear()
        self.record.ms, self.record.wall_ms = self.clock.read()
        self.record.mem = self.ledger.read()
        self.record.peak_measured = self.ledger.peak
        return self.record

    def _store(self, name: str, value: float) -> None:
        if name.startswith(OBSERVED):
            self.record.observed[name.removeprefix(OBSERVED)] = value
        else:
            setattr(self.record, name, value)


class Telemetry:
    """Collects finished calls. A training call is finished after its backward.

    Attributes:
        keep_counts: whether records keep their counts per source and expert, for a trace (R x E integers a call).
        watch: looks at the dropped energy of finished calls when they are read; None where no rule is biased.
    """

    def __init__(self, limit: int = 4096) -> None:
        self.keep_counts = False
        self.watch: EnergyWatch | None = None
        self._limit = limit
        self._calls: deque[OpenCall] = deque()

    @property
    def records(self) -> list[CallRecord]:
        """Records of finished calls since the last drain, oldest first."""
        return [self._read(call) for call in self._calls]

    def look(self) -> None:
        """Let `watch` see what has finished since it last did; waits for the device where that is still at work."""
        for call in self._calls:
            if self.watch is not None and not call.watched:
                self._read(call)

    def add(self, call: OpenCall) -> None:
        """Add a finished call; beyond the limit the oldest goes."""
        if not self.keep_counts:
            call.record.counts_RE = None
        self._calls.append(call)
        if len(self._calls) > self._limit:
            self._forget(self._calls.popleft())

    def _read(self, call: OpenCall) -> CallRecord:
        record = call.close()
        if self.watch is not None and not call.watched:
            call.watched = True
            self.watch.look([record])
        return record

    def _forget(self, call: OpenCall) -> None:
        """Called with a record that nobody drained in time."""

    def drain(self) -> list[CallRecord]:
        """Records of finished calls, which are then forgotten, in the order (step, micro-batch, layer)."""
        records = sorted(self.records, key=lambda r: (r.step, r.micro_batch, r.layer))
        self._calls.clear()
        return records
