"""What a random call of the layer is, and the tensors and configuration that it stands for.

A call is a few words and numbers, so that the smallest example that fails can be printed and read.

Shape letters: T tokens, K experts per token, E experts, H hidden, I expert width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.distributed.sharded import Cuts, cut_experts
from lrmoe.planning.shards import expert_cuts

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # the reference is the tests', which nobody installs

from tests.reference import GRADS, Case, make_case  # after the path is set

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
ID_DTYPES = {"int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "uint8": torch.uint8}
# How the pass is made: plainly, under gradient checkpointing, with a retained graph, in evaluation.
PASSES = ("plain", "reentrant", "non-reentrant", "retained", "evaluation", "no_grad", "inference_mode")
# Which ids the router gives beside those of experts that exist, each to about a tenth of the pairs.
STRANGE_IDS = {"none": 0, "-1": -1, "E": None, "far": 2**40, "far below": -(2**63)}
FILLS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "zero": 0.0}
# Budgets of a call's own size: its weights and gradients, and so much of what its rows take where all are kept.
ROWS = {"rows * 0.2": 0.2, "rows * 0.3": 0.3, "rows * 0.45": 0.45, "rows * 0.6": 0.6, "rows * 0.8": 0.8}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "sliced": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "offset": lambda x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape),
    "interleaved": lambda x: torch.stack([x, x], dim=-1)[..., 1],
}


@dataclass(frozen=True, kw_only=True, repr=False)
class FuzzCall:
    """One drawn call, with as many micro-batches as it says.

    Attributes:
        entry: "layer" (MoELayer) or "enable" (an experts module of Transformers).
        dtypes: of hidden states, routing weights and projections; autocast: a dtype or "".
        fill: "" or a word of FILLS, and where it is put; scale: of the arriving gradient.
        layouts: of hidden states, routing weights, projections, arriving gradient; one_row: every token is the same.
        mask: "" or "some", "all", "none" of the tokens are padding; needs: what gets a gradient.
        config: fields of LRMoEConfig that are set. fault: "" or what is wrong with the call (fuzz_faults).
    """

    entry: str = "layer"
    tokens: int = 0
    experts: int = 1
    top_k: int = 1
    hidden: int = 1
    width: int = 1
    seed: int = 0
    skew: float = 0.0
    activation: str = "silu"
    dtypes: tuple[str, str, str] = ("fp64", "fp64", "fp64")
    autocast: str = ""
    ids: str = "int64"
    strange: str = "none"
    doubled: bool = False
    fill: tuple[str, str] = ("", "")
    scale: float = 1.0
    layouts: tuple[str, str, str, str] = ("contiguous",) * 4
    one_row: bool = False
    batched: bool = False
    mask: str = ""
    needs: tuple[str, ...] = GRADS
    made: str = "plain"
    micro_batches: int = 1
    reverse: bool = False
    step: int = 0
    config: tuple[tuple[str, Any], ...] = ()
    fault: str = ""

    def __repr__(self) -> str:
        """What differs from the defaults, which are the smallest call."""
        set_here = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"FuzzCall({', '.join(f'{name}={value!r}' for name, value in set_here.items())})"

    @property
    def settings(self) -> LRMoEConfig:
        """The configuration, with budgets in bytes."""
        fields = dict(self.config)
        for name in ("layer_budget", "memory_budget"):
            if fields.get(name) in ROWS:
                fields[name] = self._bytes(ROWS[fields[name]])
        return LRMoEConfig(**fields)

    def _bytes(self, share: float) -> int:
        pairs, size = self.tokens * self.top_k, DTYPES[self.dtypes[2]].itemsize
        weights = 2 * self.experts * 3 * self.hidden * self.width * size
        rows = pairs * (
            (6 * self.hidden + 8 * self.width) * size + 128
        )  # beside values, a few numbers a pair
        return int(weights + share * rows) + 64

    @property
    def trains(self) -> bool:
        """Whether the layer is told that it trains."""
        return self.made not in ("evaluation", "no_grad", "inference_mode")


@dataclass(frozen=True, kw_only=True)
class RanksCall:
    """One drawn call over several ranks.

    Attributes:
        call: of all ranks together; a fault is that of one of them. sizes: tokens of each rank.
        odd: the rank that has the fault or is different. differs: "" or in what (fuzz_ranks).
    """

    call: FuzzCall
    sizes: tuple[int, ...]
    odd: int = 0
    differs: str = ""

    @property
    def tokens(self) -> list[slice]:
        """Of all ranks' tokens, each one's."""
        ends = [sum(self.sizes[: rank + 1]) for rank in range(len(self.sizes))]
        return [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]

    @property
    def shared(self) -> FuzzCall:
        """The call with budgets in bytes: of a rank's own size, and the same on all."""
        each = replace(self.call, tokens=max(self.sizes), experts=self.call.experts // len(self.sizes))
        config = tuple((name, getattr(each.settings, name)) for name, _ in self.call.config)
        return replace(self.call, config=config)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one of several ranks has of a call.

    Attributes:
        tokens: of all ranks' tokens, the rank's. rank, ranks: which of how many.
        cuts: of the projections where the rank has a part of every expert; None where it has whole ones.
    """

    tokens: slice = field(default_factory=lambda: slice(None))
    rank: int = 0
    ranks: int = 1
    cuts: Cuts | None = None

    @classmethod
    def of(cls, call: FuzzCall, tokens: slice, rank: int, ranks: int) -> Part:
        """The part in the call's storage."""
        sharded = dict(call.config).get("storage") == "sharded"
        cuts = expert_cuts(call.hidden, call.width, ranks) if sharded else None
        return cls(tokens=tokens, rank=rank, ranks=ranks, cuts=cuts)

    def tensors(self, case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states, routing weights and projections that the rank gives its layer."""
        experts = (case.gate_up, case.down)
        if self.cuts is None:
            each = case.num_experts // self.ranks
            held = [whole[self.rank * each : (self.rank + 1) * each] for whole in experts]
        else:
            held = [cut_experts(whole, cut, self.rank) for whole, cut in zip(experts, self.cuts, strict=True)]
        return case.hidden[self.tokens], case.weights[self.tokens], held[0], held[1]


WHOLE = Part()


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """Tensors of one micro-batch as a rank's layer gets them, in their dtypes and layouts, and what arrives at them.

    `case` holds the values of all ranks in plain layout, padding not yet taken out. `views` are by the reference's
    gradient names; gradients are read from them.
    """

    case: Case
    views: dict[str, Tensor]
    ids: Tensor
    mask: Tensor | None
    grad: Tensor = field(repr=False)


def give(call: FuzzCall, number: int, part: Part = WHOLE) -> Given:
    """The tensors of micro-batch `number`."""
    case, mask = _values(call, number), _mask(call, number)
    names = zip(GRADS, part.tensors(case), strict=True)
    layouts = dict(zip(GRADS, (*call.layouts[:3], call.layouts[2]), strict=True))
    views = {}
    for name, value in names:
        leaf = value.clone().requires_grad_(name in call.needs)
        views[name] = LAYOUTS[layouts[name]](leaf)
        if views[name].requires_grad:
            views[name].retain_grad()
    return Given(
        case=case,
        views=views,
        ids=case.ids[part.tokens].to(ID_DTYPES[call.ids]),
        mask=None if mask is None else mask[part.tokens],
        grad=LAYOUTS[call.layouts[3]](case.grad_out[part.tokens]),
    )


def _values(call: FuzzCall, number: int) -> Case:
    case = make_case(
        tokens=call.tokens,
        experts=call.experts,
        top_k=call.top_k,
        hidden=call.hidden,
        width=call.width,
        seed=call.seed + number,
        activation=call.activation,
        skew=call.skew,
    )
    case = replace(case, ids=_ids(call, case.ids, number), grad_out=case.grad_out * call.scale)
    if call.one_row and call.tokens:
        case = replace(case, hidden=case.hidden[:1].expand_as(case.hidden).clone())
    _fill(call, case, number)
    hidden, routing, projections = (DTYPES[name] for name in call.dtypes)
    return replace(
        case,
        hidden=case.hidden.to(hidden),
        weights=case.weights.to(routing),
        gate_up=case.gate_up.to(projections),
        down=case.down.to(projections),
        grad_out=case.grad_out.to(hidden),
    )


def _dice(call: FuzzCall, number: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(call.seed + 1000 + number))


def _ids(call: FuzzCall, ids_TK: Tensor, number: int) -> Tensor:
    dice = _dice(call, number, *ids_TK.shape)
    strange = STRANGE_IDS[call.strange]
    if call.doubled:
        ids_TK = torch.where(dice > 0.8, ids_TK[:, :1], ids_TK)
    if call.strange != "none":
        limits = torch.iinfo(ID_DTYPES[call.ids])
        value = call.experts if strange is None else min(max(strange, limits.min), limits.max)
        nobody = value if not 0 <= value < call.experts else call.experts
        ids_TK = torch.where(dice < 0.2, torch.tensor(nobody), ids_TK)
    return ids_TK


def _fill(call: FuzzCall, case: Case, number: int) -> None:
    """Put a value into about a tenth of the rows of one tensor."""
    kind, where = call.fill
    if kind and call.tokens:
        rows = _dice(call, number + 7, call.tokens) < 0.15
        target = {"hidden": case.hidden, "weights": case.weights, "grad": case.grad_out}[where]
        target[rows, 0] = FILLS[kind]
        if kind == "zero":
            target[rows] = 0.0


def _mask(call: FuzzCall, number: int) -> Tensor | None:
    """True where a token is real, bool (T,), or None."""
    if not call.mask:
        return None
    share = {"some": 0.4, "all": 2.0, "none": -1.0}[call.mask]
    return _dice(call, number + 13, call.tokens) >= share
