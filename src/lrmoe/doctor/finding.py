"""One line of the doctor's table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lrmoe.telemetry.figures import figure

STATES = ("ok", "no", "fault", "info")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was looked at, and what was found.

    Attributes:
        area: part of the table. name: what.
        state: "ok"; "no", not usable and not needed; "fault", lrmoe cannot work with it; "info", neither.
        text: what was found, or why not.
        value, unit, better: the number of a measurement.
    """

    area: str
    name: str
    state: str
    text: str
    value: float | None = None
    unit: str = "usable"
    better: str = "higher"

    def __post_init__(self) -> None:
        assert self.state in STATES, self.state

    def line(self) -> dict[str, Any]:
        """As machine-readable evidence: the measurement, else 1 or 0 for usable or not."""
        name = f"doctor.{self.area}.{self.name}".replace(" ", "_")
        value = float(self.state in ("ok", "info")) if self.value is None else self.value
        return figure(name, value, self.unit, self.better, state=self.state, text=self.text)
