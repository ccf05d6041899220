"""Expert parallelism over two processes: a checkpoint loaded through Transformers, trained with a pruned backward.

    torchrun --nproc_per_node 2 examples/ep_torchrun.py

Seconds on CPU (gloo), no network; the same code runs on GPUs (NCCL). Each rank holds half of the experts and reads
only those; everything else is sharded by FSDP2. Every rank has its own batch.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import lrmoe
from lrmoe.integrations import transformers as lrmoe_hf

STEPS, BATCH, LENGTH, VOCABULARY = 12, 4, 64, 256


def save_tiny_model(folder: str) -> None:
    """A checkpoint as one would get from the Hub."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def start() -> tuple[int, int, torch.device]:
    """Join the group torchrun describes: NCCL on GPUs, gloo without."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size(), device


def main() -> None:
    if "RANK" not in os.environ:
        sys.stderr.write(
            "This example needs several processes. Start it with\n\n"
            "    torchrun --nproc_per_node 2 examples/ep_torchrun.py\n"
        )
        sys.exit(2)
    rank, ranks, device = start()
    shared = [tempfile.mkdtemp(prefix="lrmoe-example-") if rank == 0 else ""]
    if rank == 0:
        save_tiny_model(shared[0])
    dist.broadcast_object_list(shared, src=0)

    lrmoe_hf.register()
    model = AutoModelForCausalLM.from_pretrained(
        shared[0],
        dtype=torch.float32,
        distributed_config=DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="lrmoe"),
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    handle = lrmoe_hf.enable(model, lrmoe.LRMoEConfig(max_drop=0.5, warmup_steps=4))
    handle.attach(optimizer)

    generator = torch.Generator().manual_seed(rank)
    pattern = torch.randint(0, VOCABULARY, (LENGTH // 4,), generator=torch.Generator().manual_seed(9))
    for step in range(STEPS):
        start_at = torch.randint(0, len(pattern), (BATCH, 1), generator=generator)
        ids = pattern[(start_at + torch.arange(LENGTH)) % len(pattern)].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        figures = handle.figures()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        if rank == 0:
            print(
                f"step {step:2d}  loss {mean_loss.item() / ranks:.3f}  kept {figures['lrmoe/kept_share']:.2f}  "
                f"busiest rank {figures['lrmoe/forward_peak']:.2f} -> {figures['lrmoe/backward_peak']:.2f} of the mean"
            )
    if rank == 0:
        print(f"bytes rank 0 sent: {handle.summary()['wire_bytes']}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
