"""What cases on several ranks share: tiny models on disk, loaded whole or spread, and the eager model's gradients.

Every rank has a batch of its own; the reference is the eager model on one process with the mean of the ranks' losses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from lrmoe.integrations import transformers as lrmoe_hf
from tests.integrations.models import make_model, make_tokens

LIMIT_S = 90.0


def save_models(folder: Path, names: Sequence[str], dtype: torch.dtype = torch.float64) -> dict[str, str]:
    """Folders of tiny models, by name."""
    for name in names:
        make_model(name, dtype=dtype).save_pretrained(folder / name)
    return {name: str(folder / name) for name in names}


def load(path: str, dtype: torch.dtype, **layout: Any) -> PreTrainedModel:
    """A saved model in train mode, spread as `layout` says (DistributedConfig), whole without one."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=ranks, OMP_NUM_THREADS="1"
    )
    lrmoe_hf.register()
    spread = {"distributed_config": DistributedConfig(**layout)} if layout else {}
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager", **spread
    )
    return model.train()


def batches(lengths: list[int]) -> list[Tensor]:
    """One sequence per rank."""
    return [make_tokens(1, length, seed=10 + rank) for rank, length in enumerate(lengths)]


def reference(path: str, dtype: torch.dtype, ids: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of the mean of the ranks' losses, and this rank's loss."""
    model = load(path, dtype)
    losses = [model(input_ids=one, labels=one).loss for one in ids]
    (sum(losses) / len(losses)).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": losses[dist.get_rank()].detach(), **found}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor on every rank, where it is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model: PreTrainedModel, ids_BS: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """This rank's loss and the whole gradients."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids_BS, **{"labels": ids_BS, **inputs}).loss
    loss.backward()
    named = {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **named}


def reduce_by_hand(model: PreTrainedModel, ids_BS: Tensor) -> None:
    """Gradients of the mean loss of experts cut by hand: dense ones averaged over ranks, expert ones complete."""
    model.zero_grad(set_to_none=True)
    (model(input_ids=ids_BS, labels=ids_BS).loss / dist.get_world_size()).backward()
    for parameter in lrmoe_hf.dense_parameters(model):
        dist.all_reduce(parameter.grad)
