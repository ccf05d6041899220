"""What one optimizer step cost in the MoE layers, taken over all ranks, and the stated speed of the link.

Ranks that share cores say nothing through wall time about the slowest rank, so the critical path is built from each
rank's own thread CPU time: per layer call and phase the largest over ranks, summed, plus the bytes of the rank that
sends most in that phase over a stated link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lrmoe.errors import RankError
from lrmoe.experiments.compare.memory import ModelMemory, model_memory
from lrmoe.telemetry import CallRecord

LINK_RULE = (
    "Link speed: the one at which exchange is one third of the layer's time under fixed ownership with balanced"
    " counts, that is half of its compute time; taken once from its first steps and the same for all systems."
)


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """Rows per rank of one layer in one step, summed over its calls.

    Attributes:
        layer: index of the MoE layer.
        forward_R, backward_R: rows each rank computed forward and backward.
        counts_E, quota_E: pairs routed to each expert, and those of them that backward kept.
    """

    layer: int
    forward_R: tuple[int, ...]
    backward_R: tuple[int, ...]
    counts_E: tuple[int, ...]
    quota_E: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One optimizer step of one system, over all MoE layer calls and ranks.

    Attributes:
        calls: layer calls in the step.
        phase_ms: per phase, the sum over calls of the largest thread CPU time of any rank, in ms.
        cpu_ms: thread CPU time of all phases, summed over calls and ranks, in ms.
        wall_ms: wall time of all phases and calls of the slowest rank, in ms.
        critical_bytes: sum over calls and phases of the most bytes that any rank sent to others.
        wire_bytes: bytes sent to other ranks, summed over calls, phases and ranks.
        replica_bytes: those of them that are experts' weights, gradients and optimizer states.
        row_per_pair_bytes: what `wire_bytes` would be with one row per pair.
        pairs, kept: (token, expert) pairs of the step, and those that backward kept.
        forward_peak_rows, backward_peak_rows: sum over calls of the rows of the most loaded rank.
        buffer_bytes: largest over ranks of the token buffers that are alive together: the stashes of a micro-batch's
            calls, plus the most that one call needs beside its stash.
        nonfinite_scores: scores that were not finite.
        energy: sum of squared scores, over calls and ranks; 0 where nothing was scored.
        energy_dropped: of the left-out pairs. variance_added: by sampling, in the units of `energy`.
        loads: rows per rank and pairs per expert, one entry per layer.
        memory: bytes by part on the fullest rank.
    """

    calls: int
    phase_ms: Mapping[str, float]
    cpu_ms: float
    wall_ms: float
    critical_bytes: int
    wire_bytes: int
    replica_bytes: int
    row_per_pair_bytes: int
    pairs: int
    kept: int
    forward_peak_rows: int
    backward_peak_rows: int
    buffer_bytes: int
    nonfinite_scores: int
    energy: float
    energy_dropped: float
    variance_added: float
    loads: tuple[LayerLoad, ...]
    memory: ModelMemory

    @property
    def kept_share(self) -> float:
        """Share of the step's pairs that backward kept; 1 where there were none."""
        return self.kept / self.pairs if self.pairs else 1.0

    @property
    def dropped_energy(self) -> float:
        """Share of the scores' energy that left-out pairs held; 0 where nothing was scored."""
        return self.energy_dropped / self.energy if self.energy else 0.0

    @property
    def added_variance(self) -> float:
        """Variance added by sampling over the scores' energy; 0 where nothing was scored."""
        return self.variance_added / self.energy if self.energy else 0.0

    def critical_s(self, link_bytes_per_s: float) -> float:
        """Critical path of the step's MoE layers in seconds."""
        return sum(self.phase_ms.values()) / 1e3 + self.critical_bytes / link_bytes_per_s

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a line of metrics.jsonl."""
        shares = ("kept_share", "dropped_energy", "added_variance")
        values = {**asdict(self), "phase_ms": dict(self.phase_ms)}
        del values["memory"]  # the summary has that of the fullest step
        return {**values, **{name: getattr(self, name) for name in shares}}


def step_cost(records_by_rank: Sequence[Sequence[CallRecord]]) -> StepCost:
    """Take the records of one step of all ranks together.

    Args:
        records_by_rank: per rank, its records of the step; calls in the same order on all ranks.

    Raises:
        RankError: the ranks recorded different calls.
    """
    calls = _calls(records_by_rank)
    return StepCost(
        calls=len(calls),
        phase_ms=_phase_ms(calls),
        cpu_ms=sum(sum(record.ms.values()) for records in records_by_rank for record in records),
        wall_ms=max(sum(record.wall_total_ms for record in records) for records in records_by_rank),
        critical_bytes=sum(_critical_bytes(call) for call in calls),
        wire_bytes=sum(record.wire_bytes for records in records_by_rank for record in records),
        replica_bytes=sum(r.bytes.get("replicas", 0) for records in records_by_rank for r in records),
        row_per_pair_bytes=sum(r.wire_bytes_row_per_pair for records in records_by_rank for r in records),
        pairs=sum(call[0].pairs for call in calls),
        kept=sum(call[0].kept for call in calls),
        forward_peak_rows=sum(max(call[0].forward_load_R) for call in calls),
        backward_peak_rows=sum(max(call[0].backward_load_R) for call in calls),
        buffer_bytes=max(_buffer_bytes(records) for records in records_by_rank),
        nonfinite_scores=sum(record.nonfinite_scores for records in records_by_rank for record in records),
        energy=sum(record.energy for records in records_by_rank for record in records),
        energy_dropped=sum(record.energy_dropped for records in records_by_rank for record in records),
        variance_added=sum(record.variance_added for records in records_by_rank for record in records),
        loads=_loads(calls),
        memory=model_memory(records_by_rank),
    )


class Exchanged(Protocol):
    """What something on all ranks computed and sent: a step, a call.

    Attributes:
        cpu_ms: thread CPU time of all phases, over ranks, in ms. wire_bytes: sent to other ranks, over ranks.
    """

    @property
    def cpu_ms(self) -> float: ...

    @property
    def wire_bytes(self) -> int: ...


def link_speed(costs: Sequence[Exchanged]) -> float | None:
    """Bytes per second at which exchange takes half as long as compute does, both shared evenly by the ranks.

    Exchange is then one third of the layer's time (LINK_RULE). The number of ranks cancels: total bytes over half of
    the total compute time. None where nothing was sent.
    """
    compute_s = sum(cost.cpu_ms for cost in costs) / 1e3
    wire = sum(cost.wire_bytes for cost in costs)
    return wire / (compute_s / 2) if wire and compute_s else None


def _calls(records_by_rank: Sequence[Sequence[CallRecord]]) -> list[tuple[CallRecord, ...]]:
    """Per call its records by rank."""
    names = [[(r.step, r.micro_batch, r.layer) for r in records] for records in records_by_rank]
    if any(name != names[0] for name in names):
        raise RankError(
            f"the ranks recorded different layer calls: {[len(name) for name in names]} calls by rank"
        )
    return list(zip(*records_by_rank, strict=True))


def _phase_ms(calls: Sequence[Sequence[CallRecord]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for call in calls:
        for phase in call[0].ms:
            total[phase] += max(record.ms.get(phase, 0.0) for record in call)
    return dict(total)


def _critical_bytes(call: Sequence[CallRecord]) -> int:
    phases = {phase for record in call for phase in record.bytes}
    return sum(max(record.bytes.get(phase, 0) for record in call) for phase in phases)


def _buffer_bytes(records: Sequence[CallRecord]) -> int:
    by_batch: dict[int, list[CallRecord]] = defaultdict(list)
    for record in records:
        by_batch[record.micro_batch].append(record)
    return max(map(_batch_bytes, by_batch.values()), default=0)


def _batch_bytes(records: Sequence[CallRecord]) -> int:
    stashes = [record.mem.get("stash", 0) for record in records]
    beside = [record.buffer_peak_bytes - stash for record, stash in zip(records, stashes, strict=True)]
    return sum(stashes) + max(beside)


def _loads(calls: Sequence[Sequence[CallRecord]]) -> tuple[LayerLoad, ...]:
    by_layer: dict[int, list[CallRecord]] = defaultdict(list)
    for call in calls:
        by_layer[call[0].layer].append(call[0])
    return tuple(
        LayerLoad(
            layer=layer,
            forward_R=_column_sums([record.forward_load_R for record in records]),
            backward_R=_column_sums([record.backward_load_R for record in records]),
            counts_E=_column_sums([record.counts_E for record in records]),
            quota_E=_column_sums([record.quota_E for record in records]),
        )
        for layer, records in sorted(by_layer.items())
    )


def _column_sums(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))
