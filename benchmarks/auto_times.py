"""What `auto.py` knows of time: recorded layer calls executed at EP 8 with several drops in turn.

Hidden = width = 128, recorded pairs repeated until each rank has 170 x width, lean wire, two replica slots, stashed
activations (some drops once more with recomputed ones), a few recorded steps of the exact run. Every layer call is
executed by all lanes, in rotating order, in the same 8 processes. Time is the critical path: per phase the largest
thread CPU time of any rank, and its bytes over a link on which exchange is a third of a balanced exact call's time.

Shape letters: T tokens of a rank, K experts per token, H hidden.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lrmoe.config import LRMoEConfig
from lrmoe.experiments.compare.cost import link_speed, step_cost
from lrmoe.experiments.compare.racers import turns
from lrmoe.experiments.stage.inputs import Routed, Rows, StageSize, draw_weights
from lrmoe.experiments.trajectories.trajectory import RecordedTokens, Trajectory
from lrmoe.layer import MoELayer, StepClock
from lrmoe.statistics import averaged
from lrmoe.telemetry import CallRecord, Telemetry
from lrmoe.training.launch import run_workers
from lrmoe.training.records import gather_records

SIZE = StageSize()
STASH, RECOMPUTE = "stash", "recompute"
DROPS = {STASH: (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9), RECOMPUTE: (0.0, 0.5, 0.8)}
STEPS = {"memorise": (60, 160, 260), "continued": (60, 140)}  # of the recorded ones
_BALANCED = "balanced"
_FORWARD = ("dispatch", "experts", "combine")
_BACKWARD = ("exchange", "experts_backward", "return")


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Layers that are executed: what backward leaves out, and how it comes by activations."""

    activations: str
    drop: float
    balanced: bool = False

    @property
    def name(self) -> str:
        """In the file."""
        return f"{self.activations}.{_BALANCED if self.balanced else f'drop{self.drop:g}'}"

    def config(self) -> LRMoEConfig:
        """Of its layers; balanced counts need no copies."""
        slots = 0 if self.balanced else LRMoEConfig().replica_slots
        return LRMoEConfig(
            max_drop=self.drop, warmup_steps=0, activations=self.activations, replica_slots=slots
        )


LANES = tuple(
    Lane(activations=activations, drop=drop, balanced=balanced)
    for activations, drops in DROPS.items()
    for drop, balanced in (*((drop, False) for drop in drops), (0.0, True))
)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One executed call over all ranks.

    Attributes:
        phase_ms: per phase the largest thread CPU time of any rank. phase_bytes: the most bytes that any rank sent.
        cpu_ms, wire_bytes: of all ranks. forward_peak, backward_peak: rows of the most loaded rank over the mean load.
    """

    regime: str
    lane: str
    step: int
    layer: int
    phase_ms: dict[str, float]
    phase_bytes: dict[str, int]
    cpu_ms: float
    wire_bytes: int
    forward_peak: float
    backward_peak: float

    @classmethod
    def of(cls, regime: str, lane: str, step: int, records: Sequence[CallRecord]) -> Timed:
        """From all ranks' records of one call."""
        cost, first = step_cost([[record] for record in records]), records[0]
        phases = sorted({phase for record in records for phase in record.bytes})
        return cls(
            regime=regime,
            lane=lane,
            step=step,
            layer=first.layer,
            phase_ms=dict(cost.phase_ms),
            phase_bytes={phase: max(record.bytes.get(phase, 0) for record in records) for phase in phases},
            cpu_ms=cost.cpu_ms,
            wire_bytes=cost.wire_bytes,
            forward_peak=first.forward_peak,
            backward_peak=first.backward_peak,
        )

    def ms(self, link: float, phases: Sequence[str] | None = None) -> float:
        """Critical path over a link of so many bytes per second, of all phases or of some."""
        names = {*self.phase_ms, *self.phase_bytes} if phases is None else phases
        return sum(self.phase_ms.get(n, 0.0) + self.phase_bytes.get(n, 0) / link * 1e3 for n in names)


def execute(todo: Sequence[tuple[str, int]], folders: Mapping[str, Path], out: Path) -> None:
    """Execute recorded steps, every lane in turn, layer by layer; every rank calls it, rank 0 writes.

    Args:
        todo: (regime, step), together by regime. Before a regime's first step its calls run once uncounted: caches
            are warm then, and quotas know scores.
        folders: by regime, the exact trajectory. out: file of lines.
    """
    scene: Scene | None = None
    for turn, (regime, step) in enumerate(todo):
        if scene is None or scene.regime != regime:
            scene = Scene(regime, Trajectory.load(folders[regime]))
            scene.play(step, 0)
        found = scene.play(step, turn)
        if dist.get_rank() == 0:
            with out.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(asdict(timed)) + "\n" for timed in found)


