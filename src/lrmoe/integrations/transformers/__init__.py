"""Transformers: one call makes the MoE layers of a model train with a pruned, compacted backward.

    from lrmoe.integrations import transformers as lrmoe_hf

    model = AutoModelForCausalLM.from_pretrained(name)
    model.train()  # from_pretrained returns it in evaluation mode, in which nothing is left out
    handle = lrmoe_hf.enable(model, lrmoe.LRMoEConfig(max_drop=0.3))
    handle.attach(optimizer)

For expert parallelism call `lrmoe_hf.register()` before `from_pretrained(distributed_config=...)`. Importing this
module changes nothing. It needs the extra `transformers`.
"""

from __future__ import annotations

from lrmoe.integrations.transformers._binding import LRMoEEP, watch_layers
from lrmoe.integrations.transformers._callback import LRMoECallback
from lrmoe.integrations.transformers._clip import clip_grad_norm_
from lrmoe.integrations.transformers._enable import enable, register
from lrmoe.integrations.transformers._handle import Handle
from lrmoe.integrations.transformers._overflow import agree_on_overflow
from lrmoe.integrations.transformers._resume import resume
from lrmoe.integrations.transformers._shard import dense_parameters, expert_parameters, shard_experts
from lrmoe.integrations.transformers._sharded import (
    ShardedExperts,
    install_sharded_experts,
    sharded_parameters,
)

__all__ = [
    "Handle",
    "LRMoECallback",
    "LRMoEEP",
    "ShardedExperts",
    "agree_on_overflow",
    "clip_grad_norm_",
    "dense_parameters",
    "enable",
    "expert_parameters",
    "install_sharded_experts",
    "register",
    "resume",
    "shard_experts",
    "sharded_parameters",
    "watch_layers",
]
