"""Transformers: one call makes the MoE layers of a model train with a pruned, compacted backward.

    from lrmoe.integrations import transformers as lrmoe_hf

    lrmoe_hf.register()
    model = AutoModelForCausalLM.from_pretrained(name)
    handle = lrmoe_hf.enable(model, lrmoe.LRMoEConfig(max_drop=0.3))
    handle.attach(optimizer)

Importing this module changes nothing. It needs the extra `transformers`.
"""

from __future__ import annotations

from lrmoe.integrations.transformers._binding import LRMoEEP
from lrmoe.integrations.transformers._callback import LRMoECallback
from lrmoe.integrations.transformers._enable import enable, register
from lrmoe.integrations.transformers._handle import Handle
from lrmoe.integrations.transformers._shard import dense_parameters, expert_parameters, shard_experts

__all__ = [
    "Handle",
    "LRMoECallback",
    "LRMoEEP",
    "dense_parameters",
    "enable",
    "expert_parameters",
    "register",
    "shard_experts",
]
