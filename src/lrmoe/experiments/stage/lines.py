"""The stage's file: one JSON line per executed call, flushed step by step, so that a stopped stage goes on.

Lines of one step are written together. A torn last line is left out when the file is read, and its step runs again; of
two lines of one call the later counts.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lrmoe.experiments.compare.cost import link_speed, step_cost
from lrmoe.telemetry import CallRecord

UNCOUNTED = ("score", "select", "replicas")  # phases that the balanced reference is free of
RECOMPUTE, STASH = "recompute", "stash"
MAIN = RECOMPUTE  # what activations do unless said: nodes that are short of memory are what copies and drops are for


@dataclass(frozen=True, kw_only=True)
class Call:
    """One executed call, over all ranks.

    Attributes:
        model, aux, seed: of the trajectory. activations: RECOMPUTE or STASH, the same for all systems beside it.
        system: who executed, "balanced:<system>" for a reference. step, layer: of the trajectory.
        phase_ms: per phase, the largest thread CPU time of any rank. phase_bytes: the most bytes that any rank sent.
        cpu_ms: thread CPU time of all phases and ranks. wall_ms: of the slowest rank.
        wire_bytes: sent by all ranks. pairs, kept: of the call.
        forward_peak, backward_peak: rows of the most loaded rank over the mean load of the whole call.
        buffer_bytes: most token buffers alive on any rank. replicas: copies of experts away from home.
    """

    model: str
    aux: float
    seed: int
    activations: str
    system: str
    step: int
    layer: int
    phase_ms: dict[str, float]
    phase_bytes: dict[str, int]
    cpu_ms: float
    wall_ms: float
    wire_bytes: int
    pairs: int
    kept: int
    forward_peak: float
    backward_peak: float
    buffer_bytes: int
    replicas: int

    @property
    def key(self) -> tuple[str, float, int, str, str, int, int]:
        """What tells it from every other call."""
        return (self.model, self.aux, self.seed, self.activations, self.system, self.step, self.layer)

    def critical_ms(self, link_bytes_per_s: float, without: Sequence[str] = ()) -> float:
        """Critical path over a link, without some phases and what they send."""
        ms = sum(ms for phase, ms in self.phase_ms.items() if phase not in without)
        sent = sum(size for phase, size in self.phase_bytes.items() if phase not in without)
        return ms + sent / link_bytes_per_s * 1e3


def measured(
    place: dict[str, Any], system: str, step: int, records_by_rank: Sequence[Sequence[CallRecord]]
) -> list[Call]:
    """A system's calls of one step from all ranks' records.

    Args:
        place: model, aux, seed and activations.
    """
    found = []
    for number in range(len(records_by_rank[0])):
        records = [ranks[number] for ranks in records_by_rank]
        cost, first = step_cost([[record] for record in records]), records[0]
        phases = {phase for record in records for phase in record.bytes}
        found.append(
            Call(
                **place,
                system=system,
                step=step,
                layer=first.layer,
                phase_ms=dict(cost.phase_ms),
                phase_bytes={p: max(r.bytes.get(p, 0) for r in records) for p in sorted(phases)},
                cpu_ms=cost.cpu_ms,
                wall_ms=cost.wall_ms,
                wire_bytes=cost.wire_bytes,
                pairs=cost.pairs,
                kept=cost.kept,
                forward_peak=first.forward_peak,
                backward_peak=first.backward_peak,
                buffer_bytes=cost.buffer_bytes,
                replicas=first.replicas,
            )
        )
    return found


def read(path: Path) -> list[Call]:
    """The calls of a file, in order; none where there is no file."""
    if not path.exists():
        return []
    names = {field.name for field in fields(Call)}
    by_key: dict[tuple[Any, ...], Call] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:  # torn where the stage was stopped
            continue
        if isinstance(values, dict) and values.keys() == names:
            call = Call(**values)
            by_key[call.key] = call
    return list(by_key.values())


def append(path: Path, calls: Iterable[Call]) -> None:
    """Add calls as lines, on the disk when this returns."""
    text = "".join(json.dumps(asdict(call), allow_nan=False) + "\n" for call in calls)
    with path.open("a+b") as out:
        if out.tell() and not _ends_with_newline(path):
            text = "\n" + text  # after a torn line
        out.write(text.encode())
        out.flush()
        os.fsync(out.fileno())


def forget(path: Path, places: Collection[tuple[str, float, int]]) -> None:
    """Take the calls of some (model, aux, seed) out of the file: their trajectories are trained anew."""
    calls = read(path)
    kept = [call for call in calls if call.key[:3] not in places]
    if len(kept) == len(calls):
        return
    partial = path.with_suffix(".part")
    partial.unlink(missing_ok=True)
    append(partial, kept)
    partial.replace(path)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as found:
        found.seek(-1, os.SEEK_END)
        return found.read(1) == b"\n"


def link_of(calls: Iterable[Call], balanced: str) -> dict[tuple[str, str], float]:
    """The link's speed by balanced exact calls (cost.link_speed), in bytes per second.

    Args:
        balanced: name of the lane of fixed ownership on balanced counts.

    Returns:
        by model and activations; without those whose calls sent nothing.
    """
    by_place: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        if call.system == balanced:
            by_place[call.model, call.activations].append(call)
    speeds = {place: link_speed(same) for place, same in by_place.items()}
    return {place: speed for place, speed in speeds.items() if speed is not None}
