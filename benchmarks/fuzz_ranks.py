"""Random calls of the layer over several ranks, each a process of its own: the second part of `fuzz.py`.

    first rank    draws -> tells all -> makes its part -> gathers -> puts together, judges as on one rank
    other ranks            hear it  ->  make their part -> send what they got

Ranks have other numbers of tokens, none too. In some calls one rank alone is given something wrong, which must be an
error on all of them that the layer survives; in some one rank is built or called otherwise, which all must say. A rank
that waits for another in vain has failed, whatever error ends its waiting.
"""

from __future__ import annotations

import re
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist
from fuzz import Fuzz, HangError, limited
from fuzz_calls import FuzzCall, Part, RanksCall, give
from fuzz_draws import rank_calls
from fuzz_faults import FAULTS, arguments_of
from fuzz_run import KeptSets, Outcome, WrongError, kept_sets, run
from fuzz_truth import compare
from tests.reference import GRADS
from torch import Tensor

from lrmoe.distributed.sharded import Cuts
from lrmoe.errors import LRMoEError
from lrmoe.layer import MoELayer
from lrmoe.planning.shards import expert_cuts

WAIT_S = 60.0  # how long the layer's exchanges wait for another rank
CONTROL_S = 300.0  # the same for what the ranks tell each other between calls


def _with_seed(call: FuzzCall) -> FuzzCall:
    fields = dict(call.config)
    return replace(call, config=tuple({**fields, "seed": fields.get("seed", 0) + 1}.items()))


