"""A handle's summary as a few lines for a reader."""

from __future__ import annotations

from typing import Any


def report(summary: dict[str, Any], *, ranks: int) -> str:
    """The lines `print(handle)` shows.

    Args:
        summary: of `Handle.summary`.
        ranks: expert-parallel ranks; on one there is no busiest.
    """
    reasons = ", ".join(f"{calls} {reason}" for reason, calls in summary["drop_reasons"].items())
    calls = f"{summary['calls']} training calls of {summary['layers']} MoE layers"
    lines = [f"lrmoe after {summary['step']} optimizer steps: {calls}" + (f" ({reasons})" if reasons else "")]
    if not summary["calls"]:
        return f"{lines[0]}; is the model in training mode (model.train())?"
    lines.append(
        f"backward kept {summary['kept_share']:.1%} of the (token, expert) pairs{_peaks(summary, ranks)}"
    )
    lines.append(
        f"left out {summary['dropped_energy']:.1%} of the scores' energy, added variance "
        f"{summary['added_variance']:.1%} of it"
    )
    lines.append(
        f"this rank: {summary['moe_layer_ms']:.2f} ms a call, {_sent(summary)}, at most "
        f"{size(summary['buffer_peak_bytes'])} of token buffers"
    )
    if summary["nonfinite_scores"]:
        lines.append(f"{summary['nonfinite_scores']} scores were not finite: look at the loss")
    if summary.get("steps_skipped"):
        one = summary["steps_skipped"] == 1
        what = "step was skipped: its" if one else "steps were skipped: their"
        lines.append(f"{summary['steps_skipped']} {what} gradients were not finite")
    lines.extend(_checked(summary.get("check", {})))
    lines.extend(_observed(summary.get("observed", {}), ranks))
    return "\n".join(lines)


def _sent(summary: dict[str, Any]) -> str:
    """Bytes sent, and what they would have been with one row per pair where they were fewer."""
    sent, every = summary["wire_bytes"], summary["wire_bytes_row_per_pair"]
    return f"{size(sent)} sent" + (f" ({size(every)} with one row per pair)" if every > sent else "")


def _peaks(summary: dict[str, Any], ranks: int) -> str:
    if ranks == 1:
        return ""
    copies = f", {summary['replicas']:.1f} copies of experts a call" if summary["replicas"] else ""
    peaks = f"{summary['forward_peak']:.2f} -> {summary['backward_peak']:.2f} of the mean load"
    return f"; busiest rank {peaks}{copies}"


def _checked(check: dict[str, float]) -> list[str]:
    """How near the pruned gradient came to the exact one, where `check_every` compared them."""
    if not check:
        return []
    least = f", {check['cosine_worst']:.3f} at least" if check["calls"] > 1 else ""
    cosine, error = f"cosine {check['cosine']:.3f}{least}", f"relative error {check['relative_error']:.2f}"
    return [f"pruned gradient beside the exact one: {cosine}, {error} ({check['calls']:.0f} checked)"]


def _observed(savings: dict[str, dict[str, float]], ranks: int) -> list[str]:
    """What pruning would have saved, a line per drop share."""
    lines = ["had backward left pairs out (rows and bytes of this rank):"] if savings else []
    for share, saved in savings.items():
        peak = f"busiest rank {saved['backward_peak']:.2f} of the mean load, " if ranks > 1 else ""
        lines.append(
            f"  max_drop={share}: {peak}{saved['rows_saved']:.0f} rows and {size(saved['bytes_saved'])} less, added "
            f"variance {saved['added_variance']:.1%}"
        )
    return lines


def size(count: float) -> str:
    """Bytes in the largest decimal unit that leaves at least 1."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
