"""What to change when nothing fits: every suggestion was planned and does fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lrmoe.errors import ConfigError, PlanError
from lrmoe.experiments.capacity import Answer, largest_micro_batch, solve
from lrmoe.experiments.capacity_question import Question
from lrmoe.planning.hardware import HARDWARE
from lrmoe.report.tables import size

_LEAN_OPTIMIZER = "adamw-8bit"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change that makes the question feasible.

    Attributes:
        change: as typed on the command line. micro_batch: the largest that then fits.
    """

    change: str
    micro_batch: int


def advise(answer: Answer) -> list[Advice]:
    """Changes, each enough by itself, that make room; empty where nothing of the sort does."""
    question = answer.question
    found = []
    smaller = largest_micro_batch(question)
    if 0 < smaller < question.micro_batch:
        found.append(Advice(change=f"--micro-batch {smaller}", micro_batch=smaller))
    for option, fields in _changes(question):
        changed = _changed(question, fields)
        if changed is not None and solve(changed).fits:
            found.append(Advice(change=option, micro_batch=largest_micro_batch(changed)))
    needed = _budget(answer)
    if needed is not None:
        found.append(needed)
    return found


def _changes(question: Question) -> Iterator[tuple[str, dict[str, Any]]]:
    """Options to try, the cheapest first."""
    if question.checkpointing == "none":
        yield "--checkpointing layer", {"checkpointing": "layer"}
    if question.activations == "stash":
        yield "--activations recompute", {"activations": "recompute"}
    if question.gradient_bytes == 4:
        yield "--grads bf16", {"gradient_bytes": 2}
    lean = {"optimizer": _LEAN_OPTIMIZER}
    if question.optimizer in ("adamw", "adamw-bf16-moments"):
        yield f"--optimizer {_LEAN_OPTIMIZER}", lean
        if question.gradient_bytes == 4:
            yield f"--grads bf16 --optimizer {_LEAN_OPTIMIZER}", {**lean, "gradient_bytes": 2}
    yield from _more_devices(question)


def _more_devices(question: Question) -> Iterator[tuple[str, dict[str, Any]]]:
    for factor in (2, 4, 8):
        gpus = question.gpus * factor
        wider = _changed(question, {"gpus": gpus, "ep": None, "nodes": None})
        if wider is not None and solve(wider).fits:
            yield f"--gpus {gpus}", {"gpus": gpus, "ep": None, "nodes": None}
            break
    larger = [device for device in HARDWARE.values() if device.memory_bytes > question.hardware.memory_bytes]
    if question.calibration.hardware is not None:
        return
    for device in sorted(larger, key=lambda d: d.memory_bytes):
        changed = _changed(question, {"hardware": device})
        if changed is not None and solve(changed).fits:
            yield f"--hardware {device.name}", {"hardware": device}
            break


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
