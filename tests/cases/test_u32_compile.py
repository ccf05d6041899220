"""U32: compiled blocks and models have the eager ones' numbers, whatever the counts, in a bounded number of graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrmoe import LRMoEConfig
from lrmoe.integrations import transformers as lrmoe_hf
from tests.integrations.models import make_model, make_tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler itself
EXACT = LRMoEConfig(max_drop=0)
PRUNED = LRMoEConfig(max_drop=0.4, warmup_steps=0)
# (sequences, tokens): experts get from no row to dozens of rows, some exactly one
SIZES = [(2, 12), (1, 9), (3, 7), (1, 1), (2, 1), (4, 16), (1, 2), (2, 30), (5, 3), (1, 17)]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def pair(
    config: LRMoEConfig, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedModel, list[lrmoe_hf.Handle]]:
    """Two equal enabled models and their handles: the first stays as it is, the second is to be compiled."""
    plain = make_model("qwen3", dtype=torch.float64, num_hidden_layers=1, **changes)
    model = copy.deepcopy(plain)
    return plain, model, [lrmoe_hf.enable(one, config) for one in (plain, model)]


def block_grads(block: nn.Module, call: Any, hidden: Tensor) -> dict[str, Tensor | None]:
    block.zero_grad()
    given = hidden.clone().requires_grad_(True)
    out = call(given)
    out.square().sum().backward()
    return {
        "out": out.detach(),
        "hidden": given.grad,
        **{n: None if p.grad is None else p.grad.clone() for n, p in block.named_parameters()},
    }


@pytest.mark.parametrize(
    ("backend", "config"), [("eager", EXACT), ("aot_eager", PRUNED)], ids=["eager", "aot"]
)
def test_a_block_at_ten_sizes(backend: str, config: LRMoEConfig) -> None:
    plain, model, handles = pair(config)
    ours, theirs = model.model.layers[0].mlp, plain.model.layers[0].mlp
    compiled = torch.compile(ours, backend=backend, dynamic=None)
    made, rows = [], set()
    for number, size in enumerate(SIZES):
        hidden = torch.randn(*size, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        found, wanted = block_grads(ours, compiled, hidden), block_grads(theirs, theirs, hidden)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{name} at {size}")
        made.append(graphs())
        for record in handles[1].telemetry.drain():
            rows.update(record.counts_E)
    assert {0, 1} <= rows, "the sizes do not cover experts without rows and with one"
    assert made[0] == 2, "the layer breaks the graph once: one before it, one after"
    # One for the first size, one for sizes that vary, and some for a batch or a sequence of 1, which the compiler
    # takes for a constant; none for a new count.
    assert made[-1] <= 10, made
    assert made[-1] == made[4], made


def test_the_layer_breaks_the_graph_and_nothing_else_does() -> None:
    _, model, _ = pair(EXACT)
    torch.compile(model.model.layers[0].mlp, backend="eager")(torch.randn(2, 5, 32).double()).sum().backward()
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert len(breaks) == 1, dict(breaks)


def grads(model: PreTrainedModel, call: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out = call(input_ids=ids, labels=ids)
    out.loss.backward()
    return {"loss": out.loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_trained_and_evaluated_in_between(checkpointing: bool) -> None:
    plain, model, handles = pair(PRUNED)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="eager")
    for seed, length in enumerate((12, 7)):
        ids = make_tokens(2, length, seed=seed)
        found, wanted = grads(model, compiled, ids), grads(plain, plain, ids)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-11, msg=name)
        with torch.no_grad():
            model.eval()
            plain.eval()
            ours, theirs = (call(input_ids=ids).logits for call in (compiled, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        model.train()
        plain.train()
    assert handles[1].summary()["calls"] == 2, "a recompute or an evaluation counted"
