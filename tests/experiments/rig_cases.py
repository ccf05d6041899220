"""Cases that every rank of a pool runs: a tiny trainer whose layer calls other layers execute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrmoe.config import LRMoEConfig
from lrmoe.distributed import Comm
from lrmoe.experiments.compare import rig
from lrmoe.experiments.compare.config import CompareConfig, Experiment
from lrmoe.experiments.compare.executor import Executor
from lrmoe.experiments.compare.rig import builder
from lrmoe.experiments.systems.fitted import fitted
from lrmoe.experiments.systems.registry import get_system
from lrmoe.experiments.systems.residence import change, synchronise
from lrmoe.experiments.trajectories.recorder import Recorder
from lrmoe.integrations.transformers import watch_layers
from lrmoe.layer import MoELayer, StepClock
from lrmoe.planning import LayerPlan, Problem
from lrmoe.telemetry import Telemetry
from lrmoe.training.loop import Trainer
from lrmoe.training.records import gather_records
from tests.experiments.records import record
from tests.training.tiny import SHAPE, tiny_config

EXACT: dict[str, Any] = {"policy": "megatron", "max_drop": 0.0, "replica_slots": 0, "lean_wire": False}
EIGHT: dict[str, Any] = {**SHAPE, "num_experts": 8}


def trainer(folder: str, train: dict[str, Any] | None = None) -> Trainer:
    """Fixed ownership on the tiny model, over the whole pool."""
    return Trainer(tiny_config(folder, lrmoe=EXACT, train=train or {}), dist.group.WORLD)


def make(config: LRMoEConfig) -> Any:
    """What an executor builds its layers with."""

    def build(beside: MoELayer, clock: StepClock, telemetry: Telemetry) -> MoELayer:
        return MoELayer(
            num_experts=beside.shape.experts,
            hidden_size=beside.shape.hidden,
            intermediate_size=beside.shape.width,
            config=config,
            group=beside.comm.group,
            layer=beside.layer,
            clock=clock,
            telemetry=telemetry,
        )

    return build


def run(folder: str, steps: int, train: dict[str, Any], spoil: str | None = None) -> dict[str, Any]:
    """Train, execute with recomputed activations; `spoil` changes a recorded tensor of rank 0 in the last step."""
    trained, recorder = trainer(folder, train), Recorder()
    executor = Executor("again", make(LRMoEConfig(**EXACT, activations="recompute")), dist.group.WORLD)
    watch_layers(trained.model, recorder)
    shapes: list[tuple[int, ...]] = []

    def execute(number: int) -> None:
        calls = recorder.take()
        shapes.append(tuple(call.layer.layer for call in calls))
        if spoil is not None and trained.steps_done == steps - 1 and dist.get_rank() == 0:
            tensor = calls[1].output if spoil == "output" else calls[1].gradients[spoil]
            assert tensor is not None
            tensor.view(-1)[0] += tensor.abs().max() * 1e-3
        executor.execute(calls)

    trained.after_backward = execute
    losses, records = [], []
    for _ in range(steps):
        losses.append(trained.step().loss)
        records.append(executor.end_step())
    return {
        "losses": losses,
        "shapes": shapes,
        "records": [[(r.step, r.micro_batch, r.layer, r.kept, r.pairs) for r in step] for step in records],
        "bytes": sum(record.wire_bytes for step in records for record in step),
        "worst": executor.worst,
    }


def losses_alone(folder: str, steps: int, train: dict[str, Any]) -> list[float]:
    """The trainer without anybody watching."""
    trained = trainer(folder, train)
    return [trained.step().loss for _ in range(steps)]


def weight_gradient(folder: str) -> tuple[bool, bool]:
    """Whether recorded weight gradients are the parameters' own, and recorded tensors no copies of them."""
    trained, recorder = trainer(folder), Recorder()
    watch_layers(trained.model, recorder)
    equal, shared = True, True

    def check(number: int) -> None:
        nonlocal equal, shared
        experts = [e for e in trained.parameters.experts if e.name.endswith("gate_up_proj")]
        for call, entry in zip(recorder.take(), experts, strict=True):
            found = call.gradients["gate_up"]
            assert found is not None
            equal &= torch.equal(found, entry.parameter.grad)  # type: ignore[arg-type]  # backward has run
            shared &= call.gate_up.data_ptr() == entry.parameter.data_ptr()

    trained.after_backward = check
    trained.step()
    return equal, shared


