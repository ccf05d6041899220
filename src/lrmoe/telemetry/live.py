"""Where figures of a run in progress go: TensorBoard, Weights & Biases. Used on the first rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lrmoe.errors import require_extra

Histograms = Mapping[str, Sequence[float]]


class Reporter(Protocol):
    """Takes the figures of one step after the other."""

    def write(self, step: int, values: Mapping[str, Any], histograms: Histograms) -> None:
        """Show a step: the numbers among `values`, and `histograms` of finite numbers, where there are any."""

    def close(self) -> None:
        """Nothing more comes."""


class TensorBoard:
    """Event files for TensorBoard.

    Args:
        folder: where they go.
        resume_step: what lies there for steps after it no longer counts; None starts anew.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, folder: Path | str, resume_step: int | None = None) -> None:
        require_extra("tensorboard", "report")
        from torch.utils.tensorboard import SummaryWriter

        purged = None if resume_step is None else resume_step + 1  # the first step that no longer counts
        self._writer: Any = SummaryWriter(str(folder), purge_step=purged)

    def write(self, step: int, values: Mapping[str, Any], histograms: Histograms) -> None:
        """See `Reporter`."""
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, step)
        for name, drawn in _drawable(histograms).items():
            self._writer.add_histogram(name, drawn, step)

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


class WandB:
    """A run at Weights & Biases; with `WANDB_MODE=offline` in its folder only.

    Args:
        project: its project.
        name: the run's name. config: what is shown as its configuration.
        folder: where its files go. resume: go on with the run whose id lies there, if one does.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        folder: Path | str = ".",
        resume: bool = False,
    ) -> None:
        self._wandb: Any = require_extra("wandb", "wandb")
        known = Path(folder) / "wandb.id"
        again = known.read_text(encoding="utf-8").strip() if resume and known.is_file() else None
        self._run: Any = self._wandb.init(
            project=project,
            name=name,
            config=dict(config or {}),
            dir=str(folder),
            id=again,
            resume=None if again is None else "allow",
        )
        known.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any], histograms: Histograms) -> None:
        """See `Reporter`."""
        drawn = {name: self._wandb.Histogram(found) for name, found in _drawable(histograms).items()}
        self._run.log({**_numbers(values), **drawn}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Everything that can be drawn over steps."""
    return {name: v for name, v in values.items() if name != "step" and isinstance(v, int | float)}


def _drawable(histograms: Histograms) -> dict[str, Any]:
    """As arrays, without numbers that are not finite; empty ones are left out."""
    import numpy as np

    finite = {name: [v for v in values if math.isfinite(v)] for name, values in histograms.items()}
    return {name: np.asarray(values) for name, values in finite.items() if values}
