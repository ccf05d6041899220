"""What happened in each layer call: loads, bytes, times, memory, selection statistics."""

from lrmoe.telemetry.clock import PHASES, PhaseClock, critical_path_ms
from lrmoe.telemetry.figures import figure
from lrmoe.telemetry.ledger import PARTS, Ledger
from lrmoe.telemetry.record import CallRecord, Telemetry

__all__ = ["PARTS", "PHASES", "CallRecord", "Ledger", "PhaseClock", "Telemetry", "critical_path_ms", "figure"]
