"""What an exact run with lrmoe.observe = true says pruning would have saved, by drop share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.telemetry import CallRecord

_CALLS, _ENERGY = "calls", "energy"
_PER_CALL = "backward_peak"  # the same on all ranks; everything else is a rank's share
QUANTITIES = ("backward_peak", "rows_saved", "variance_added", "bytes_saved")


def add_observed(sums: dict[str, float], records_by_rank: Sequence[Sequence[CallRecord]]) -> None:
    """Add the observations of a step's calls to `sums`, in place; calls without any do not count."""
    for rank, records in enumerate(records_by_rank):
        for record in records:
            if not record.observed:
                continue
            _add(sums, _ENERGY, record.energy)
            if rank == 0:
                _add(sums, _CALLS, 1)
            for name, value in record.observed.items():
                if rank == 0 or not name.startswith(_PER_CALL):
                    _add(sums, name, value)


def _add(sums: dict[str, float], name: str, value: float) -> None:
    sums[name] = sums.get(name, 0.0) + value


def observed_summary(sums: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Drop share -> what it would have meant.

    backward_peak is the most loaded rank over the mean load, mean over calls; rows_saved and bytes_saved are sums over
    calls and ranks, of rows not computed and bytes not sent in backward; added_variance is what sampling would have
    added over the gradient's own, all as the scores see it.
    """
    found = {}
    for share in sorted({name.rpartition("_")[2] for name in sums if name.startswith(QUANTITIES)}, key=float):
        rows, size = sums[f"rows_saved_{share}"], sums[f"bytes_saved_{share}"]
        found[share] = {
            "backward_peak": sums[f"backward_peak_{share}"] / sums[_CALLS],
            "rows_saved": round(rows),
            "added_variance": sums[f"variance_added_{share}"] / (sums[_ENERGY] or 1.0),
            "bytes_saved": round(size),
        }
    return found


def observed_table(observed: Mapping[str, Mapping[str, Any]]) -> str:
    """The summary's `observed` as lines for a terminal."""
    head = ("max_drop", "backward peak", "rows saved", "added variance", "bytes saved")
    rows = [
        (
            share,
            f"{entry['backward_peak']:.3f}",
            f"{entry['rows_saved']:,}",
            f"{entry['added_variance']:.2%}",
            f"{entry['bytes_saved']:,}",
        )
        for share, entry in observed.items()
    ]
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    lines = ["what backward would have saved (nothing was left out):"]
    lines += [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    ]
    return "\n".join(lines)
