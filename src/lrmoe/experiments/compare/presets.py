"""Comparisons that ship with the package, as tables of a run file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lrmoe.errors import ConfigError, did_you_mean

# The systems of a preset differ in nothing but what defines them: one row per pair on the wire for all, stashed
# activations, equally many replica slots, no auxiliary loss that would even out the routing.
_COMMON_LRMOE = {"lean_wire": False, "activations": "stash"}

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # Expert GEMMs are nine tenths of the MoE layer at this width. The learning rate falls over `max_steps`, so that the
    # loss crosses the target on a slope, not on a plateau where a step more or less would be chance.
    "demo": {
        "compare": {"systems": ["megatron", "lrmoe"], "target_loss": 2.3, "max_steps": 110, "ep": 2},
        "model": {"preset": "qwen3-moe-tiny", "overrides": {"moe_intermediate_size": 512}},
        "data": {"seq_len": 256},
        "optim": {"lr": 2e-3, "warmup_steps": 10},
        "train": {"batch_size": 6},
        "lrmoe": {**_COMMON_LRMOE, "replica_slots": 0, "warmup_steps": 5},
    },
    # Every system, over 8 ranks with two experts at home on each, two replica slots a rank for all that use any. Small
    # enough that thirteen systems take minutes on two cores. Ends after a number of steps: their cost is compared.
    "small": {
        "compare": {"systems": ["all"], "max_steps": 60, "ep": 8},
        "model": {
            "preset": "qwen3-moe-tiny",
            "overrides": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
        },
        "data": {"seq_len": 128},
        "optim": {"lr": 3e-3, "warmup_steps": 10},
        "train": {"batch_size": 4},
        "lrmoe": {**_COMMON_LRMOE, "replica_slots": 2, "warmup_steps": 5},
    },
    # The setting of the published comparison at a size for CPUs: a small text learned by heart from a checkpoint, to a
    # low loss, at EP 8, with 2 replica slots for every system that can use them. Hours on two cores.
    "published": {
        "compare": {
            "systems": ["megatron", "symi", "ultraep", "lrmoe", "lrmoe-sampled50", "lrmoe-topk20"],
            "models": ["qwen3-moe-micro", "glm4-moe-micro"],
            "aux": [0.0, 0.001],
            "seeds": [0, 1, 2],
            "regime": "memorise",
            "against": "symi",
            "target_loss": 0.05,
            "max_steps": 300,
            "ep": 8,
        },
        "lrmoe": {**_COMMON_LRMOE, "replica_slots": 2},
    },
}


def get_preset(name: str) -> dict[str, dict[str, Any]]:
    """The tables of a preset, as a copy to change.

    Raises:
        ConfigError: no such preset; names the nearest and all valid ones.
    """
    if name in PRESETS:
        return {table: copy.deepcopy(dict(values)) for table, values in PRESETS[name].items()}
    hint = did_you_mean(name, PRESETS)
    raise ConfigError(f"preset={name!r}: no such comparison{hint}; valid: {', '.join(PRESETS)}")
