"""A capacity answer as JSON lines, and a sweep as rows of a CSV file."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrmoe.experiments.capacity.advice import Advice
from lrmoe.experiments.capacity.answer import Answer
from lrmoe.experiments.capacity.report import PARTS, assumptions, describe, kind_of, mode, shortfalls
from lrmoe.planning.calibration import MODELLED
from lrmoe.telemetry.figures import figure


def figures(answer: Answer, largest: int, advice: Sequence[Advice]) -> list[dict[str, Any]]:
    """One object per figure; the first one's context holds the whole plan."""
    q = answer.question
    case = f"plan.{q.model.name.lower()}.{q.hardware.name}.gpus{q.gpus}"
    kind = {"kind": kind_of(answer), "mode": mode(answer)}
    forward, backward = answer.model.rank(answer.rank)
    fullest = forward if sum(forward.values()) > sum(backward.values()) else backward
    sizes = {f"bytes.{part}": fullest.get(part, 0) for part in PARTS}
    sizes |= {"bytes.reserved": answer.reserved_bytes, "bytes.device": answer.device_need}
    sizes |= {"call_bytes": answer.call_need}
    lines = [figure(f"{case}.fits", int(answer.fits), "boolean", "higher", report=as_dict(answer, advice))]
    lines.append(figure(f"{case}.largest_micro_batch", largest, "sequences", "higher", kind=MODELLED))
    lines += [
        figure(f"{case}.{name}", value, "bytes", "lower", kind=MODELLED) for name, value in sizes.items()
    ]
    peaks = {
        "fixed_peak": answer.fixed_peak,
        "forward_peak": answer.forward_peak,
        "backward_peak": answer.backward_peak,
    }
    lines += [figure(f"{case}.{name}", value, "mean loads", "lower", **kind) for name, value in peaks.items()]
    for phase, ms in answer.time.phases.items():
        lines.append(figure(f"{case}.ms.{phase}", ms, "ms", "lower", kind=answer.time.labels[phase]))
    lines.append(figure(f"{case}.ms.layer_call", answer.time.total_ms, "ms", "lower", **kind))
    lines.append(figure(f"{case}.ms.all_layers", answer.moe_ms, "ms", "lower", **kind))
    return lines


def as_dict(answer: Answer, advice: Sequence[Advice]) -> dict[str, Any]:
    """The whole answer in plain values."""
    plan, q = answer.plan, answer.question
    foreign = plan.foreign_J
    return {
        "described": describe(answer),
        "mode": mode(answer),
        "limits": {
            name: {"needed": need, "available": limit} for name, (need, limit) in answer.limits.items()
        },
        "advice": [{"change": a.change, "largest_micro_batch": a.micro_batch} for a in advice],
        "call": dict(
            zip(("forward", "backward"), answer.call.rank(int(answer.call.peak_R.argmax())), strict=True)
        ),
        "model": dict(zip(("forward", "backward"), answer.model.rank(answer.rank), strict=True)),
        "device_bytes_by_rank": (answer.model.peak_R + answer.reserved_bytes).tolist(),
        "reserved": dict(answer.reserved),
        "reserved_is": "given" if q.reserved is not None else "estimated",
        "skew": {"pattern": q.skew, "seed": q.seed, "fixed_peak": answer.fixed_peak},
        "counts": plan.counts_E.tolist(),
        "quotas": plan.quota_E.tolist(),
        "copies_beyond_one": int(answer.beyond_R.sum()),
        "foreign_experts": [
            {"expert": int(e), "rank": int(r)}
            for e, r in zip(plan.instance_expert_J[foreign], plan.instance_rank_J[foreign], strict=True)
        ],
        "forward_load": plan.forward_load_R.tolist(),
        "backward_load": plan.backward_load_R.tolist(),
        "chunks": [plan.forward_chunks, plan.backward_chunks],
        "ms": {"forward": dict(answer.time.forward), "backward": dict(answer.time.backward)},
        "kinds": dict(answer.time.labels),
        "assumptions": assumptions(answer),
    }


COLUMNS = (
    "model", "hardware", "gpus", "ep", "nodes", "micro_batch", "sequence", "policy", "slots", "max_drop", "peak",
    "fits", "mode", "device_bytes", "device_available", "replicas", "kept_share", "forward_peak", "backward_peak",
    "layer_ms", "moe_ms", "moe_tokens_per_s", "largest_micro_batch", "kind", "why",
)  # fmt: skip


def sweep_row(answer: Answer, largest: int) -> dict[str, Any]:
    """One row of the capacity table."""
    q, plan = answer.question, answer.plan
    need, limit = answer.limits["device"]
    return {
        "model": q.model.name,
        "hardware": q.hardware.name,
        "gpus": q.gpus,
        "ep": q.ranks,
        "nodes": q.node_count,
        "micro_batch": q.micro_batch,
        "sequence": q.sequence,
        "policy": q.policy,
        "slots": q.slots,
        "max_drop": q.max_drop,
        "peak": q.peak,
        "fits": "yes" if answer.fits else "no",
        "mode": mode(answer),
        "device_bytes": need,
        "device_available": limit,
        "replicas": int(answer.beyond_R.sum()),
        "kept_share": round(plan.kept / max(plan.pairs, 1), 4),
        "forward_peak": round(answer.forward_peak, 4),
        "backward_peak": round(answer.backward_peak, 4),
        "layer_ms": round(answer.time.total_ms, 3),
        "moe_ms": round(answer.moe_ms, 2),
        "moe_tokens_per_s": round(q.tokens * q.gpus / answer.moe_ms * 1e3),
        "largest_micro_batch": largest,
        "kind": kind_of(answer),
        "why": "; ".join(shortfalls(answer)),
    }


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The capacity table as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)


def json_lines(lines: Sequence[Mapping[str, Any]]) -> str:
    """JSON, one object a line."""
    return "\n".join(json.dumps(line) for line in lines)
