"""Run folders made of plain numbers, as `compare` and `train` write them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LINK = 2.0e8
STEPS = 60
LAYERS = 3
FORWARD = (2600, 1496)
PRUNED = (1434, 1433)
COUNTS = (1800, 500, 300, 900, 400, 196)  # of six experts, three at home on each rank
MIB = 2**20


def compare_run(folder: Path, systems: tuple[str, ...] = ("megatron", "lrmoe"), reached: bool = True) -> Path:
    """A comparison over 2 ranks; the first system drops nothing, the others 30 % after 10 steps."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, entries = [], {}
    for i, name in enumerate(systems):
        own = [_line(name, step, pruned=i > 0 and step > 10) for step in range(1, STEPS + 1)]
        lines += own
        entries[name] = _entry(own, reached)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "kind": "compare",
        "preset": "demo",
        "target_loss": 2.3,
        "smoothing": {"kind": "mean of the last steps", "steps": 10},
        "world_size": 2,
        "seed": 0,
        "link_bytes_per_s": LINK,
        "link_rule": "Link speed: a rule.",
        "model": {"preset": "qwen3-moe-tiny"},
        "context": {
            "command": "lrmoe compare",
            "versions": {"torch": "2.13"},
            "hardware": {"cores": 2},
            "date": "2026-01-01",
        },
        "systems": entries,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.toml").write_text('[train]\nseed = 0\n\n[model]\npreset = "qwen3-moe-tiny"\n')
    return folder


def _line(name: str, step: int, *, pruned: bool) -> dict[str, Any]:
    backward = PRUNED if pruned else FORWARD
    loss = 2.2 + 3.3 * math.exp(-step / 18) + 0.06 * math.sin(step * 2.1 + len(name))
    work = sum(backward) / sum(FORWARD)
    peak = max(backward) / 2048
    return {
        "system": name,
        "step": step,
        "loss": loss,
        "smoothed_loss": None if step < 10 else loss + 0.03,
        "tokens": 4096,
        "wall_s": 0.4 * (0.4 + 0.6 * work),
        "calls": LAYERS,
        "phase_ms": {
            "plan": 0.6, "pack": 4.0, "dispatch": 3.0, "experts": 60.0, "combine": 4.0, "score": 1.0, "select": 1.0,
            "exchange": 4.0 * work, "experts_backward": 100.0 * peak, "return": 4.0 * work,
        },
        "critical_bytes": int(2e7 * (1 + work) / 2),
        "kept_share": work if pruned else 1.0,
        "dropped_energy": 0.04 if pruned else 0.0,
        "added_variance": 0.09 if pruned else 0.0,
        "loads": loads(step, backward, pruned),
    }  # fmt: skip


def loads(step: int, backward: tuple[int, ...] = FORWARD, pruned: bool = False) -> list[dict[str, Any]]:
    """Rows of ranks and pairs of experts; the hottest expert cools with the steps."""
    moved = min(step, 60) * 10
    counts = [COUNTS[0] - moved, COUNTS[1] + moved, *COUNTS[2:]]
    quotas = [int(0.7 * count) if pruned else count for count in counts]
    rows = {"forward_R": list(FORWARD), "backward_R": list(backward), "counts_E": counts, "quota_E": quotas}
    return [{"layer": layer, **rows} for layer in range(LAYERS)]


def memory(stash: int) -> dict[str, Any]:
    """The memory entry of a system's summary."""
    parts = {
        "weights": 4,
        "grads": 8,
        "replicas": 1,
        "dispatched": 3,
        "stash": stash,
        "backward": 5,
        "outputs": 2,
    }
    sizes = {part: size * MIB for part, size in parts.items()}
    found = dict.fromkeys(("measured", "predicted", "call_measured", "call_predicted"), sizes)
    return {**found, "optimizer": 8 * MIB, "memory_budget": 48 * MIB, "layer_budget": None}


def _entry(lines: list[dict[str, Any]], reached: bool) -> dict[str, Any]:
    def total(name: str) -> float:
        return sum(line[name] for line in lines)

    phases = {
        name: sum(line["phase_ms"][name] for line in lines) / total("calls") for name in lines[0]["phase_ms"]
    }
    critical = sum(sum(line["phase_ms"].values()) / 1e3 + line["critical_bytes"] / LINK for line in lines)
    return {
        "reached": reached,
        "steps": len(lines),
        "final_loss": lines[-1]["loss"],
        "moe_time_wall_s": total("wall_s"),
        "moe_time_critical_s": critical,
        "wire_bytes": 2 * total("critical_bytes"),
        "buffer_peak_bytes": 3e7,
        "kept_share": total("kept_share") / len(lines),
        "forward_peak_rows": 2600,
        "backward_peak_rows": max(max(lines[-1]["loads"][0]["backward_R"]), 1),
        "call_ms": {**phases, "wire": total("critical_bytes") / LINK / total("calls") * 1e3},
        "memory": memory(20 if lines[-1]["kept_share"] == 1 else 14),
        "fairness": {"replica_slots": 0, "estimator": "sampled, score lrm"},
        "config": {"policy": "lrmoe", "max_drop": 0.3},
    }


def train_run(folder: Path, steps: int = 30, *, rate: float = 0.1, kept: float = 0.7, every: int = 0) -> Path:
    """A training run, with the keys that `train` writes; evaluated every `every` steps, 0 is never."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "step": step,
            "loss": 5.0 - rate * step,
            "moe_ms_wall": 100.0,
            "lrmoe/kept_share": 1.0 if step < 10 else kept,
            "lrmoe/forward_peak_worst": 1.4,
            "lrmoe/backward_peak_worst": 1.4 if step < 10 else 0.8,
            "lrmoe/ms_experts": 20.0,
            "lrmoe/ms_experts_worst": 25.0,
            "lrmoe/ms_replicas": 0.0,
            "kept_share": 1.0 if step < 10 else kept,
            "dropped_energy": 0.0 if step < 10 else 0.02,
            "added_variance": 0.0 if step < 10 else 0.05,
            "lrmoe/mem_stash_measured_worst": 3.0 * MIB,
            "lrmoe/mem_stash_predicted_worst": 3.5 * MIB,
            "loads": loads(step),
            **({"eval_loss": 5.5 - rate * step} if every and step % every == 0 else {}),
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "name": folder.name,
        "folder": str(folder),
        "world_size": 2,
        "steps": steps,
        "steps_skipped": 0,
    }
    summary |= {
        "final_loss": lines[-1]["loss"],
        "kept_share": kept,
        "tokens_per_s": 1234.5,
        "train_time_s": 9.0,
    }
    summary |= {"moe_time_wall_s": 0.1 * steps, "wire_bytes": 3 * 2**20, "buffer_peak_bytes": 2**21}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.toml").write_text("[lrmoe]\nmax_drop = 0.3\n")
    return folder
