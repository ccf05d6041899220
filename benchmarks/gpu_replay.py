"""One call over eight expert-parallel ranks for `gpu_check.py`, every rank's real work on this device, one by one.

Times are the slowest rank's of each phase, bytes those of the fullest rank by the allocator; the exchange is modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from gpu_report import Report

from lrmoe import LRMoEConfig
from lrmoe.planning import LayerPlan
from lrmoe.planning.memory import ExpertShape
from lrmoe.planning.problem import Topology
from lrmoe.simulate.cluster import plans
from lrmoe.simulate.published import EXPERTS, RANKS
from lrmoe.simulate.replay import HALF, OURS, Question, replay
from lrmoe.simulate.replay_calls import published_call
from lrmoe.simulate.replay_summary import summarise
from lrmoe.simulate.scenario import Allowance, Layer, make_system

SYSTEMS = ("megatron", "symi", "ultraep", OURS)
NVLINK = 450e9  # bytes per second and direction of an H100 or H200
# hidden, width; both have 128 experts and take 8
SIZES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"qwen3_30b_a3b": (2048, 768), "glm_4_5_air": (4096, 1408)}
)
_TOPOLOGY = Topology(ranks=RANKS, experts=EXPERTS)
_DROP = 0.2
_TIMES = ("forward_ms", "backward_ms", "forward_compute_ms", "backward_compute_ms")
_BYTES = ("forward_subtotal", "backward_subtotal", "forward_memory", "backward_memory")
_RATIOS = ("backward_ms", "backward_compute_ms", "backward_subtotal", "backward_memory")


def time_replay(report: Report, model: str, device: torch.device, seed: int) -> None:
    """The published comparison's call at a model's sizes, 262,144 pairs a rank on CUDA."""
    cuda = device.type == "cuda"
    asked = Question(
        systems=_systems(model),
        calls=published_call() if cuda else published_call(tokens=64),
        topology=_TOPOLOGY,
        layer=_layer(model) if cuda else Layer(shape=ExpertShape(hidden=64, width=24, element_bytes=2)),
        allowance=Allowance(max_drop=_DROP),
        config=LRMoEConfig(max_drop=_DROP, seed=seed),
        device=device,
        repeats=3 if cuda else 1,
        link_bytes_per_s=NVLINK,
    )
    systems = summarise(asked, replay(asked))["systems"]
    for name, found in systems.items():
        for quantity in (*_TIMES, *_BYTES):
            unit = "ms" if quantity in _TIMES else "bytes"
            report.add(f"replay.{model}.{name}.{quantity}", found[quantity], unit)
    for name in systems.keys() - {"megatron"}:
        for quantity in _RATIOS:
            ratio = systems[name][quantity] / systems["megatron"][quantity]
            report.add(f"replay.{model}.{name}.{quantity}_over_megatron", ratio, "ratio")


def expected_replay() -> dict[str, float]:
    """Figure -> value, of CUDA: work goes with the rows of the fullest rank, which the plans of the call say."""
    found = {}
    for model in SIZES:
        asked = {name: (name, _DROP) for name in _systems(model)} | {HALF: (OURS, 0.5)}
        loads = {listed: _fullest(model, *system) for listed, system in asked.items()}
        for name in loads.keys() - {"megatron"}:
            ratio = loads[name] / loads["megatron"]
            found[f"replay.{model}.{name}.backward_compute_ms_over_megatron"] = ratio
    return found


def _fullest(model: str, name: str, drop: float) -> int:
    """Rows of the rank that has most of them in backward."""
    system = make_system(name, Allowance().slots)
    allowance = Allowance(max_drop=drop)
    ((_, plan, _),) = plans(system, published_call(), _TOPOLOGY, _layer(model), allowance)
    assert isinstance(plan, LayerPlan), "nothing limits memory here"
    return int(plan.backward_load_R.max())


def _systems(model: str) -> tuple[str, ...]:
    return SYSTEMS if model == "qwen3_30b_a3b" else ("megatron", OURS)


def _layer(model: str) -> Layer:
    hidden, width = SIZES[model]
    return Layer(shape=ExpertShape(hidden=hidden, width=width, element_bytes=2))
