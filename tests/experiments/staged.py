"""An executed call to vary."""

from __future__ import annotations

from lrmoe.experiments.stage.lines import MAIN, Call


def call(**changes: object) -> Call:
    """A call to vary."""
    values = {
        "model": "tiny", "aux": 0.0, "seed": 0, "activations": MAIN, "system": "megatron", "step": 10, "layer": 0,
        "phase_ms": {"experts": 6.0, "score": 1.0, "replicas": 2.0},
        "phase_bytes": {"dispatch": 3000, "replicas": 1000},
        "cpu_ms": 40.0, "wall_ms": 20.0, "wire_bytes": 12_000, "pairs": 100, "kept": 50, "forward_peak": 2.0,
        "backward_peak": 1.0, "buffer_bytes": 10, "replicas": 1,
    }  # fmt: skip
    return Call(**{**values, **changes})  # type: ignore[arg-type]  # values of mixed types
