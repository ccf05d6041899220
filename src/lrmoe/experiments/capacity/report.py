"""A capacity answer, or a sweep of them, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.experiments.capacity.advice import Advice, tried
from lrmoe.experiments.capacity.answer import Answer
from lrmoe.planning.calibration import MODELLED, PHASES
from lrmoe.report.numbers import number, size
from lrmoe.report.tables import Table

PARTS = ("weights", "grads", "optimizer", "replicas", "dispatched", "stash", "backward", "outputs", "scratch")


def describe(answer: Answer) -> str:
    """One line: what was planned."""
    q = answer.question
    return (
        f"{q.model.name} on {q.gpus} x {q.hardware.name} ({q.node_count} node{'s' * (q.node_count > 1)}, experts over "
        f"{q.ranks} ranks), micro-batch {q.micro_batch} x {q.sequence} tokens, policy {q.policy}"
    )


def mode(answer: Answer) -> str:
    """How activations are kept, in words."""
    keep = "stash" if answer.run.stash else "recompute"
    if answer.plan.recompute or answer.plan.forward_chunks > 1:
        keep = "recompute from the token inputs"
    chunks = (
        f", {answer.plan.forward_chunks}/{answer.plan.backward_chunks} chunks" if answer.chunks > 1 else ""
    )
    return keep + (", layers checkpointed" if answer.checkpointing else "") + chunks


def memory_table(answer: Answer) -> Table:
    """Bytes of the fullest rank by part, one layer call and the whole model, at each pass's largest moment."""
    call_rank = int(answer.call.peak_R.argmax())
    columns = (*answer.call.rank(call_rank), *answer.model.rank(answer.rank))
    rows = [[part, *(_cell(column.get(part, 0)) for column in columns)] for part in PARTS]
    rows.append(["MoE", *(size(sum(column.values())) for column in columns)])
    rows.append(["not MoE (reserved)", "", "", *([size(answer.reserved_bytes)] * 2)])
    totals = [sum(column.values()) + answer.reserved_bytes for column in columns[2:]]
    rows.append(["device", "", "", *map(size, totals)])
    return Table(
        title=f"Bytes of the fullest rank ({mode(answer)})",
        columns=("", "call, forward", "call, backward", "model, forward", "model, backward"),
        rows=rows,
        note=f"{_limits(answer)}. Weights and rows in bf16 (assumed), gradients in "
        f"{'fp32' if answer.question.gradient_bytes == 4 else 'bf16'}. Modelled.",
    )


def load_table(answer: Answer) -> Table:
    """Loads, replicas and quotas of the planned call."""
    plan, counts = answer.plan, answer.plan.counts_E
    kept = plan.kept / max(plan.pairs, 1)
    share = [int(q) / int(n) for q, n in zip(plan.quota_E, counts, strict=True) if n] or [1.0]
    busiest = f"{int(plan.forward_load_R.max()):,} / {int(plan.backward_load_R.max()):,}"
    rows = [
        ("fixed ownership's peak on this skew", number(answer.fixed_peak, 4)),
        (
            "forward peak, backward peak (mean loads)",
            f"{answer.forward_peak:.3f} / {answer.backward_peak:.3f}",
        ),
        ("rows of the fullest rank, forward / backward", busiest),
        (
            "copies beyond one per expert (most on one rank)",
            f"{int(answer.beyond_R.sum())} ({int(answer.beyond_R.max())})",
        ),
        ("pairs that backward keeps", f"{kept:.1%}"),
        (
            "quotas, share of an expert's pairs, least / most",
            f"{min(share):.1%} / {max(share):.1%}",
        ),
        ("pairs that forward drops", f"{_overflow(answer):,}"),
    ]
    return Table(title="Plan of one layer call", columns=("", "value"), rows=rows, note=_skew(answer))


def time_table(answer: Answer) -> Table:
    """Predicted milliseconds per phase."""
    time = answer.time
    rows = [
        [phase, _ms(time.forward.get(phase)), _ms(time.backward.get(phase)), time.labels[phase]]
        for phase in PHASES
    ]
    rows.append(["layer call", _ms(time.forward_ms), _ms(time.backward_ms), kind_of(answer)])
    layers = answer.question.model.moe_layers
    again = ", forward twice" if answer.checkpointing else ""
    rows.append([f"{layers} MoE layers{again}", "", _ms(answer.moe_ms), kind_of(answer)])
    return Table(
        title="Predicted time (ms)",
        columns=("phase", "forward", "backward", "kind"),
        rows=rows,
        note="Slowest rank per phase, phases one after another, nothing overlapped. Constants: "
        + answer.question.calibration.about + ".",
    )  # fmt: skip


def verdict(answer: Answer, largest: int) -> str:
    """Whether it fits, in one line."""
    if not answer.fits:
        return "does not fit: " + "; ".join(shortfalls(answer))
    more = f"; the largest micro-batch that fits, whatever mode, is {largest}"
    return f"fits: {_limits(answer)}{more}"


