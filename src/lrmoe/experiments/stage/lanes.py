"""One compared system on the stage: its layers with its own plans, transport and clock, and the balanced reference.

Shape letters: T tokens of a rank, K experts per token, H hidden, I expert width, R ranks, E experts, S steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.distributed import Comm
from lrmoe.experiments.compare.rig import storage_of
from lrmoe.experiments.stage.history import EveryStep
from lrmoe.experiments.stage.inputs import Routed, Rows, StageSize
from lrmoe.experiments.stage.lines import MAIN
from lrmoe.experiments.systems.fitted import fitted
from lrmoe.experiments.systems.registry import System, get_system
from lrmoe.experiments.systems.stores import Residents
from lrmoe.layer import MoELayer, StepClock
from lrmoe.layer.asking import make_problem
from lrmoe.planning import ExpertShape, Topology, get_policy
from lrmoe.planning.policies import Policy
from lrmoe.planning.problem import IntArray
from lrmoe.report.data import BASELINE
from lrmoe.telemetry import CallRecord, Telemetry

BALANCED = "balanced"
# What differs from the package's defaults, the same for all systems: one row per pair on the wire (the full router
# gradient of topk cannot run lean), and pruning from the first step on.
SETTING: Mapping[str, Any] = {
    "lean_wire": False,
    "replica_slots": 2,
    "warmup_steps": 0,
}
_DTYPE = torch.float32

Weights = tuple[Tensor, Tensor]


def system_config(system: System, seed: int, activations: str = MAIN) -> LRMoEConfig:
    """What a system's layers run with on the stage."""
    return system.config(LRMoEConfig(**SETTING, activations=activations, seed=seed))


def reference_of(name: str) -> str:
    """The balanced lane that a system is held against: of the same kept share and estimator."""
    return f"{BALANCED}:{name if get_system(name).changes.get('policy') == 'lrmoe' else BASELINE}"


class Actor:
    """A system's layers on this rank.

    Args:
        name: of the system, or "balanced:<system>": on balanced counts, without replicas.
        layers: indices of the layers. experts: E.
        size: of layers. pairs: of a rank and call. seed: of the systems' random choices.
        counts_SRE: by layer, the counts of every step; read by policies that plan from history.
        group: of the ranks. activations: RECOMPUTE or STASH.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[int],
        experts: int,
        *,
        size: StageSize,
        pairs: int,
        seed: int,
        counts_SRE: Mapping[int, IntArray],
        group: dist.ProcessGroup | None,
        activations: str = MAIN,
    ) -> None:
        self.name = name
        self.balanced = name.startswith(f"{BALANCED}:")
        self.system = get_system(name.removeprefix(f"{BALANCED}:"))
        config = system_config(self.system, seed, activations)
        self.config = config.replace(replica_slots=0) if self.balanced else config
        self._clock, self._telemetry = StepClock(), Telemetry()
        self._clock.expected = True
        self._size, self._group = size, group
        self._topology = Topology(ranks=size.ranks, experts=experts)
        policy = self._policy(pairs)
        self._past = {} if self.balanced else {n: self._every_step(policy, counts_SRE[n]) for n in layers}
        self._layers = {n: self._layer(n, self._past.get(n) or policy) for n in layers}

    @property
    def exact(self) -> bool:
        """Whether its backward leaves nothing out."""
        return self.config.max_drop == 0

    def run(
        self, step: int, layer: int, routed: Routed, rows: Rows, weights: Weights
    ) -> tuple[Tensor, Tensor]:
        """One call forward and backward: its output and its input's gradient, both (T, H). Every rank calls it.

        Args:
            step: of the trajectory. routed: this rank's tokens. weights: of its home experts.
        """
        runs, past = self._layers[layer], self._past.get(layer)
        if past is not None:
            past.prepare(step)
            if past.previous is not None and isinstance(runs.storage, Residents):
                runs.storage.settle(past.previous)
        x_TH = rows.x_TH.detach().requires_grad_()
        alpha_TK = routed.alpha_TK.detach().requires_grad_()
        output = runs(x_TH, routed.ids_TK, alpha_TK, *weights, training=True)
        output.backward(rows.direction_TH * routed.grad_norm_T[:, None])
        for weight in weights:
            weight.grad = None
        assert x_TH.grad is not None, "it was asked for"
        return output.detach(), x_TH.grad

    def end_step(self) -> list[CallRecord]:
        """The step's calls are over: this rank's records of them."""
        self._clock.advance()
        return self._telemetry.drain()

    def _policy(self, pairs: int) -> Policy | None:
        """The policy fitted to the stage; None: the layer's own."""
        if self.system.changes.get("policy") == "lrmoe":
            return None
        size = self._size
        expert = ExpertShape(hidden=size.hidden, width=size.width, element_bytes=_DTYPE.itemsize)
        slots = min(self.config.replica_slots, self._topology.experts - self._topology.experts_per_rank)
        return fitted(get_policy(self.config.policy), expert, ranks=size.ranks, slots=slots, pairs=pairs)

    def _every_step(self, policy: Policy | None, counts_SRE: IntArray) -> EveryStep | None:
        if policy is None or self.system.info.inputs not in ("history", "both"):
            return None
        ask = partial(make_problem, self.config, topology=self._topology, max_drop=0.0, scores=None)
        return EveryStep(policy, self.config.policy, counts_SRE, lambda counts_RE: ask(counts_RE))

    def _layer(self, number: int, policy: Policy | None) -> MoELayer:
        size = self._size
        store = storage_of(self.system, lambda: True, _DTYPE, Comm(self._group), size.hidden, size.width)
        return MoELayer(
            num_experts=self._topology.experts,
            hidden_size=size.hidden,
            intermediate_size=size.width,
            config=self.config,
            group=self._group,
            layer=number,
            clock=self._clock,
            telemetry=self._telemetry,
            policy=policy,
            storage=None if self.system.changes.get("policy") == "lrmoe" else store,
        )
