"""Constants of the cost model: stated assumptions, or what was measured, read once from a JSON file and then frozen.

File format (all keys but `schema` optional):

    {"schema": 1, "hardware": "h100", "about": "8 GPUs, NCCL 2.28, 2026-01-01",
     "constants": {"gemm_efficiency": 0.62}, "phase_scale": {"experts": 1.04}}

`constants` replaces fields of Constants; `phase_scale` multiplies a phase's modelled time (measured / modelled).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lrmoe.errors import PlanError, did_you_mean

SCHEMA = 1
MODELLED, CALIBRATED = "modelled", "calibrated"

# Phases of a layer call, in the order of the walk: what the cost model predicts and telemetry measures.
PHASES = (
    "plan",
    "pack",
    "dispatch",
    "experts",
    "combine",
    "score",
    "select",
    "reroute",
    "exchange",
    "experts_backward",
    "return",
    "replicas",
)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the datasheet does not say. The defaults are assumptions of usual size, not measurements.

    Attributes:
        gemm_efficiency: share of the peak FLOP/s that large grouped GEMMs reach.
        gemm_extra_rows: rows that every group costs besides its own (tile padding and ramp-up).
        hbm_efficiency: share of the memory bandwidth that gathers and elementwise passes reach.
        nvlink_efficiency, pcie_efficiency, network_efficiency: share of a link's bandwidth that an all-to-all reaches.
        nvlink_latency_us, pcie_latency_us, network_latency_us: fixed time of one collective over the link class.
        peer_us: further time of a collective per peer.
        phase_us: launches of one phase.
        plan_us: planning time per rank and per expert, for one layer call and its backward, on one CPU core.
        select_bytes: memory traffic of choosing the kept set, per pair. index_bytes: of rerouting, per pair.
    """

    gemm_efficiency: float = 0.6
    gemm_extra_rows: float = 64.0
    hbm_efficiency: float = 0.8
    nvlink_efficiency: float = 0.75
    pcie_efficiency: float = 0.7
    network_efficiency: float = 0.8
    nvlink_latency_us: float = 20.0
    pcie_latency_us: float = 30.0
    network_latency_us: float = 40.0
    peer_us: float = 0.5
    phase_us: float = 20.0
    plan_us: float = 1.4
    select_bytes: float = 128.0
    index_bytes: float = 32.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            share = name.endswith("_efficiency")
            if not number or value < 0 or (share and not 0 < value <= 1):
                valid = (
                    "lie in (0, 1], a share of the datasheet's rate" if share else "be finite, non-negative"
                )
                raise PlanError(f"constants.{name}={value!r}: must {valid}")


CONSTANTS = tuple(f.name for f in dataclasses.fields(Constants))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants and which of them were measured.

    Attributes:
        constants: values in use. measured: names of the constants that come from measurements.
        phase_scale: measured over modelled time of a phase, where known.
        hardware: device the measurements belong to, or None. about: where they come from.
    """

    constants: Constants = field(default_factory=Constants)
    measured: frozenset[str] = frozenset()
    phase_scale: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    hardware: str | None = None
    about: str = "stated assumptions"

    def __post_init__(self) -> None:
        for name in self.measured:
            _known(name, CONSTANTS, "measured")
        for name, ratio in self.phase_scale.items():
            _known(name, PHASES, "phase_scale")
            number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
            if not number or not math.isfinite(ratio) or ratio <= 0:
                raise PlanError(f"phase_scale.{name}={ratio!r}: must be a finite, positive number")
        object.__setattr__(self, "phase_scale", MappingProxyType(dict(self.phase_scale)))

    def label(self, phase: str, constants: Sequence[str]) -> str:
        """Say "calibrated" where the phase or every constant it reads was measured, "modelled" elsewhere."""
        measured = phase in self.phase_scale or (constants and self.measured.issuperset(constants))
        return CALIBRATED if measured else MODELLED

    def check(self, hardware: str) -> None:
        """Raise PlanError where the measurements were made on another device."""
        if self.hardware is not None and self.hardware != hardware:
            raise PlanError(
                f"calibration was measured on {self.hardware!r} and hardware={hardware!r}: measure there"
            )

    def fingerprint(self) -> int:
        """A 63-bit hash of every number: equal on all ranks iff they plan with the same constants."""
        text = json.dumps(self.to_dict(), sort_keys=True).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def to_dict(self) -> dict[str, Any]:
        """What `save` writes."""
        values = dataclasses.asdict(self.constants)
        return {
            "schema": SCHEMA,
            "hardware": self.hardware,
            "about": self.about,
            "constants": {name: values[name] for name in CONSTANTS if name in self.measured},
            "phase_scale": dict(self.phase_scale),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """Build from the file format.

        Raises:
            PlanError: another schema, an unknown key (names the nearest valid one), or a bad value.
        """
        for name in values:
            _known(name, ("schema", "hardware", "about", "constants", "phase_scale"), "calibration")
        if values.get("schema") != SCHEMA:
            raise PlanError(f"calibration schema={values.get('schema')!r}: this version reads {SCHEMA}")
        for key in ("constants", "phase_scale"):
            if not isinstance(values.get(key, {}), Mapping):
                raise PlanError(f"calibration {key}={values[key]!r}: must be a table of numbers")
        constants = values.get("constants", {})
        for name in constants:
            _known(name, CONSTANTS, "constants")
        return cls(
            constants=Constants(**constants),
            measured=frozenset(constants),
            phase_scale=values.get("phase_scale", {}),
            hardware=values.get("hardware"),
            about=str(values.get("about", "unnamed measurements")),
        )

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read the file.

        Raises:
            PlanError: no such file, not JSON, or what `from_dict` raises.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"calibration={str(path)!r}: {error.strerror or error}") from error
        except ValueError as error:
            raise PlanError(f"calibration={str(path)!r}: not JSON ({error})") from error
        if not isinstance(values, Mapping):
            raise PlanError(f"calibration={str(path)!r}: must hold one JSON object")
        return cls.from_dict(values)


def fit_phase_scale(
    modelled: Sequence[Mapping[str, float]], measured: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Median ratio measured / modelled of each phase over several layer calls.

    Args:
        modelled: phase -> ms that the model gave for each call (without a scale). measured: the same calls, measured.

    Returns:
        phase -> ratio, for phases with a positive time on both sides in at least one call.
    """
    ratios: dict[str, list[float]] = {}
    for model, real in zip(modelled, measured, strict=True):
        for phase in PHASES:
            if model.get(phase, 0.0) > 0 and real.get(phase, 0.0) > 0:
                ratios.setdefault(phase, []).append(real[phase] / model[phase])
    return {phase: statistics.median(values) for phase, values in ratios.items()}


def _known(name: str, valid: Sequence[str], where: str) -> None:
    if name not in valid:
        hint = did_you_mean(str(name), valid)
        raise PlanError(f"{where}.{name}: no such name{hint}; valid: {', '.join(valid)}")
