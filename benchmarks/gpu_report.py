"""What the checks of a machine share: the layer they run, and the figures and verdicts they leave."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from plain import Case, Shape, over_limit
from torch import Tensor

from lrmoe import LRMoEConfig, MoELayer
from lrmoe.telemetry.figures import figure

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
PREFIX = "gpu_check."
ERROR = ".error_over_limit"
_SHOWN = ("ms", "ratio", "TFLOP/s", "GB/s")  # units in the table


def make_layer(shape: Shape, **fields: Any) -> MoELayer:
    """A layer on one device that prunes from the first step."""
    return MoELayer(
        num_experts=shape.experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        config=LRMoEConfig(warmup_steps=0, **fields),
    )


def run_layer(layer: MoELayer, case: Case) -> list[Tensor]:
    """Output and gradients of the layer."""
    out = layer(case.hidden, case.ids, case.weights, case.gate_up, case.down, training=True)
    return [out.detach(), *torch.autograd.grad(out, case.leaves(), case.grad)]


class Report:
    """Figures as they come, which checks failed, and what was not done.

    Args:
        journal: a file that everything said here is appended to at once, so that it outlives this process.

    Attributes:
        figures: as `lrmoe.telemetry.figure` makes them. failed: names. missing: sentences.
    """

    def __init__(self, *, seed: int, device: torch.device, journal: Path | None = None) -> None:
        self.figures: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.missing: list[str] = []
        self._context = {"seed": seed, "device": device.type}
        self._journal = journal

    def note(self, kind: str, what: Any) -> None:
        """A line of the journal, where there is one."""
        if self._journal is not None:
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps([kind, what]) + "\n")

    def recall(self, lines: Iterable[str]) -> None:
        """Take over what another process wrote into its journal; a last line that was cut off is left out."""
        taken: dict[str, list[Any]] = {"figure": self.figures, "failed": self.failed, "missing": self.missing}
        for line in lines:
            kind, what = json.loads(line) if line.endswith("\n") else ("", None)
            if kind in taken and what not in taken[kind]:
                taken[kind].append(what)

    def add(self, name: str, value: float, unit: str, *, better: str = "lower", **context: Any) -> None:
        """One figure."""
        found = figure(f"{PREFIX}{name}", value, unit, better, **self._context, **context)
        self.figures.append(found)
        self.note("figure", found)

    def fail(self, name: str) -> None:
        """A check failed, or what was to be checked did not run."""
        if name not in self.failed:
            self.failed.append(name)
            self.note("failed", name)

    def check(
        self, name: str, actual: Sequence[Tensor], exact: Sequence[Tensor], plain: Sequence[Tensor]
    ) -> None:
        """Largest error over the allowed one, over all tensors given."""
        worst = max(over_limit(*triple) for triple in zip(actual, exact, plain, strict=True))
        self.at_most(f"{name}{ERROR}", worst, 1, "ratio", failed=name)

    def at_most(self, name: str, value: float, limit: float, unit: str, *, failed: str | None = None) -> None:
        """A figure that fails above a limit, or where it is not a number.

        Args:
            failed: what is said to have failed; the figure's name by default.
        """
        self.add(name, value, unit)
        if not value <= limit:
            self.fail(failed or name)

    def left_out(self, why: str) -> None:
        """Something was not done here; said once."""
        if why not in self.missing:
            self.missing.append(why)
            self.note("missing", why)


def table(figures: Sequence[Mapping[str, Any]], expected: Mapping[str, float]) -> str:
    """The worst check of each area, then times and ratios beside what was expected of an H200.

    Plain text, for a machine with little but torch. What is expected and was not measured has no value; counts that
    have to be 0, and of a replay what its ratios are made of, are in the figures alone.
    """
    worst: dict[str, float] = {}
    rows: list[tuple[str, str, str, str]] = []
    seen = set()
    for item in figures:
        name, value = item["name"].removeprefix(PREFIX), item["value"]
        if name.endswith(ERROR):
            area = ".".join(name.split(".")[:2])
            worst[area] = max(worst.get(area, 0.0), value)
        elif item["unit"] in _SHOWN and not (name.startswith("replay.") and item["unit"] != "ratio"):
            rows.append((name, f"{value:.4g}", _expected(expected, name), item["unit"]))
            seen.add(name)
    rows += [(name, "", f"{value:.4g}", "") for name, value in expected.items() if name not in seen]
    rows = [
        (f"{area}: worst error / allowed", f"{value:.3g}", "", "ratio") for area, value in worst.items()
    ] + rows
    head = ("figure", "here", "expected, H200", "unit")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {here:>{widths[1]}}  {wanted:>{widths[2]}}  {unit}".rstrip()
        for name, here, wanted, unit in [head, *rows]
    )


def _expected(expected: Mapping[str, float], name: str) -> str:
    return f"{expected[name]:.4g}" if name in expected else ""
