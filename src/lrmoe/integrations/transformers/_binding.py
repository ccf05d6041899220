"""What ties an experts module to a layer: the forward Transformers dispatches to, with and without expert parallelism.

module(hidden_TH, ids_TK, weights_TK)
   | experts_implementation "lrmoe"          | ep_implementation "lrmoe"
   v                                         v
experts_forward --> Binding.run <------- LRMoEEP(ep_mesh)
                       |  not enabled: an exact layer;  enabled: the handle's layer
                       v
                    MoELayer(..., module's weights as this rank holds them)

Shapes: T tokens, H hidden, K experts per token.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from lrmoe.config import LRMoEConfig
from lrmoe.errors import UnsupportedError
from lrmoe.integrations.transformers._compat import EPImplementation
from lrmoe.integrations.transformers._experts import PROJECTIONS, ExpertsSpec, read_spec
from lrmoe.layer import MoELayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "lrmoe"
_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
EXACT = LRMoEConfig(max_drop=0, warmup_steps=0)
# Makes the call of a layer: watch(layer, hidden_TH, ids_TK, weights_TK, gate_up, down, training=...) -> (T, H)
Watch = Callable[..., torch.Tensor]


class Binding:
    """An experts module's layer: the handle's while enabled, an exact one otherwise.

    Args:
        spec: sizes of the module's weights on this rank.
        group: the expert-parallel group, None where this rank holds every expert.
        storage: what its parameters are: the experts of their home rank, or shards of all experts.
    """

    def __init__(self, spec: ExpertsSpec, group: ProcessGroup | None = None, storage: str = "owned") -> None:
        self.spec = spec
        self.group = group
        self.storage = storage
        self.layer: MoELayer | None = None
        self.owner: Any = None  # the handle in force: the model keeps it alive
        self.watch: Watch | None = None
        self._exact: MoELayer | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        """A copied model is not enabled: layers own process groups and per-step state, which cannot be shared."""
        return Binding(self.spec, self.group, self.storage)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise UnsupportedError(
                f"pickling experts that are spread over {self.group.size()} ranks: this rank holds only its own; save "
                "the state dict, or use save_pretrained"
            )
        return Binding, (self.spec, None, self.storage)

    def build(self, config: LRMoEConfig, **context: Any) -> MoELayer:
        """A layer for this module; `context` are MoELayer's layer, clock, telemetry and policy."""
        ranks = self.group.size() if self.group is not None else 1
        return MoELayer(
            num_experts=self.spec.local_experts * ranks,
            hidden_size=self.spec.hidden_size,
            intermediate_size=self.spec.intermediate_size,
            activation=self.spec.activation,
            config=config,
            group=self.group,
            **context,
        )

    def _build_exact(self) -> MoELayer:
        layer = self.build(EXACT.replace(storage=self.storage))
        layer.clock.expected = True  # nobody is asked to step the clock of a model that is not enabled
        return layer

    @torch.compiler.disable  # counts are read to the host, collectives wait: a graph break, nothing else
    def run(
        self, module: nn.Module, hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """The experts' weighted output (T, H) in `hidden_TH`'s dtype; ids are global."""
        layer = self.layer
        if layer is None:
            layer = self._exact = self._exact or self._build_exact()
        # Read at every call: under FSDP, expert parallelism and adapters they are other tensors each time.
        up_EGH, down_EHI = (getattr(module, projection) for projection in PROJECTIONS)
        tensors = (hidden_TH, ids_TK, weights_TK, up_EGH, down_EHI)
        call = (
            functools.partial(self.watch, layer)
            if self.watch is not None and self.layer is not None
            else layer
        )
        with _unseen_by_selective_checkpointing():
            return call(*tensors, training=module.training)


def _unseen_by_selective_checkpointing() -> AbstractContextManager[object]:
    """Keep selective checkpointing from looking at single operations of a layer's call.

    It replays a forward operation by operation, and the layer's recompute is not one: it takes routing and plan from
    the first forward. So the layer is recomputed as a whole, whatever the policy says of the operations in it.
    """
    selective = any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())
    return _disable_current_modes() if selective else contextlib.nullcontext()


def make_binding(module: nn.Module, name: str) -> Binding:
    """A binding for a module whose experts are all on this rank. Changes nothing.

    Raises:
        UnsupportedError: see `read_spec`; also experts split by another expert-parallel implementation.
    """
    if getattr(module, "_is_expert_parallel", False):
        raise UnsupportedError(
            f"{name} ({type(module).__name__}): its experts are split by another expert-parallel implementation; "
            "load the model with DistributedConfig(..., ep_implementation='lrmoe')"
        )
    return Binding(read_spec(module, name))


def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Transformers' experts signature: (T, H), (T, K) int64, (T, K) -> (T, H)."""
    binding: Binding | None = getattr(module, "_lrmoe", None)
    if binding is None:
        binding = make_binding(module, "experts")
        module._lrmoe = binding  # type: ignore[assignment]  # a module holds tensors and modules only, to mypy
    return binding.run(module, hidden_states, top_k_index, top_k_weights)


def watch_layers(model: nn.Module, watch: Watch | None) -> None:
    """Let `watch` make every layer call of an enabled model, for whoever records calls; None takes it off again.

    Args:
        watch: called as watch(layer, hidden, ids, weights, gate_up_proj, down_proj, training=...); has to return what
            layer(the same arguments) returns.
    """
    for module in model.modules():
        binding: Binding | None = getattr(module, "_lrmoe", None)
        if binding is not None:
            binding.watch = watch


def dispatch_here(module: nn.Module) -> None:
    """Send this module's forward to `experts_forward`, and no other's.

    The module gets its own copy of the configuration: the original is shared by the whole model, and often by a second
    model built from the same object.
    """
    config: Any = copy.copy(module.config)
    # Not by the public name, which would go on into sub-configurations that are shared.
    config._experts_implementation_internal = NAME
    module.config = config


class LRMoEEP(EPImplementation):
    """Expert parallelism through lrmoe: one contiguous block of experts per rank of the EP group.

    Built by Transformers for every experts module when a model is loaded with
    `DistributedConfig(..., ep_implementation="lrmoe")`. Exact until `enable`.

        rank           0         1         2         3        DistributedConfig(fsdp_size=4, ep_size=2)
        batch          B0        B1        B2        B3
        experts      E0..E3    E4..E7    E0..E3    E4..E7
        EP group     {------ 0 ------}   {------ 1 ------}    pairs travel inside one
        expert FSDP  {0, 2}  {1, 3}                           weights gathered, gradients reduced over one

    Raises:
        UnsupportedError: tensor parallelism (`tp_size` > 1), or an experts module that the layer does not execute.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise UnsupportedError(
                f"tp_size={tp_mesh.size()}: ep_implementation='lrmoe' needs tp_size=1 (every rank its own batch)"
            )
        self._experts = experts
        self._binding = Binding(read_spec(experts, "experts"), ep_mesh.get_group())
        experts._lrmoe = self._binding  # type: ignore[assignment]  # a module holds tensors and modules only, to mypy

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(T, H), (T, K) global ids, (T, K) -> (T, H); T may differ by rank and may be 0."""
        return self._binding.run(self._experts, hidden_states, top_k_index, top_k_weights)
