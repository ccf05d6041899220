"""The reference trainer, one optimizer step at a time.

    per micro-batch  tokens (B, S+1) -> forward -> cross-entropy -> backward
    per step         average and clip over all ranks -> AdamW -> clock of the layers -> records of all ranks

Everything random is keyed by counters (seed, step, ...), so a checkpoint holds no generator state, and several
trainers in one process do not disturb each other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lrmoe.checkpoint import BackgroundSaver, agreed
from lrmoe.checkpoint.agree import rank_of, size_of
from lrmoe.distributed.peers import waiting
from lrmoe.errors import ConfigError
from lrmoe.planning.policies import Policy
from lrmoe.training.config import TrainConfig
from lrmoe.training.data import Corpus
from lrmoe.training.metrics import StepMetrics
from lrmoe.training.model import build_model, read_config
from lrmoe.training.optim import Optimizer, Parameters, Reduced
from lrmoe.training.process import pick_device
from lrmoe.training.records import gather_records
from lrmoe.training.state import load_trainer, save_trainer
from lrmoe.training.totals import Totals
from lrmoe.training.traces import wanted

_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


class Trainer:
    """Trains one model; call `step` as often as wanted.

    Attributes:
        after_backward: called with the number of each micro-batch after its backward and before any update, when
            weights are still those that its forward used; None by default.
        stop_asked: whether this process was asked to stop, looked up in every step. stopping: after a step, whether any
            rank was: the same on all ranks.

    Args:
        config: the run; `config.train.steps` only shapes the learning rate here.
        group: ranks that train together, each holding its share of the experts; None is one device.
        model: a causal language model that already holds this rank's experts, instead of `config.model`.
        corpus: text that is already loaded, instead of `config.data`.
        device: where to train, instead of `config.train.device`.
        policy: plans all layers' calls, instead of the one that `config.lrmoe.policy` names.

    Raises:
        ConfigError: model, data and configuration do not fit, on any rank; raised on every rank.
    """

    def __init__(
        self,
        config: TrainConfig,
        group: dist.ProcessGroup | None = None,
        *,
        model: nn.Module | None = None,
        corpus: Corpus | None = None,
        device: torch.device | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.config = config
        self.group = group
        self.rank, self.world_size = rank_of(group), size_of(group)
        self.device = device if device is not None else pick_device(config.train.device)
        self.corpus = corpus if corpus is not None else agreed(group, lambda: Corpus.load(config.data))
        self.model: Any = agreed(group, self._build) if model is None else model
        self.handle = self._enable(policy)
        # All ranks' records are at hand here, so the watch looks at those instead of this rank's.
        self._watch, self.handle.telemetry.watch = self.handle.telemetry.watch, None
        self.handle.telemetry.keep_counts = wanted(config.train.trace) and self.rank == 0
        self.parameters = Parameters(self.model, _DTYPES[config.train.dtype], group)
        self.optimizer = Optimizer(self.parameters, config.optim, config.train.steps)
        self.steps_done = 0
        self.steps_skipped = 0
        self.resumed_from: int | None = None  # step of the checkpoint, which pruning spares
        self.totals = Totals()
        self.background = BackgroundSaver(group)
        self.after_backward: Callable[[int], None] | None = None
        self.stop_asked: Callable[[], bool] = lambda: False
        self.stopping = False
        self.parameters.zero_grad()

    def _build(self) -> nn.Module:
        size = read_config(self.config.model).vocab_size
        if size < self.corpus.vocab_size:
            raise ConfigError(
                f"data: the corpus has token ids below {self.corpus.vocab_size}, the model's vocab_size is {size}; "
                "set model.overrides.vocab_size or data.tokenizer"
            )
        return build_model(
            self.config.model,
            seed=self.config.train.seed,
            device=self.device,
            group=self.group,
            storage=self.config.lrmoe.storage,
        )

    def _enable(self, policy: Policy | None) -> Any:
        from lrmoe.integrations import transformers as lrmoe_hf

        lrmoe_hf.register()
        handle = lrmoe_hf.enable(self.model, self.config.lrmoe, group=self.group, policy=policy)
        kind = self.config.train.activation_checkpointing
        if kind != "none":
            arguments = {"use_reentrant": kind == "reentrant"}
            self.model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
        return handle

    def step(self) -> StepMetrics:
        """One optimizer step over all micro-batches; every rank of the group calls it.

        A gradient that is not finite on any rank skips the update on all of them, and the step counts as done. Before
        the step a checkpoint that a thread has written by now is published.

        Raises:
            CheckpointError: that thread could not write, on any rank; raised on every rank before the step begins, with
                the trainer as it was. The next call goes on.
        """
        self.background.poll()
        begin = time.perf_counter()
        self.model.train()
        self._seed_generators()
        loss = torch.stack(
            [self._micro_batch(number) for number in range(self.config.train.accumulate)]
        ).sum()
        reduced = self.parameters.reduce(loss, self.config.optim.clip_norm, stop=self.stop_asked())
        self.stopping |= reduced.stop
        lr = self.optimizer.learning_rate(self.steps_done)
        self._update(reduced)
        records = self.handle.telemetry.drain()
        records_by_rank = gather_records(records, self.group, self.device)
        if self._watch is not None:
            for call in zip(*records_by_rank, strict=True):
                self._watch.look(call)
        metrics = StepMetrics(
            step=self.steps_done,
            loss=reduced.loss,
            lr=lr,
            grad_norm=reduced.norm,
            skipped=not reduced.finite,
            tokens=self.world_size * self._tokens_per_rank(),
            step_ms=(time.perf_counter() - begin) * 1e3,
            records=records,
            records_by_rank=records_by_rank,
        )
        self.totals.add(metrics)
        return metrics

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on held-out text over all ranks; leaves no trace in training."""
        train, data = self.config.train, self.config.data
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = train.eval_batches * self.world_size
        for i in range(train.eval_batches):
            tokens = self.corpus.held_out_batch(
                number=i * self.world_size + self.rank,
                total=batches,
                size=train.batch_size,
                seq_len=data.seq_len,
            )
            total += self._losses(tokens.to(self.device))[0]
        if self.world_size > 1:
            with waiting("the sum of all ranks' evaluation losses"):
                dist.all_reduce(total, group=self.group)
        self.model.train()
        self.handle.telemetry.drain()
        return total.item() / batches

    def save(self) -> Path:
        """Write a checkpoint of the steps done so far into the run's folder; every rank calls it.

        With `train.checkpoint_async` it is copied now and written by a thread; a later `step`, `save` or
        `finish_saving` publishes it.

        Raises:
            CheckpointError: some rank could not write; raised on every rank.
        """
        return save_trainer(self)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that a thread is writing, and publish it; every rank calls it.

        Raises:
            CheckpointError: some rank could not write; raised on every rank.
        """
        self.background.wait()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """At the end of the block publish what is being written; where it fails, leave no half of it behind."""
        try:
            yield
            self.finish_saving()
        except BaseException:
            self.background.drop()  # peers may be gone
            raise

    def resume(self) -> int:
        """Go on from the newest usable checkpoint in the run's folder; returns the steps it has done.

        Raises:
            CheckpointError: there is none, or it belongs to another model or corpus; raised on every rank.
        """
        return load_trainer(self)

    def _micro_batch(self, number: int) -> Tensor:
        """Forward and backward; returns this micro-batch's share of the step's mean loss on the text, detached."""
        train = self.config.train
        tokens = self.corpus.train_batch(
            seed=train.seed,
            step=self.steps_done,
            micro_batch=number,
            rank=self.rank,
            world_size=self.world_size,
            size=train.batch_size,
            seq_len=self.config.data.seq_len,
        )
        loss, balance = self._losses(tokens.to(self.device), train.router_aux_loss)
        total = loss if balance is None else loss + train.router_aux_loss * balance
        (total / train.accumulate).backward()
        if self.after_backward is not None:
            self.after_backward(number)
        self.parameters.collect()
        return loss.detach() / train.accumulate

    def _losses(self, tokens: Tensor, aux: float = 0.0) -> tuple[Tensor, Tensor | None]:
        """Mean next-token cross-entropy of (B, S+1) ids, and with `aux` the router's load-balancing loss.

        The first `train.skip_positions` predictions of each sequence are left out of the mean.
        """
        extra = {"output_router_logits": True} if aux else {}
        output = self.model(input_ids=tokens[:, :-1], use_cache=False, **extra)
        logits = output.logits
        if logits.dtype != torch.float64:  # which only tests use
            logits = logits.float()
        skip = self.config.train.skip_positions
        logits, targets = logits[:, skip:], tokens[:, 1 + skip :]
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, self._balance(output.router_logits) if aux else None

    def _balance(self, router_logits: tuple[Tensor, ...]) -> Tensor:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        config = self.model.config
        loss: Tensor = load_balancing_loss_func(
            router_logits, config.num_local_experts, config.num_experts_per_tok
        )
        return loss

    def _update(self, reduced: Reduced) -> None:
        if reduced.finite:
            self.optimizer.step(self.steps_done)
            self.parameters.publish()
        else:
            self.steps_skipped += 1
        self.parameters.zero_grad()
        self.handle.step()
        self.steps_done += 1

    def _seed_generators(self) -> None:
        """Dropout and the like: keyed by (seed, step, rank)."""
        key = (self.config.train.seed * 1_000_003 + self.steps_done) * 65_537 + self.rank
        torch.manual_seed(key % 2**63)

    def _tokens_per_rank(self) -> int:
        train = self.config.train
        return train.batch_size * train.accumulate * self.config.data.seq_len
