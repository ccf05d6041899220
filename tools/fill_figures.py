"""Fill the README's figures from what committed commands wrote; numbers enter the README in no other way.

Usage: python tools/fill_figures.py runs/demo/summary.json [runs/layer.jsonl]
`make figures` makes both files and runs this.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"
REGION = re.compile(r"(<!-- figures:start -->\n).*?(<!-- figures:end -->)", re.DOTALL)
QUANTITIES = {
    "steps": ("steps", 1, 0),
    "MoE-layer time, critical path over the modelled link (s)": ("moe_time_critical_s", 1, 1),
    "MoE-layer time, wall (s)": ("moe_time_wall_s", 1, 1),
    "bytes on the wire (GiB)": ("wire_bytes", 2**30, 2),
    "rows of the fullest rank in backward, mean over layer calls": ("backward_peak_rows", 1, 0),
    "share of pairs kept in backward, exact warm-up included": ("kept_share", 1, 3),
}
LAYER_QUANTITY = re.compile(r"(?:layer|memory)\.(fp32|bf16)\.((?:drop[\d.]+|masked_twin)\.\w+)(?:\.t(\d+))?")
LAYER_WORDS = {
    "drop0.over_best_peer": "`max_drop=0` over the faster of Transformers' own experts",
    "drop0.2.over_best_peer": "`max_drop=0.2` over the same",
    "drop0.5.over_best_peer": "`max_drop=0.5` over the same",
    "drop0.over_gemms": "`max_drop=0` over its bare matrix products",
    "drop0.5.over_drop0": "`max_drop=0.5` over `max_drop=0`",
    "drop0.2.overhead_share": "share of the layer's time that pruning adds, `max_drop=0.2`",
    "masked_twin.over_drop0": "half the pairs masked, not compacted, over `max_drop=0`",
    "drop0.over_grouped_mm": "peak memory, `max_drop=0`, over that of Transformers' `grouped_mm`",
    "drop0.2.over_grouped_mm": "`max_drop=0.2` over the same",
    "drop0.5.over_grouped_mm": '`max_drop=0.5` with `activations="recompute"` over the same',
}


def demo_table(summary: dict[str, Any]) -> str:
    """Fixed ownership beside lrmoe, and their ratio.

    Raises:
        ValueError: a system did not reach the target loss: its figures would compare unequal things.
    """
    fixed, ours = summary["systems"]["megatron"], summary["systems"]["lrmoe"]
    for name, system in (("megatron", fixed), ("lrmoe", ours)):
        if not system["reached"]:
            raise ValueError(f"systems.{name}.reached is false: no figures without the target loss")
    rows = ["| | fixed ownership | lrmoe | lrmoe / fixed |", "|---|---|---|---|"]
    for label, (key, unit, digits) in QUANTITIES.items():
        left, right = fixed[key] / unit, ours[key] / unit
        rows.append(f"| {label} | {left:.{digits}f} | {right:.{digits}f} | {right / left:.3f} |")
    head = f"`make demo`: training to loss {summary['target_loss']:g}, {summary['world_size']} processes, "
    return "\n".join([head + _where(summary["context"]) + ":", "", *rows, "", _critical_path(summary)])


def _critical_path(summary: dict[str, Any]) -> str:
    speed = summary["link_bytes_per_s"] / 2**20
    return (
        "Critical path: per layer call and phase the largest thread CPU time of any process, plus bytes over a "
        f"modelled link of {speed:.0f} MiB/s; wall is what the clock of this machine saw."
    )


def layer_table(lines: list[dict[str, Any]]) -> str:
    """The ratios that benchmarks/layer.py printed, a row each, a column per dtype and number of threads."""
    found = {}
    for item in lines:
        if match := LAYER_QUANTITY.fullmatch(item["name"]):
            dtype, quantity, threads = match.groups()
            found[f"{dtype}{_threads(threads)}", quantity] = item["value"]
    columns = list(dict.fromkeys(column for column, _ in found))
    rows = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for quantity, words in LAYER_WORDS.items():
        cells = (found.get((column, quantity)) for column in columns)
        rows.append(f"| {words} | {' | '.join('-' if cell is None else f'{cell:.3f}' for cell in cells)} |")
    head = "`make bench`: time and peak memory of one layer, forward and backward, below 1 is better; "
    return "\n".join([f"{head}{_where(lines[0]['context'])}:", "", *rows])


def _threads(number: str | None) -> str:
    return "" if number is None else f", {number} thread{'s' * (number != '1')}"


def _where(context: dict[str, Any]) -> str:
    hardware, versions = context["hardware"], context["versions"]
    device = hardware.get("cuda") or f"{hardware['cores']} cores of {hardware['cpu']}"
    return f"{device}, torch {versions['torch']}, {context['date']}"


def fill(readme: str, figures: str) -> str:
    """The README with `figures` between its markers.

    Raises:
        ValueError: the markers are missing.
    """
    if not REGION.search(readme):
        raise ValueError("README.md: no <!-- figures:start --> ... <!-- figures:end -->")
    return REGION.sub(lambda found: f"{found[1]}{figures}\n{found[2]}", readme)


def main() -> int:
    """Read the files, write the README."""
    parser = argparse.ArgumentParser(description="Fill the README's figures.")
    parser.add_argument("summary", type=Path, help="summary.json of the demo")
    parser.add_argument("layer", type=Path, nargs="?", help="JSON lines of benchmarks/layer.py")
    paths = parser.parse_args()
    parts = [demo_table(json.loads(paths.summary.read_text(encoding="utf-8")))]
    if paths.layer:
        parts.append(layer_table([json.loads(line) for line in paths.layer.read_text().splitlines() if line]))
    README.write_text(fill(README.read_text(encoding="utf-8"), "\n\n".join(parts)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
