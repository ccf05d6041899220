"""trace.parquet of a run: counts per source and expert of every training call. Used on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lrmoe.telemetry import CallRecord
from lrmoe.telemetry.traces import TraceWriter, can_write

log = logging.getLogger(__name__)
FILE = "trace.parquet"


def wanted(setting: bool | None) -> bool:
    """Whether `train.trace` asks for a trace: unset does where one can be written."""
    return can_write() if setting is None else setting


class TraceLog:
    """Writes the records of steps to the trace of a run's folder; without pyarrow it says so and does nothing.

    Args:
        folder: the run's folder.
        about: kept in the file's metadata.
        resume_step: keep calls of an earlier file before this step and go on after them; None starts anew.
    """

    def __init__(
        self, folder: Path, *, about: Mapping[str, Any] | None = None, resume_step: int | None = None
    ) -> None:
        self._writer: TraceWriter | None = None
        if can_write():
            self._writer = TraceWriter(folder / FILE, about=about, keep_below=resume_step)
        else:
            log.warning('no %s: pyarrow is not installed (pip install -e ".[traces]")', FILE)

    def add(self, records: Sequence[CallRecord], system: str = "") -> None:
        """Add this rank's records of a step; those without counts are left out."""
        for record in records:
            if self._writer is not None and record.counts_RE is not None and record.drop_reason != "eval":
                self._writer.add(
                    step=record.step,
                    micro_batch=record.micro_batch,
                    layer=record.layer,
                    system=system,
                    counts_RE=record.counts_RE,
                )

    def __enter__(self) -> TraceLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()


def about_model(config: Any) -> dict[str, Any]:
    """What a trace says of the model: type, experts per token, sizes of an expert, where they are named."""
    named = {
        "model": getattr(config, "model_type", None),
        "top_k": getattr(config, "num_experts_per_tok", None),
        "hidden": getattr(config, "hidden_size", None),
        "width": getattr(config, "moe_intermediate_size", None),
    }
    return {name: value for name, value in named.items() if value is not None}
