"""trace.parquet of a run: counts per source and expert of every training call. Used on rank 0."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from lrmoe.errors import ConfigError
from lrmoe.planning.problem import IntArray
from lrmoe.telemetry import CallRecord
from lrmoe.telemetry.traces import TraceWriter, can_write

log = logging.getLogger(__name__)
FILE = "trace.parquet"
SEGMENTS = "trace-[0-9]*.parquet"  # calls of other sizes than those in FILE


def wanted(setting: bool | None) -> bool:
    """Whether `train.trace` asks for a trace: unset does where one can be written."""
    return can_write() if setting is None else setting


class TraceLog:
    """Writes the records of steps to the trace of a run's folder; without pyarrow it says so and does nothing.

    No trouble with the file stops a run: a trace that cannot be written ends with a warning, an earlier one that cannot
    be read is set aside as trace.parquet.unreadable, and calls of another number of ranks or experts begin a new file,
    the calls before them going to trace-1.parquet, trace-2.parquet and so on.

    Args:
        folder: the run's folder.
        about: kept in the file's metadata.
        resume_step: keep calls of an earlier file before this step and go on after them; None starts anew.
    """

    def __init__(
        self, folder: Path, *, about: Mapping[str, Any] | None = None, resume_step: int | None = None
    ) -> None:
        self._path = folder / FILE
        self._about = about
        self._writer: TraceWriter | None = None
        if can_write():
            self._guarded(lambda: self._open(resume_step))
        else:
            log.warning('no %s: pyarrow is not installed (pip install -e ".[traces]")', FILE)

    def add(self, records: Sequence[CallRecord], system: str = "") -> None:
        """Add this rank's records of a step; those without counts are left out."""
        for record in records:
            counts_RE = record.counts_RE
            if counts_RE is not None and record.drop_reason != "eval":
                self._guarded(partial(self._add, record, counts_RE, system))

    def _add(self, record: CallRecord, counts_RE: IntArray, system: str) -> None:
        if self._writer is None:
            return
        if self._writer.sizes not in (None, counts_RE.shape):
            self._writer = self._next(self._writer, counts_RE.shape)
        self._writer.add(
            step=record.step,
            micro_batch=record.micro_batch,
            layer=record.layer,
            system=system,
            counts_RE=counts_RE,
        )

    def _open(self, resume_step: int | None) -> None:
        if resume_step is None:
            for old in self._path.parent.glob(SEGMENTS):
                old.unlink()
        try:
            self._writer = TraceWriter(self._path, about=self._about, keep_below=resume_step)
        except ConfigError as error:
            aside = self._path.with_name(f"{FILE}.unreadable")
            self._path.replace(aside)
            log.warning("%s; it is now %s, and a new %s begins", error, aside.name, FILE)
            self._writer = TraceWriter(self._path, about=self._about)

    def _next(self, writer: TraceWriter, sizes: tuple[int, ...]) -> TraceWriter:
        """Close the file under another name, and begin a new one."""
        number = 1
        while (before := self._path.with_name(f"trace-{number}.parquet")).exists():
            number += 1
        writer.close()
        self._path.replace(before)
        log.warning(
            "%s begins anew: calls are of %d ranks and %d experts from here on; those of %d ranks and %d experts are "
            "in %s",
            FILE, *sizes, *(writer.sizes or ()), before.name,
        )  # fmt: skip
        return TraceWriter(self._path, about=self._about)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # pyarrow raises many kinds; none is worth a run
            log.warning("%s ends here, the run goes on: %s: %s", self._path, type(error).__name__, error)
            writer, self._writer = self._writer, None
            if writer is not None:
                with contextlib.suppress(OSError):
                    writer.discard()

    def __enter__(self) -> TraceLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._guarded(self._writer.close)


def about_model(config: Any) -> dict[str, Any]:
    """What a trace says of the model: type, experts per token, sizes of an expert, where they are named."""
    named = {
        "model": getattr(config, "model_type", None),
        "top_k": getattr(config, "num_experts_per_tok", None),
        "hidden": getattr(config, "hidden_size", None),
        "width": getattr(config, "moe_intermediate_size", None),
    }
    return {name: value for name, value in named.items() if value is not None}
