"""Call records of all ranks on every rank, by one gather of a small matrix per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lrmoe.checkpoint.agree import rank_of, size_of
from lrmoe.distributed.peers import waiting
from lrmoe.telemetry import PARTS, PHASES, CallRecord

# What differs between ranks; everything else in a record is the same on all of them.
_SCALARS = (
    "rows_forward_local",
    "rows_backward_local",
    "energy",
    "energy_dropped",
    "variance_added",
    "nonfinite_scores",
    "bytes_saved_lean",
    "peak_predicted",
    "peak_measured",
)
_TABLES = (("ms", PHASES), ("wall_ms", PHASES), ("bytes", PHASES), ("mem", PARTS), ("mem_predicted", PARTS))
_WHOLE = {
    *("rows_forward_local", "rows_backward_local", "nonfinite_scores", "bytes_saved_lean"),
    *("peak_predicted", "peak_measured", "bytes", "mem", "mem_predicted"),
}


def gather_records(
    records: Sequence[CallRecord], group: dist.ProcessGroup | None, device: torch.device
) -> list[list[CallRecord]]:
    """Records of one step by rank; position i of every rank's list is the same layer call.

    Every rank must hold equally many, which the layer sees to: all ranks join all calls.
    """
    if size_of(group) == 1:
        return [list(records)]
    observed = sorted({name for r in records for name in r.observed})  # the same names on all ranks
    rows = torch.tensor([_encode(r, observed) for r in records], dtype=torch.float64, device=device)
    table = rows.new_empty((size_of(group), *rows.shape))
    with waiting("the exchange of all ranks' call records"):
        dist.all_gather(list(table), rows, group=group)
    by_rank = [
        [_decode(record, row, observed) for record, row in zip(records, rows_of_rank, strict=True)]
        for rows_of_rank in table.tolist()
    ]
    by_rank[rank_of(group)] = list(records)
    return by_rank


def _encode(record: CallRecord, observed: Sequence[str]) -> list[float]:
    row = [float(getattr(record, name)) for name in _SCALARS]
    for field, names in _TABLES:
        values = getattr(record, field)
        row += [float(values.get(name, 0)) for name in names]
    return row + [record.observed.get(name, 0.0) for name in observed]


def _decode(record: CallRecord, row: list[float], observed: Sequence[str]) -> CallRecord:
    changes: dict[str, object] = {
        name: int(value) if name in _WHOLE else value for name, value in zip(_SCALARS, row, strict=False)
    }
    start = len(_SCALARS)
    for field, names in _TABLES:
        values = row[start : start + len(names)]
        start += len(names)
        changes[field] = dict(zip(names, map(int, values) if field in _WHOLE else values, strict=True))
    changes["observed"] = {
        name: value for name, value in zip(observed, row[start:], strict=True) if name in record.observed
    }
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]  # a mapping of several fields' types