def executed(folder: str, name: str, steps: int, train: dict[str, Any] | None = None) -> dict[str, Any]:
    """One system executes a trainer's calls: bytes of experts that this rank sent, by call, and what its plans say.

    Returns:
        "sent": bytes by call; "plans": the totals of each plan's traffic in experts (weights, gradients, states);
        "params": of an expert; "worst": the largest difference; "loads": rows forward by call and rank; "measured" and
        "predicted": by call, bytes of weights, of gradients and of replicas.
    """
    train = {"batch_size": 8, **(train or {})}
    config = tiny_config(folder, lrmoe={**EXACT, "replica_slots": 2}, train=train, model={"overrides": EIGHT})
    experiment = Experiment(preset="demo", compare=CompareConfig(systems=(name,)), train=config)
    trained, recorder = Trainer(config, dist.group.WORLD), Recorder()
    watch_layers(trained.model, recorder)
    plans: list[LayerPlan] = []
    batches = config.train.accumulate
    number = 0
    executor = Executor(
        name,
        builder(get_system(name), experiment, lambda: number == batches - 1, 8 * 16 * 2),
        dist.group.WORLD,
    )

    def execute(at: int) -> None:
        nonlocal number
        number = at
        executor.execute(recorder.take())

    def noted(policy: Any, *args: Any, **options: Any) -> Any:
        fit = fitted(policy, *args, **options)

        def planned(problem: Problem) -> LayerPlan:
            plans.append(fit(problem))
            return plans[-1]

        return planned

    trained.after_backward = execute
    records = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig, "fitted", noted)
        for _ in range(steps):
            trained.step()
            records += executor.end_step()
    shape = next(iter(trained.handle.layers.values())).shape
    return {
        "sent": [record.bytes.get("replicas", 0) for record in records],
        "plans": [_moved(plan) for plan in plans],
        "seats": [plan.instance_expert_J.size for plan in plans],
        "layouts": [(plan.instance_expert_J.tolist(), plan.instance_rank_J.tolist()) for plan in plans],
        "params": 3 * shape.hidden * shape.width,
        "worst": executor.worst.eps,
        "loads": [record.forward_load_R for record in records],
        "measured": [_experts(record.mem) for record in records],
        "predicted": [_experts(record.mem_predicted) for record in records],
    }


def _experts(parts: Mapping[str, int]) -> list[int]:
    return [parts.get(name, 0) for name in ("weights", "grads", "replicas")]


def _moved(plan: LayerPlan) -> tuple[int, int, int]:
    moved = plan.moved
    weights = int(moved.fetch_R.sum() + moved.refetch_R.sum())
    return weights, int(moved.return_R.sum()), int(moved.state_R.sum())


def summed(hosts_RE: Any, size: int) -> tuple[dict[int, torch.Tensor], int]:
    """`synchronise` of gradients full of rank + 1."""
    comm = Comm(dist.group.WORLD)
    mine = {int(e): torch.full((size,), comm.rank + 1.0) for e in hosts_RE[comm.rank].nonzero()[0]}
    sent = synchronise(comm, hosts_RE, mine)
    return mine, sent


def changed(old_RE: Any, new_RE: Any, size: int) -> int:
    """`change` of a layout."""
    return change(Comm(dist.group.WORLD), old_RE, new_RE, expert_bytes=size)


def gathered() -> list[int]:
    """What every rank saved by a lean wire, as all ranks see it."""
    mine = record(ms={}, sent={}, bytes_saved_lean=10 + dist.get_rank())
    by_rank = gather_records([mine], dist.group.WORLD, torch.device("cpu"))
    return [records[0].bytes_saved_lean for records in by_rank]