class Scene:
    """A regime's recorded calls on this rank, and the lanes that execute them."""

    def __init__(self, regime: str, trajectory: Trajectory) -> None:
        self.regime, self._trajectory = regime, trajectory
        self._rank = dist.get_rank()
        layers = trajectory.layers
        experts = trajectory.counts(layers[0]).shape[2]
        self._experts = experts
        local = experts // SIZE.ranks
        self._weights = {n: draw_weights(local, SIZE.hidden, SIZE.width, n, self._rank) for n in layers}
        self._lanes = {lane.name: _Layers(lane, layers, experts) for lane in LANES}

    def play(self, step: int, turn: int) -> list[Timed]:
        """Execute one step: what every lane's calls took."""
        calls = self._trajectory.calls(step)
        for place, call in enumerate(calls):
            for lane in turns(LANES, turn * len(calls) + place):
                self._run(lane, call, step)
        found = []
        for name, layers in self._lanes.items():
            records = gather_records(layers.end_step(), dist.group.WORLD, torch.device("cpu"))
            found += [Timed.of(self.regime, name, step, of_call) for of_call in zip(*records, strict=True)]
        return found

    def _run(self, lane: Lane, call: RecordedTokens, step: int) -> None:
        repeats = SIZE.repeats(call.ids_TK.numel() // SIZE.ranks)
        routed = Routed(ids_TK=call.ids_TK, alpha_TK=call.alpha_TK, grad_norm_T=call.grad_norm_T)
        routed = routed.of_rank(self._rank, SIZE.ranks, repeats)
        if lane.balanced:
            routed = routed.balanced(self._experts, step * SIZE.ranks + self._rank)
        rows = Rows.draw(len(routed.ids_TK), SIZE.hidden, call.layer, self._rank, step)
        weights = self._weights[call.layer]
        x_TH, alpha_TK = rows.x_TH.requires_grad_(), routed.alpha_TK.requires_grad_()
        dist.barrier()  # what comes before is not to be waited for under the clock
        layer = self._lanes[lane.name].layers[call.layer]
        output = layer(x_TH, routed.ids_TK, alpha_TK, *weights, training=True)
        output.backward(rows.direction_TH * routed.grad_norm_T[:, None])
        for weight in weights:
            weight.grad = None


class _Layers:
    """A lane's layers, with their clock and records."""

    def __init__(self, lane: Lane, numbers: Sequence[int], experts: int) -> None:
        self._clock, self._telemetry = StepClock(), Telemetry()
        self._clock.expected = True
        self.layers = {
            number: MoELayer(
                num_experts=experts,
                hidden_size=SIZE.hidden,
                intermediate_size=SIZE.width,
                config=lane.config(),
                group=dist.group.WORLD,
                layer=number,
                clock=self._clock,
                telemetry=self._telemetry,
            )
            for number in numbers
        }

    def end_step(self) -> list[CallRecord]:
        """The step's calls are over: this rank's records of them."""
        self._clock.advance()
        return self._telemetry.drain()


def read(path: Path) -> list[Timed]:
    """Executed calls of a file; a torn last line is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            timed = Timed(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
        found[timed.regime, timed.lane, timed.step, timed.layer] = timed
    return list(found.values())


def measure(folders: Mapping[str, Path], out: Path) -> list[Timed]:
    """Execute what is not in the file; all calls that are in it then."""
    done = {(timed.regime, timed.step, timed.lane) for timed in read(out)}
    todo = [
        (regime, step)
        for regime in folders
        for step in STEPS[regime]
        if any((regime, step, lane.name) not in done for lane in LANES)
    ]
    if todo:
        run_workers("auto_times:execute", SIZE.ranks, (todo, folders, out), time_limit_s=1200)
    return read(out)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Layer time of one regime and kind of activations.

    Attributes:
        over_exact: by drop, mean over calls of time over that of the same call with nothing dropped.
        errors: their standard errors. ratio: cost of a backward row over a forward row in exact calls.
        choosing: time that dropping adds to what rows explain, in forward rows per row; mean over drops.
    """

    over_exact: dict[float, float]
    errors: dict[float, float]
    ratio: float
    choosing: float

    @classmethod
    def of(cls, calls: Sequence[Timed], activations: str) -> Times:
        """From the calls of one regime."""
        lanes: dict[str, dict[tuple[int, int], Timed]] = {}
        for call in calls:
            lanes.setdefault(call.lane, {})[call.step, call.layer] = call
        balanced = lanes[Lane(activations=activations, drop=0.0, balanced=True).name].values()
        link = link_speed(list(balanced))
        if link is None:
            raise ValueError("calls: the balanced ones sent nothing, so there is no link speed")
        exact = lanes[Lane(activations=activations, drop=0.0).name]
        ratio = statistics.fmean(_ratio(call, link) for call in exact.values())
        over: dict[float, list[float]] = {}
        choosing = []
        for drop in DROPS[activations]:
            own = lanes[Lane(activations=activations, drop=drop).name]
            over[drop] = [own[key].ms(link) / exact[key].ms(link) for key in exact]
            choosing += [
                _choosing(own[k], exact[k], r, ratio) for k, r in zip(exact, over[drop], strict=True) if drop
            ]
        return cls(
            over_exact={drop: statistics.fmean(values) for drop, values in over.items()},
            errors={drop: averaged(values).standard_error for drop, values in over.items()},
            ratio=ratio,
            choosing=statistics.fmean(choosing),
        )

    def at(self, dropped: Any) -> Any:
        """Time over that of exact calls at dropped shares, numbers or arrays; straight between measured ones."""
        return np.interp(dropped, list(self.over_exact), list(self.over_exact.values()))


def _ratio(call: Timed, link: float) -> float:
    """Cost of a backward row over a forward row, exchange included; packing counts half in each."""
    pack = call.ms(link, ("pack",)) / 2
    forward, backward = (pack + call.ms(link, phases) for phases in (_FORWARD, _BACKWARD))
    return (backward / call.backward_peak) / (forward / call.forward_peak)


def _choosing(call: Timed, exact: Timed, over: float, ratio: float) -> float:
    """What the rows of a call do not explain of its time, in forward rows per row."""
    whole = exact.forward_peak + ratio * exact.backward_peak
    return (over * whole - call.forward_peak - ratio * call.backward_peak) / call.forward_peak
