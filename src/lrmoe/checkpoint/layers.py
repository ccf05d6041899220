"""States of the layers' controllers by rank, in state.json: what is the same on all ranks stands in the first's alone.

    rank 0   {"layers": {"model.layers.0.mlp.experts": {..., "past": {...}}}, ...}
    others   {"layers": {"model.layers.0.mlp.experts": {...}}, ...}

Past counts and plans are (ranks, experts) tables of 16 calls: too much to be there once for every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from lrmoe.checkpoint.agree import gathered, rank_of

SHARED = "past"


def gather_layers(
    group: dist.ProcessGroup | None, state: Callable[[], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The states of all ranks of one expert-parallel group, by rank; every rank calls it.

    Args:
        state: gives this rank's, such as a handle's `state_dict`.

    Raises:
        RankError: it failed on some rank; raised on every rank.
    """
    first = rank_of(group) == 0
    return gathered(group, lambda: state() if first else _without_shared(state()))


def layers_of(states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """The state for one of `world_size` ranks, from those of the ranks that saved.

    A list has one value per expert of its rank: joined in rank order it covers all experts, and each rank takes its
    part. What is shared is the first rank's. Everything else is the same on all ranks, or, where it says so itself, of
    use only to as many ranks as there were.

    Raises:
        KeyError, TypeError, AttributeError: they are not what `gather_layers` gives.
    """
    own = states[rank] if len(states) == world_size else _resharded(states, rank, world_size)
    shared = {name: layer[SHARED] for name, layer in states[0]["layers"].items() if SHARED in layer}
    layers = {name: {**layer, **_part(shared, name)} for name, layer in own["layers"].items()}
    return {**own, "layers": layers}


def _part(shared: dict[str, Any], name: str) -> dict[str, Any]:
    return {SHARED: shared[name]} if name in shared else {}


def _without_shared(state: dict[str, Any]) -> dict[str, Any]:
    layers = {
        name: {key: value for key, value in layer.items() if key != SHARED}
        for name, layer in state["layers"].items()
    }
    return {**state, "layers": layers}


def _resharded(states: Sequence[Any], rank: int, world_size: int) -> Any:
    first = states[0]
    if isinstance(first, dict):
        return {
            key: _resharded([state[key] for state in states], rank, world_size)
            for key in first
            if key != SHARED
        }
    if isinstance(first, list):
        joined = [value for state in states for value in state]
        count = len(joined) // world_size
        return joined[rank * count : (rank + 1) * count]
    return first