def advice_lines(answer: Answer, advice: Sequence[Advice]) -> list[str]:
    """What to change, a line each; where nothing helped, what was tried."""
    if not advice:
        return [
            f"  none of {len(changes)} changes that were planned, each by itself: {', '.join(changes)}"
            for changes in (tried(answer.question),)
        ] + [
            "  not tried: pipeline parallelism (fewer layers per GPU), several changes at once, a smaller model"
        ]
    return [f"  {a.change}: fits, with micro-batches up to {a.micro_batch}" for a in advice]


def assumptions(answer: Answer) -> list[str]:
    """What the figures take for granted."""
    q = answer.question
    reserved = (
        "Memory that is not MoE is as given."
        if q.reserved is not None
        else "Memory that is not MoE is an estimate (sharded over all GPUs, one layer gathered, logits in pieces): "
        + ", ".join(f"{part} {size(value)}" for part, value in answer.reserved.items())
    )
    layers = (
        f"Every MoE layer is taken to be as loaded as this call, on the same ranks; {q.headroom:.0%} of the device "
        "is left to driver, communication and fragmentation."
    )
    network = q.hardware.network_bytes_per_s * 8 / 1e9
    filled = ", ".join(q.model.defaults)
    model = [f"The configuration does not say, taken from defaults: {filled}."] if filled else []
    return [
        *model,
        reserved,
        layers,
        f"Between nodes {network:.0f} Gb/s per GPU. Device: {q.hardware.source}.",
    ]


_NAMED = ("model", "hardware", "gpus", "micro_batch", "sequence", "policy")


def sweep_table(rows: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> Table:
    """The capacity table: the swept options, and what comes of them."""
    cells = []
    for row in rows:
        found = ("-",) * 5
        if row["fits"] != "-":
            found = (
                f"{row['device_bytes'] / 2**30:.1f}",
                f"{row['forward_peak']:.2f}/{row['backward_peak']:.2f}",
                number(row["layer_ms"], 4),
                str(row["largest_micro_batch"]),
                row["mode"].replace("layers checkpointed", "ckpt"),
            )
        cells.append([*(str(row.get(name, "-")) for name in swept), row["fits"], *found])
    shared = ", ".join(f"{name} {rows[0][name]}" for name in _NAMED if name not in swept and name in rows[0])
    return Table(
        title=f"Capacity ({shared})",
        columns=(*(name.replace("_", "-") for name in swept), "fits", "GiB", "peaks", "ms", "most", "mode"),
        rows=cells,
        note="GiB of the fullest rank; peaks forward / backward; ms per layer call; most: the largest micro-batch that "
        "fits in any mode; ckpt: layers checkpointed. Every figure is predicted, none is measured.",
        text=True,
    )


def sweep_notes(rows: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> list[str]:
    """Why cases do not fit: a line per reason."""
    cases: dict[str, list[str]] = {}
    for row in rows:
        if row["why"]:
            label = " ".join(f"{name}={row.get(name)}" for name in swept)
            cases.setdefault(_without(row["why"], label), []).append(label)
    return [f"{'; '.join(names)}: {why}" for why, names in cases.items()]


def _without(why: str, label: str) -> str:
    """The reason without its "--option=value: " where the case's label says that already."""
    option, colon, reason = why.partition(": ")
    said = option.removeprefix("--").replace("-", "_").replace("seq=", "sequence=")
    return reason if colon and said in label.split() else why


def kind_of(answer: Answer) -> str:
    """Say "calibrated" where every phase that takes time is, "modelled" elsewhere."""
    labels = {label for phase, label in answer.time.labels.items() if answer.time.phases[phase] > 0}
    return labels.pop() if len(labels) == 1 else MODELLED


def _overflow(answer: Answer) -> int:
    return 0 if answer.plan.overflow_RE is None else int(answer.plan.overflow_RE.sum())


def _skew(answer: Answer) -> str:
    q = answer.question
    stated = f", calibrated to a peak of {q.peak:g}" if q.peak is not None else ""
    return f"Planned for a generated skew: {q.skew}, seed {q.seed}{stated}. Modelled."


def _limits(answer: Answer) -> str:
    return "; ".join(f"{name} {size(need)} of {size(limit)}" for name, (need, limit) in answer.limits.items())


def shortfalls(answer: Answer) -> list[str]:
    """Every limit that does not hold, with its numbers."""
    ranks = {"layer budget": int(answer.call.peak_R.argmax())}
    return [
        f"{name} on rank {ranks.get(name, answer.rank)} needs {size(need)}, available {size(limit)}"
        for name, (need, limit) in answer.limits.items()
        if need > limit
    ]


def _cell(value: int) -> str:
    return size(value) if value else "-"


def _ms(value: float | None) -> str:
    return "-" if not value else f"{value:.3f}"
