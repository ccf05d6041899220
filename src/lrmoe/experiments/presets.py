"""Comparisons that ship with the package, as tables of a run file."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from typing import Any

from lrmoe.errors import ConfigError

# The systems of a preset differ in nothing but what defines them: one row per pair on the wire for all, stashed
# activations, no replicas, no auxiliary loss that would even out the routing.
_COMMON_LRMOE = {"replica_slots": 0, "lean_wire": False, "activations": "stash"}

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # Expert GEMMs are nine tenths of the MoE layer at this width. The learning rate falls over `max_steps`, so that the
    # loss crosses the target on a slope, not on a plateau where a step more or less would be chance.
    "demo": {
        "compare": {"systems": ["megatron", "lrmoe"], "target_loss": 2.3, "max_steps": 110, "ep": 2},
        "model": {"preset": "qwen3-moe-tiny", "overrides": {"moe_intermediate_size": 512}},
        "data": {"seq_len": 256},
        "optim": {"lr": 2e-3, "warmup_steps": 10},
        "train": {"batch_size": 6},
        "lrmoe": {**_COMMON_LRMOE, "warmup_steps": 5},
    },
    "small": {
        "compare": {
            "systems": ["megatron", "lrmoe", "lrmoe-sampled50", "lrmoe-topk20"],
            "target_loss": 2.1,
            "max_steps": 300,
            "ep": 2,
            "smoothing_steps": 20,
        },
        "model": {"preset": "qwen3-moe-tiny", "overrides": {"moe_intermediate_size": 512}},
        "data": {"seq_len": 256},
        "optim": {"lr": 2e-3, "warmup_steps": 20},
        "train": {"batch_size": 6},
        "lrmoe": {**_COMMON_LRMOE, "warmup_steps": 20},
    },
}


def get_preset(name: str) -> dict[str, dict[str, Any]]:
    """The tables of a preset, as a copy to change.

    Raises:
        ConfigError: no such preset; names the nearest and all valid ones.
    """
    if name in PRESETS:
        return {table: copy.deepcopy(dict(values)) for table, values in PRESETS[name].items()}
    near = difflib.get_close_matches(name, list(PRESETS), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    if name == "published":
        hint = " (not available in this version)"
    raise ConfigError(f"preset={name!r}: no such comparison{hint}; valid: {', '.join(PRESETS)}")
