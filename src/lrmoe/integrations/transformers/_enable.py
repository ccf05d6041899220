"""`register` and `enable`: the two calls that change something."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError
from lrmoe.integrations.transformers._binding import (
    NAME,
    Binding,
    LRMoEEP,
    dispatch_here,
    experts_forward,
    make_binding,
)
from lrmoe.integrations.transformers._compat import ALL_EXPERTS_FUNCTIONS, EPImplementationInterface
from lrmoe.integrations.transformers._experts import find_experts, inner_experts, read_spec, refuse_adapters
from lrmoe.integrations.transformers._handle import Handle
from lrmoe.integrations.transformers._padding import PaddingHooks, hosts_of
from lrmoe.integrations.transformers._summary import SummedTelemetry
from lrmoe.layer import MoELayer, StepClock
from lrmoe.planning.policies import Policy


def register() -> None:
    """Make "lrmoe" known to Transformers, as experts implementation and as expert-parallel implementation.

    Needed only before `from_pretrained(distributed_config=DistributedConfig(..., ep_implementation="lrmoe"))`:
    `enable` calls it itself, and calling it again does nothing. It changes no model: what runs under the name is exact
    until `enable`.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    EPImplementationInterface.register(NAME, LRMoEEP)


def enable(
    model: nn.Module,
    config: LRMoEConfig | None = None,
    *,
    group: ProcessGroup | None = None,
    policy: Policy | None = None,
) -> Handle:
    """Run every experts module of a Transformers model through lrmoe, and say in one line what it will do.

    Works on one device, under data parallelism (before or after wrapping with DDP or `fully_shard`), on a model loaded
    with `DistributedConfig(..., ep_implementation="lrmoe")`, and on one cut with `shard_experts`. Every rank calls it,
    with the same configuration.

    Args:
        model: holds experts modules of any class decorated with Transformers' `use_experts_implementation`.
        config: default `LRMoEConfig()`; `max_drop=0` is exact.
        group: the expert-parallel group of a model cut with `shard_experts`; it may be left out.
        policy: plans the calls of all layers, instead of the one that `config.policy` names.

    Returns:
        The handle. Attach it to the optimizer, or call its `step()` once per optimizer step.

    Raises:
        UnsupportedError: an experts module has a flag, parameter or activation that lrmoe does not execute, or there
            is none; or adapters are around experts that are spread over ranks. Nothing has been changed then.
        ConfigError: `config` is not an LRMoEConfig; the model is enabled already; or `group` is not the one its
            experts are spread over.

    Warns:
        UserWarning: the model normalises the only routing weight of a token, so that its router gets no gradient.
    """
    config = LRMoEConfig() if config is None else config
    if not isinstance(config, LRMoEConfig):
        raise ConfigError(
            f"config: got a {type(config).__name__}; valid is an LRMoEConfig: lrmoe.LRMoEConfig(max_drop=0.3), or "
            "lrmoe.LRMoEConfig.from_dict({...}) where the fields are in a dict"
        )
    modules = find_experts(model)
    refuse_adapters(model)
    bindings = {name: _checked(module, name, group) for name, module in modules.items()}
    for name, binding in bindings.items():
        _check_storage(config, binding, name)
    for name, module in modules.items():
        _warn_of_constant_weights(module, name)
    clock, telemetry = StepClock(), SummedTelemetry()
    layers = {
        name: binding.build(config, layer=number, clock=clock, telemetry=telemetry, policy=policy)
        for number, (name, binding) in enumerate(bindings.items())
    }
    register()
    undo: list[Callable[[], None]] = [PaddingHooks(host).remove for host in hosts_of(model)]
    spread = next(iter(bindings.values())).group
    handle = Handle(
        model=model, config=config, layers=layers, telemetry=telemetry, clock=clock, group=spread, undo=undo
    )
    for name, binding in bindings.items():
        undo.append(_switch(modules[name], binding, layers[name], handle))
    frozen = "" if _any_trained(model) else "; no expert weight is trained"
    _announce(describe(config, len(layers), 1 if spread is None else spread.size()) + frozen)
    return handle


def _any_trained(model: nn.Module) -> bool:
    """Whether a weight of the experts, or an adapter of theirs, is trained."""
    found = (module for module in model.modules() if inner_experts(module) is not None)
    return any(parameter.requires_grad for module in found for parameter in module.parameters())


