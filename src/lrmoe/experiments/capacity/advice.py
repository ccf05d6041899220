"""What to change when nothing fits: every suggestion was planned and does fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lrmoe.errors import ConfigError, PlanError
from lrmoe.experiments.capacity.answer import Answer, largest_micro_batch, solve
from lrmoe.experiments.capacity.question import Question
from lrmoe.planning.hardware import HARDWARE
from lrmoe.report.numbers import size

_LEAN_OPTIMIZER = "adamw-8bit"
_MOST_GPUS = 1024


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change that makes the question feasible.

    Attributes:
        change: as typed on the command line. micro_batch: the largest that then fits.
    """

    change: str
    micro_batch: int


def advise(answer: Answer) -> list[Advice]:
    """Changes, each enough by itself, that make room; empty where none of those `tried` does."""
    question = answer.question
    found = []
    smaller = largest_micro_batch(question)
    if 0 < smaller < question.micro_batch:
        found.append(Advice(change=f"--micro-batch {smaller}", micro_batch=smaller))
    for ways in _changes(question):
        for option, fields in ways:
            changed = _changed(question, fields)
            if changed is not None and solve(changed).fits:
                found.append(Advice(change=option, micro_batch=largest_micro_batch(changed)))
                break
    needed = _budget(answer)
    if needed is not None:
        found.append(needed)
    return found


def tried(question: Question) -> list[str]:
    """Every change that `advise` plans where none fits, as typed; without those that the question cannot take."""
    smaller = ["--micro-batch 1"] if question.micro_batch > 1 else []
    return smaller + [
        option
        for ways in _changes(question)
        for option, fields in ways
        if _changed(question, fields) is not None
    ]


Way = tuple[str, dict[str, Any]]  # as typed, fields of the question


def _changes(question: Question) -> Iterator[list[Way]]:
    """Options to try, the cheapest first; of each list the first that fits is enough."""
    if question.checkpointing == "none":
        yield [("--checkpointing layer", {"checkpointing": "layer"})]
    if question.activations == "stash":
        yield [("--activations recompute", {"activations": "recompute"})]
    if question.gradient_bytes == 4:
        yield [("--grads bf16", {"gradient_bytes": 2})]
    lean = {"optimizer": _LEAN_OPTIMIZER}
    if question.optimizer in ("adamw", "adamw-bf16-moments"):
        yield [(f"--optimizer {_LEAN_OPTIMIZER}", lean)]
        if question.gradient_bytes == 4:
            yield [(f"--grads bf16 --optimizer {_LEAN_OPTIMIZER}", {**lean, "gradient_bytes": 2})]
    yield _more_gpus(question)
    yield _larger_devices(question)


def _more_gpus(question: Question) -> list[Way]:
    """Powers of two above the GPUs asked for, the experts over as many ranks as can share them."""
    ways: list[Way] = []
    for gpus in (2**power for power in range(1, _MOST_GPUS.bit_length())):
        if gpus <= question.gpus:
            continue
        ep = max(ranks for ranks in question.expert_ranks if gpus % ranks == 0)
        shared = None if ep == gpus else ep
        option = f"--gpus {gpus}" + ("" if shared is None else f" --ep {ep}")
        ways.append((option, {"gpus": gpus, "ep": shared, "nodes": None}))
    return ways


def _larger_devices(question: Question) -> list[Way]:
    """Devices with more memory, the smallest first; none where measurements tie the question to one."""
    if question.calibration.hardware is not None:
        return []
    larger = [device for device in HARDWARE.values() if device.memory_bytes > question.hardware.memory_bytes]
    return [
        (f"--hardware {device.name}", {"hardware": device})
        for device in sorted(larger, key=lambda d: d.memory_bytes)
    ]


def _changed(question: Question, fields: dict[str, Any]) -> Question | None:
    """The changed question, or None where it makes no sense (more ranks than experts, say)."""
    try:
        return question.change(**fields)
    except (ConfigError, PlanError):
        return None


def _budget(answer: Answer) -> Advice | None:
    """The smallest budget under which the leanest way tried would fit, where a budget is what binds."""
    over = {name: need for name, (need, limit) in answer.limits.items() if need > limit}
    if not over or "device" in over:
        return None
    options = {"budget": "--budget", "layer budget": "--layer-budget"}
    change = " ".join(f"{options[name]} {need} ({size(need)})" for name, need in over.items())
    return Advice(change=change, micro_batch=answer.question.micro_batch)
