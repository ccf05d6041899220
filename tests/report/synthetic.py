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


def train_run(
    folder: Path, steps: int = 30, *, rate: float = 0.1, kept: float = 0.7, every: int = 0, check: int = 0
) -> Path:
    """A training run, with the keys that `train` writes; evaluated every `every` and its gradient checked every `check`
    steps, 0 is never.
    """
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
            **(_check(step, step // check) if check and step % check == 0 else {}),
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


def _check(step: int, number: int) -> dict[str, Any]:
    found = {
        "check_cosine": 0.9 + 0.001 * step,
        "check_relative_error": 0.4,
        "check_layer": (number - 1) % LAYERS,
    }
    return {f"lrmoe/{name}": value for name, value in found.items()}


def replay_run(folder: Path, names: tuple[str, ...] = ("megatron", "lrmoe")) -> Path:
    """A replay of a call over 2 ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "link_bytes_per_s": LINK, "link": "given", "call": "seed 0", "ranks": 2, "experts": 6, "top_k": 2,
        "pairs": 4096,
        "fixed_peak": 1.27, "history": 4, "hidden": 64, "expert_width": 24, "dtype": "fp32", "wire": "one row per pair",
        "activations": "stash", "activations_mean": "rows stay", "slots": 2, "estimator": "sampled", "score": "lrm",
        "repeats": 1,
    }  # fmt: skip
    summary = {
        "kind": "replay",
        "settings": settings,
        "measured": "thread CPU time",
        "modelled": "exchange",
        "context": {"command": "lrmoe replay"},
        "systems": {name: _replayed(i) for i, name in enumerate(names)},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _replayed(i: int) -> dict[str, Any]:
    share = 1 - 0.3 * i
    sides = {
        "forward": {"measured": {"plan": 1.0, "experts": 20.0}, "modelled": {"dispatch": 4.0}},
        "backward": {"measured": {"experts_backward": 40.0 * share}, "modelled": {"return": 4.0 * share}},
    }
    parts = {
        "forward": {"weights": MIB, "dispatched": 2 * MIB},
        "backward": {"grads": MIB, "backward": 3 * MIB},
    }
    return {
        "forward_peak": 1.27, "backward_peak": 1.27 * share, "kept_share": share, "forward_ms": 25.0,
        "backward_ms": 44.0 * share, "backward_speedup": 1 / share, "layer_speedup": 69 / (25 + 44 * share),
        "repeats": 1,
        "forward_subtotal": 3 * MIB, "backward_subtotal": 4 * MIB, "backward_memory": 5 * MIB, "replicas": i,
        "forward_subtotal_reduction": 0.0, "backward_subtotal_reduction": 0.1 * i, "phases": sides, "parts": parts,
    }  # fmt: skip


def plan_csv(path: Path) -> Path:
    """A capacity table of two cases, the second of which does not fit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = (
        "model,hardware,gpus,ep,nodes,micro_batch,fits,mode,device_bytes,device_available,kept_share,layer_ms"
    )
    rows = [f"{columns},largest_micro_batch,kind,why"]
    rows.append(f"Tiny,h100,8,8,1,1,yes,stash,{50 * 2**30},{72 * 2**30},0.7,3.5,2,modelled,")
    rows.append(f"Tiny,h100,16,16,2,1,no,stash,{90 * 2**30},{72 * 2**30},0.7,6.25,0,modelled,needs 90 GiB")
    path.write_text("\n".join(rows) + "\n")
    return path


def plan_lines(path: Path) -> Path:
    """What `lrmoe plan --json` prints for one plan over 2 ranks."""
    parts = {"weights": 2 * MIB, "grads": 4 * MIB, "stash": 6 * MIB}
    report = {
        "described": "Tiny on 2 x h100", "mode": "stash", "advice": [], "assumptions": ["Nothing was measured."],
        "limits": {"device": {"needed": 20 * MIB, "available": 64 * MIB}}, "reserved": {"logits": 3 * MIB},
        "call": {"forward": parts, "backward": parts}, "model": {"forward": parts, "backward": parts},
        "forward_load": list(FORWARD), "backward_load": list(PRUNED), "counts": list(COUNTS),
        "quotas": [int(0.7 * count) for count in COUNTS],
        "ms": {"forward": {"experts": 2.0, "dispatch": 1.0}, "backward": {"experts_backward": 3.0, "return": 0.5}},
    }  # fmt: skip
    figures: list[dict[str, Any]] = [
        {"name": "plan.tiny.h100.gpus2.fits", "value": 1, "unit": "boolean", "better": "higher"},
        {"name": "plan.tiny.h100.gpus2.call_bytes", "value": 12 * MIB, "unit": "bytes", "better": "lower"},
        {"name": "plan.tiny.h100.gpus2.forward_peak", "value": 1.27, "unit": "mean loads", "better": "lower"},
    ]
    figures[0]["context"] = {"command": "lrmoe plan", "report": report}
    path.write_text("".join(json.dumps(figure) + "\n" for figure in figures))
    return path


def headline_lines(folder: Path, values: tuple[float, ...] = (0.51, 0.49)) -> Path:
    """What `make headline` leaves: figures of one system in two cases, and one of an ablation."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [
        f"headline.qwen3-moe-tiny.memorise.aux{aux}.lrmoe-sampled50.time_to_loss_over_symi"
        for aux in (0, 0.001)
    ]
    lines = [
        {
            "name": name,
            "value": value,
            "unit": "ratio",
            "better": "lower",
            "context": {"standard_error": 0.012},
        }
        for name, value in zip(names, values, strict=True)
    ]
    ablation = {
        "name": "ablate.memorise.lrm.topk.drop0.3.dloss",
        "value": 0.004,
        "unit": "nats",
        "better": "lower",
    }
    (folder / "headline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, ablation]))
    return folder
