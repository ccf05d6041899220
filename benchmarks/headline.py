"""Time to the same loss against SYMI, UltraEP and the others, from nothing to figures; resumable.

Start checkpoints and trajectories are trained (regime memorise, 8 KB by heart, one process each), then every tenth
step's layer calls are executed by all systems at EP 8 on gloo processes, at hidden = width = 128 with the recorded
counts multiplied until each rank has 170 x width pairs, activations recomputed in backward; a second, smaller part
keeps them. What is done is not done again; --overwrite starts anew.

    python benchmarks/headline.py                 two models, aux loss 0 and .001, seeds 0 to 2, all systems
    python benchmarks/headline.py --quick --json  one model, aux loss 0, seed 0, four systems: under 10 minutes

Writes runs/headline/ (--quick: runs/headline-quick/): headline.jsonl with the figures
headline.<model>.<regime>.<aux>.<system>.{time_to_loss_over_symi, time_to_loss_over_ultraep,
layer_time_over_balanced, least_time_over_symi, dloss, steps} (<system>.stash: with activations kept), headline.json,
rows.csv. tools/fill_results.py makes docs/results.md of them.

Expected duration on 2 quiet cores: 85 to 90 minutes; --quick 4 to 6.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import command_line
from rich.console import Console
from rich.table import Table

from lrmoe.errors import LRMoEError
from lrmoe.experiments.headline.question import FULL, QUICK
from lrmoe.experiments.headline.rows import PUBLISHED
from lrmoe.experiments.headline.run import run, to_stderr


def show(summary: dict[str, Any]) -> None:
    """Figures by system on stderr, the published range beside them."""
    low, high = PUBLISHED
    table = Table(title=f"time to loss; published against SYMI: {low:.1%} to {high:.1%} less")
    names = (
        "time_to_loss_over_symi",
        "time_to_loss_over_ultraep",
        "layer_time_over_balanced",
        "least_time_over_symi",
        "steps",
        "dloss",
    )
    for name in ("model, aux, system", *(name.replace("_", " ") for name in names)):
        table.add_column(name, justify="left" if name.startswith("model") else "right", overflow="fold")
    by_place: dict[str, dict[str, dict[str, Any]]] = {}
    for line in summary["figures"]:
        place, _, quantity = line["name"].removeprefix("headline.").rpartition(".")
        by_place.setdefault(place, {})[quantity] = line
    for place, found in by_place.items():
        table.add_row(place, *(_cell(found.get(name)) for name in names))
    Console(stderr=True).print(table)


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return "-"
    error = line["context"]["standard_error"]
    return f"{line['value']:.4g}" + ("" if error is None else f" +- {error:.2g}")


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json. Exit code 1 where something failed."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one model, aux loss 0, one seed, four systems")
    parser.add_argument("--overwrite", action="store_true", help="forget what is there and start anew")
    parser.add_argument("--folder", type=Path, help="instead of runs/headline or runs/headline-quick")
    parser.add_argument("--workers", type=int, help="processes that train; default: one per core")
    args = parser.parse_args(argv)
    headline = QUICK if args.quick else FULL
    if args.folder is not None:
        headline = dataclasses.replace(headline, folder=args.folder)
    if args.overwrite:
        shutil.rmtree(headline.folder, ignore_errors=True)
    begin = time.monotonic()
    try:
        summary = run(headline, workers=args.workers)
    except LRMoEError as error:
        to_stderr(f"error: {error}")
        return 1
    show(summary)
    to_stderr(f"{headline.folder}: headline.jsonl, {(time.monotonic() - begin) / 60:.1f} min")
    if args.json:
        for line in summary["figures"]:
            print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