def _checked(module: nn.Module, name: str, group: ProcessGroup | None) -> Binding:
    """The binding to enable. Whatever can be refused is refused here; the module is not changed."""
    spec = read_spec(module, name)
    binding: Binding | None = getattr(module, "_lrmoe", None)
    if binding is None:
        binding = make_binding(module, name)
    if binding.layer is not None:
        raise ConfigError(f"{name}: lrmoe is enabled on this model already; call handle.disable() first")
    if group is not None and binding.group is None and group.size() > 1:
        raise ConfigError(
            f"{name}: a group of {group.size()} ranks was given, but this rank holds all experts; cut them with "
            "shard_experts(model, group) first, or leave group out"
        )
    if group is not None and binding.group is not None and _ranks(group) != _ranks(binding.group):
        raise ConfigError(
            f"{name}: group has ranks {_ranks(group)}, its experts are spread over {_ranks(binding.group)}"
        )
    if spec != binding.spec:
        raise ConfigError(
            f"{name}: its experts changed from {binding.spec} to {spec} since the model was loaded"
        )
    return binding


def _check_storage(config: LRMoEConfig, binding: Binding, name: str) -> None:
    """Sharded storage needs experts modules of this package, and they need it."""
    if config.storage == binding.storage:
        return
    held = "whole experts of their home rank" if binding.storage == "owned" else "shards of all experts"
    hint = (
        "; `lrmoe train` installs experts whose parameters are shards" if binding.storage == "owned" else ""
    )
    raise ConfigError(
        f"storage={config.storage!r}: the parameters of {name} are {held}; valid is {binding.storage!r}{hint}"
    )


def _warn_of_constant_weights(module: nn.Module, name: str) -> None:
    """Say where a token's only routing weight is normalised: it is 1, and teaches the router nothing."""
    asked = getattr(module.config, "norm_topk_prob", False)
    if asked and getattr(module.config, "num_experts_per_tok", None) == 1:
        warnings.warn(
            f"{name}: norm_topk_prob=True with num_experts_per_tok=1 makes every routing weight 1: the router learns "
            "from auxiliary losses alone; set norm_topk_prob=False to train it on the main loss",
            stacklevel=3,
        )


def _ranks(group: ProcessGroup) -> list[int]:
    return list(dist.get_process_group_ranks(group))


def _switch(module: nn.Module, binding: Binding, layer: MoELayer, handle: Handle) -> Callable[[], None]:
    """Put `layer` in force; returns what takes it out again."""
    before = module.config
    bound = getattr(module, "_lrmoe", None)
    binding.layer, binding.owner = layer, handle
    module._lrmoe = binding  # type: ignore[assignment]  # a module holds tensors and modules only, to mypy
    dispatch_here(module)

    def undo() -> None:
        binding.layer = binding.owner = binding.watch = None
        module.config = before
        if bound is None:
            del module._lrmoe

    return undo


def _announce(line: str) -> None:
    """To stderr, on the first rank only."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        sys.stderr.write(f"lrmoe: {line}\n")


def describe(config: LRMoEConfig, layers: int, ranks: int) -> str:
    """What backward of the enabled layers will keep, and from which optimizer step, in one line."""
    where = f"{layers} MoE layer{'s' if layers > 1 else ''}" + (f" over {ranks} ranks" if ranks > 1 else "")
    if config.observe:
        told = "print(handle), or the end of `lrmoe train`, tells what pruning would save"
        return f"{where}: observing; backward is exact; {told}"
    if config.max_drop == 0:
        return f"{where}: backward keeps every (token, expert) pair; max_drop=0 is exact"
    limited = config.drop != "always" or config.max_added_variance is not None
    least = "at least " if limited else ""
    done = config.warmup_steps  # "after": some loops number their steps from 0, others from 1
    span = (
        f"after {done} optimizer step{'' if done == 1 else 's'}" if done else "from the first optimizer step"
    )
    if config.cooldown_steps and config.total_steps is not None:
        span += f" until {config.total_steps - config.cooldown_steps}"
    kept = f"{least}{100 * (1 - config.max_drop):.3g}%"
    return f"{where}: backward keeps {kept} of the (token, expert) pairs {span}; max_drop=0 is exact"
