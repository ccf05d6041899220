"""Fine-tune a tiny Qwen3-MoE on the standard library's source with Transformers' Trainer and lrmoe. Needs no network.

    python examples/trainer_callback.py

Seconds on one CPU core. Five steps are exact; from then on backward keeps 70% of the (token, expert) pairs, as
the `lrmoe/kept_share` in the logs says.
"""

from __future__ import annotations

import pathlib
import sysconfig
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer, TrainingArguments

import lrmoe
from lrmoe.integrations import transformers as lrmoe_hf

LENGTH = 128


class StandardLibrary(Dataset):
    """The source text of a few modules as bytes, in windows of LENGTH tokens."""

    def __init__(self) -> None:
        folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
        text = b"".join((folder / name).read_bytes() for name in ("argparse.py", "ast.py", "typing.py"))
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.tokens) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": window, "labels": window}


def main() -> None:
    config = Qwen3MoeConfig(
        vocab_size=256,
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
    model = AutoModelForCausalLM.from_config(config)
    handle = lrmoe_hf.enable(model, lrmoe.LRMoEConfig(max_drop=0.3, warmup_steps=5))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=20,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model, arguments, train_dataset=StandardLibrary(), callbacks=[lrmoe_hf.LRMoECallback(handle)]
        )
        trainer.train()
    for logs in trainer.state.log_history:
        if "loss" in logs:
            print(
                f"step {logs['step']:2d}  loss {float(logs['loss']):.3f}  kept {logs['lrmoe/kept_share']:.2f}  "
                f"added variance {logs['lrmoe/added_variance']:.3f}"
            )
    summary = handle.summary()
    print(
        f"{summary['step']} steps, {summary['calls']} MoE calls, kept {summary['kept_share']:.3f} of all pairs"
    )


if __name__ == "__main__":
    main()