# What one rank may do otherwise: what every rank's error has to say, and the call as that rank makes it.
DIFFERENCES: Mapping[str, tuple[str, Callable[[FuzzCall], FuzzCall]]] = MappingProxyType(
    {
        "configuration": ("the configuration", _with_seed),
        "hidden size": ("the hidden size", lambda call: replace(call, hidden=call.hidden + 1)),
        "width": ("the expert width", lambda call: replace(call, width=call.width + 1)),
        "experts": ("the number of experts", lambda call: replace(call, experts=2 * call.experts)),
        "activation": (
            "the activation",
            lambda call: replace(call, activation="gelu" if call.activation == "silu" else "silu"),
        ),
        "step": ("the optimizer step", lambda call: replace(call, step=call.step + 1)),
        "mode": ("training or evaluation mode", lambda call: replace(call, made="evaluation")),
        "gradients": ("which tensors need gradients", lambda call: replace(call, needs=("d_hidden",))),
        "dtype": (
            "the dtype",
            lambda call: replace(call, dtypes=("fp32",) * 3 if call.dtypes[2] == "fp64" else ("fp64",) * 3),
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class Said:
    """An error as other ranks hear of it."""

    kind: str
    documented: bool
    text: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Said:
        """Of one that was just caught."""
        return cls(
            kind=type(error).__name__,
            documented=isinstance(error, LRMoEError),
            text=str(error),
            trace=traceback.format_exc(limit=-6),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What one rank got.

    Attributes:
        spoiled: of the call with the fault, None where it was accepted or there was none. error: of the others.
        slow: it took longer than exchanges wait.
    """

    outcomes: Sequence[Outcome]
    kept: KeptSets
    spoiled: Said | None
    error: Said | None
    slow: bool


def answer(drawn: RanksCall, rank: int, group: dist.ProcessGroup | None) -> Answer:
    """Make this rank's part of a call, after the one with the fault if there is one."""
    call, part = part_of(drawn, rank)
    spoiled: list[Said] = []

    def before(layer: MoELayer) -> None:
        if call.fault:
            fault = FAULTS[call.fault] if rank == drawn.odd else None
            try:
                layer(**arguments_of(give(call, 0, part), fault), training=call.trains)
            except Exception as error:
                spoiled.append(Said.of(error))

    outcomes: list[Outcome] = []
    found: Said | None = None
    begin = time.monotonic()
    with warnings.catch_warnings(), kept_sets() as kept:
        warnings.simplefilter("ignore", UserWarning)
        try:
            with limited(2 * WAIT_S):
                given = [give(call, number, part) for number in range(call.micro_batches)]
                outcomes = run(call, given, group, before)
        except Exception as error:
            found = Said.of(error)
    slow = time.monotonic() - begin > WAIT_S
    return Answer(outcomes=outcomes, kept=kept, spoiled=next(iter(spoiled), None), error=found, slow=slow)


def part_of(drawn: RanksCall, rank: int) -> tuple[FuzzCall, Part]:
    """The call as a rank makes it, and its part."""
    call = drawn.shared
    if drawn.differs and rank == drawn.odd:
        call = DIFFERENCES[drawn.differs][1](call)
    return call, Part.of(call, drawn.tokens[rank], rank, len(drawn.sizes))


def judge_ranks(drawn: RanksCall, answers: Sequence[Answer]) -> None:
    """WrongError where the ranks' answers together are not what they may be."""
    slow = [rank for rank, one in enumerate(answers) if one.slow]
    if slow:
        said = [one.error.text if one.error else "no error" for one in answers]
        raise HangError(f"ranks {slow} took more than {WAIT_S:g} s: {said}")
    if drawn.call.fault:
        _judge_fault(drawn, answers)
    if drawn.differs:
        _judge_difference(drawn, answers)
    elif any(one.error is not None for one in answers):
        _judge_errors(drawn.call, [one.error for one in answers])
    else:
        _judge_numbers(drawn, answers)


def _judge_fault(drawn: RanksCall, answers: Sequence[Answer]) -> None:
    names = FAULTS[drawn.call.fault].names
    for rank, one in enumerate(answers):
        if one.spoiled is None:
            raise WrongError(f"{drawn.call.fault}: accepted by rank {rank}")
        wanted = names if rank == drawn.odd else f"rank {drawn.odd} (was given bad input|failed)"
        if not (one.spoiled.documented and re.search(wanted, one.spoiled.text)):
            raise WrongError(
                f"{drawn.call.fault}: rank {rank} does not say {wanted!r}: {one.spoiled.kind}: "
                f"{one.spoiled.text}\n{one.spoiled.trace}"
            )


def _judge_difference(drawn: RanksCall, answers: Sequence[Answer]) -> None:
    names, _ = DIFFERENCES[drawn.differs]
    for rank, one in enumerate(answers):
        if one.error is None or one.error.kind != "RankError" or names not in one.error.text:
            raise WrongError(f"another {drawn.differs}: rank {rank} does not say {names!r}: {one.error}")


def _judge_errors(call: FuzzCall, errors: Sequence[Said | None]) -> None:
    """All ranks, or none, find that a budget is too small; nothing else may be an error."""
    budgets = [name for name in ("layer_budget", "memory_budget") if name in dict(call.config)]
    for rank, error in enumerate(errors):
        if error is None:
            raise WrongError(f"rank {rank} has no error, unlike others: {errors}")
        if error.kind != "InfeasibleError" or not any(name in error.text for name in budgets):
            raise WrongError(f"rank {rank}: {error.kind}: {error.text}\n{error.trace}")


def _judge_numbers(drawn: RanksCall, answers: Sequence[Answer]) -> None:
    kept = _joined_sets(drawn, [one.kept for one in answers])
    for number in range(drawn.call.micro_batches):
        joined = _joined(drawn, [one.outcomes[number] for one in answers])
        compare(drawn.shared, give(drawn.call, number), joined, kept, drawn.tokens)


def _joined_sets(drawn: RanksCall, sets: Sequence[KeptSets]) -> KeptSets:
    """All ranks' choices, pairs numbered over all ranks."""
    firsts = [tokens.start * drawn.call.top_k for tokens in drawn.tokens]
    found: KeptSets = {}
    for call in sets[0].keys() | sets[-1].keys():
        parts = [one[call] for one in sets if call in one]
        if len(parts) < len(sets):
            raise WrongError(f"{call}: {len(parts)} ranks of {len(sets)} chose pairs")
        order = torch.cat([pairs + first for (pairs, _), first in zip(parts, firsts, strict=True)])
        found[call] = order, torch.cat([weights for _, weights in parts])
    return found


def _joined(drawn: RanksCall, parts: Sequence[Outcome]) -> Outcome:
    """One micro-batch of all ranks; WrongError where their records differ in what is the same for all."""
    hidden, records = drawn.call.hidden, [one.record for one in parts]
    if len({str(record and (record.step, record.counts_E, record.quota_E)) for record in records}) > 1:
        raise WrongError(f"records differ between ranks: {records}")
    call, part = part_of(drawn, 0)
    grads = {name: _whole(name, [one.grads[name] for one in parts], call, part.cuts) for name in GRADS}
    return Outcome(
        out=torch.cat([one.out.reshape(-1, hidden) for one in parts]), grads=grads, record=records[0]
    )


def _whole(name: str, parts: Sequence[Tensor | None], call: FuzzCall, cuts: Cuts | None) -> Tensor | None:
    """One gradient of all ranks; None where it was not asked for."""
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        if there:
            raise WrongError(f"{name}: {len(there)} ranks of {len(parts)} have a gradient")
        return None
    if cuts is None or name not in ("d_gate_up", "d_down"):
        return torch.cat(there)
    cut = expert_cuts(call.hidden, call.width, len(parts))[name == "d_down"]
    experts = [part[:, : cut.width(rank)] for rank, part in enumerate(there)]
    return torch.cat(experts, dim=1).view(-1, cut.rows, cut.columns)


class Ranks:
    """The ranks that make drawn calls together; every one of them builds it.

    Attributes:
        first: whether this is the one that draws and judges.
    """

    def __init__(self) -> None:
        self.first = dist.get_rank() == 0
        self._control = dist.new_group(timeout=timedelta(seconds=CONTROL_S), backend="gloo")
        self._group = self._new_group()

    def check(self, drawn: RanksCall) -> None:
        """On the first rank: have a call made, and judge it."""
        judge_ranks(drawn, self._make(drawn))

    def end(self) -> None:
        """On the first rank: that was all."""
        dist.broadcast_object_list([None], src=0, group=self._control)

    def follow(self) -> None:
        """On every other rank: make calls until there are no more."""
        while self._make(None):
            pass

    def _make(self, drawn: RanksCall | None) -> list[Answer]:
        told = [drawn]
        dist.broadcast_object_list(told, src=0, group=self._control)
        if told[0] is None:
            return []
        own = answer(told[0], dist.get_rank(), self._group)
        answers: list[Answer] = [own] * dist.get_world_size()
        dist.all_gather_object(answers, own, group=self._control)
        if any(
            one.slow for one in answers
        ):  # what they wait for may still come, in a call that does not expect it
            self._group = self._new_group()
        return answers

    def _new_group(self) -> dist.ProcessGroup | None:
        return dist.new_group(timeout=timedelta(seconds=WAIT_S), backend="gloo")


def work(number: int, random_seed: int) -> tuple[int, dict[str, str]] | None:
    """What a rank does. On the first: calls made, and the smallest example of each kind of failure."""
    ranks = Ranks()
    if not ranks.first:
        ranks.follow()
        return None
    faults = tuple(name for name, fault in FAULTS.items() if fault.where == "call")
    drawn = rank_calls(dist.get_world_size(), faults, tuple(DIFFERENCES))
    fuzz = Fuzz(check=ranks.check, drawn=drawn)
    fuzz.run(number, random_seed, lambda text: print(f"{dist.get_world_size()} ranks: {text}", flush=True))
    ranks.end()
    return fuzz.calls, fuzz.failures
