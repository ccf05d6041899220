"""One small run, killed again and again: does it end at the weights of a run that nobody disturbed?

`lrmoe train --auto-resume` with a tiny model on four ranks saves every three steps, in the background at every other
start. It is killed at random moments and started again with the same command: SIGKILL to a random rank in a random
step, at the start and while a checkpoint is being written; SIGSTOP, after which the other ranks must give up in time;
SIGKILL to the command; SIGTERM to a rank or to the command, which must end with exit code 0. Then it runs to its end.

    python benchmarks/faults.py --json

Names: faults.kills (done), faults.lost (kills after which the newest usable checkpoint was older than before, or
damaged), faults.hung (kills after which the command did not end within train.timeout_s and what ending takes),
faults.orphans (processes that outlived the command), faults.wrong_exits (SIGTERM without exit code 0, or another signal
with it), faults.differing_tensors (of the last checkpoint: weights and optimizer, bit for bit) and faults.wrong_lines
(of metrics.jsonl: a step missing, twice, or out of order). Targets: 0 of each but kills.

Expected duration on 2 cores: 3 to 8 minutes for 10 kills, 25 to 80 for 100.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import command_line
import torch
from rich.console import Console
from rich.table import Table
from victims import Killer, Place, Run

from lrmoe.checkpoint import find_steps, folder_of, open_checkpoint, verify
from lrmoe.errors import CheckpointError
from lrmoe.telemetry import figure
from lrmoe.training.config import TrainConfig

EVERY = 3  # steps between checkpoints
TIMEOUT_S = 20.0  # train.timeout_s
ENDING_S = 30.0  # what ending may take beyond it, on a busy machine
TEXT = "".join(f"line {i}: {i * i} squared, {i % 7} left over\n" for i in range(400))
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@dataclass(kw_only=True)
class Found:
    """What was seen.

    Attributes:
        ways: kills by way.
    """

    ways: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    hung: int = 0
    orphans: int = 0
    wrong_exits: int = 0
    differing_tensors: int = 0
    wrong_lines: int = 0

    @property
    def faults(self) -> dict[str, int]:
        """All that must be 0."""
        return {name: value for name, value in vars(self).items() if name != "ways"}


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def write_config(work: Path, steps: int) -> Path:
    """The run file of both runs."""
    (work / "corpus.txt").write_text(TEXT, encoding="utf-8")
    train = {
        "runs": str(work / "runs"), "steps": steps, "batch_size": 2, "device": "cpu", "trace": False,
        "checkpoint_every": EVERY, "timeout_s": TIMEOUT_S, "eval_every": 5, "eval_batches": 1,
    }  # fmt: skip
    config = TrainConfig.from_dict(
        {
            "model": {"overrides": SHAPE},
            "data": {"path": str(work / "corpus.txt"), "seq_len": 16, "held_out": 0.1},
            "optim": {"warmup_steps": 2},
            "train": train,
            "lrmoe": {"max_drop": 0.3, "warmup_steps": 1, "max_added_variance": 0.5},
        }
    )
    config.write(work / "run.toml")
    return work / "run.toml"


def options(work: Path, name: str, start: int) -> list[str]:
    """The command line behind `lrmoe train --ep N`, of the start-th start."""
    background = f"train.checkpoint_async={str(start % 2 == 1).lower()}"
    return ["--config", str(work / "run.toml"), "--name", name, "--auto-resume", "--set", background]


def finish(work: Path, name: str, ranks: int, start: int) -> Place:
    """Let a run go to its end.

    Raises:
        RuntimeError: it failed.
    """
    run = Run(Place(work=work, name=name), ranks, options(work, name, start))
    run.until(lambda: run.ended, limit_s=3600)
    if run.process.returncode != 0:
        raise RuntimeError(f"exit code {run.process.returncode}; the end of {run.log}:\n{tail(run.log)}")
    return run.place


def tail(path: Path) -> str:
    return path.read_text(errors="replace")[-3000:]


def kill(run: Run, killer: Killer, number: int, found: Found) -> None:
    """Kill a run and look at what is left."""
    way, whom = killer.end(run, number)
    before, step, begin = run.place.newest, run.place.step, time.monotonic()
    hung = not run.wait(TIMEOUT_S + ENDING_S)
    took = time.monotonic() - begin
    if hung:
        run.process.kill()
        run.process.wait()
    else:
        found.wrong_exits += (run.process.returncode == 0) != (way == "sigterm")
    orphans = run.left(ENDING_S)
    usable = newest_usable(run.place)
    found.ways[way] += 1
    found.hung += hung
    found.orphans += orphans
    found.lost += usable < before
    say(
        f"kill {number + 1}: {way}, {whom}, about step {step}; ended after {took:.1f} s with {run.process.returncode}; "
        f"newest checkpoint {before} before, {usable} after" + (", HUNG" if hung else "")
    )


def newest_usable(place: Place) -> int:
    """Step of the newest checkpoint that verifies, 0 without any; a damaged one counts as lost."""
    for step in reversed(find_steps(place.checkpoints)):
        try:
            verify(folder_of(place.checkpoints, step))
        except CheckpointError as error:
            say(f"damaged: {error}")
            return -1
        return step
    return 0


def differing(ours: Place, theirs: Place) -> int:
    """Tensors of two runs' last checkpoints that are not the same bits."""
    with tensors(ours) as (names, read), tensors(theirs) as (wanted, read_wanted):
        unlike = names ^ wanted
        return len(unlike) + sum(not torch.equal(read(key), read_wanted(key)) for key in names & wanted)


@contextlib.contextmanager
def tensors(place: Place) -> Iterator[tuple[set[str], Any]]:
    checkpoint = open_checkpoint(folder_of(place.checkpoints, place.newest))
    with checkpoint.reader() as reader:
        yield set(checkpoint.manifest.file_of()), reader.dense


def wrong_lines(place: Place, steps: int) -> int:
    """Lines of metrics.jsonl that are not those of steps 1, 2, ..."""
    lines = [json.loads(line) for line in (place.folder / "metrics.jsonl").read_text().splitlines()]
    found = [line["step"] for line in lines]
    return sum(a != b for a, b in zip(found, range(1, steps + 1), strict=False)) + abs(steps - len(found))


def torture(work: Path, kills: int, ranks: int, seed: int) -> Found:
    """The undisturbed run, then the other one."""
    # At most two checkpoints' steps and a few more pass before a kill.
    steps = (2 * EVERY + 4) * kills + 20
    write_config(work, steps)
    say(f"{steps} steps that nobody disturbs")
    whole = finish(work, "whole", ranks, 0)
    found, killer = Found(), Killer(EVERY, seed)
    place = Place(work=work, name="killed")
    for number in range(kills):
        run = Run(place, ranks, options(work, "killed", number))
        try:
            kill(run, killer, number, found)
        finally:
            run.process.kill()
    say(f"killed {kills} times; now to the end, from step {place.newest} of {steps}")
    finish(work, "killed", ranks, kills)
    found.differing_tensors, found.wrong_lines = differing(place, whole), wrong_lines(place, steps)
    return found


def show(found: Found) -> None:
    table = Table("figure", "value", title="a run that is killed again and again")
    for name, value in {"kills": found.ways.total(), **found.faults}.items():
        table.add_row(name, str(value))
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json. Exit code 1 where a target is missed."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4, help="1, 2, 4 or 8")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing stays behind
    with tempfile.TemporaryDirectory(prefix="lrmoe-faults-", ignore_cleanup_errors=True) as name:
        found = torture(Path(name), args.kills, args.ranks, args.seed)
    show(found)
    if args.json:
        shown = {"ways": dict(found.ways), "ranks": args.ranks, "seed": args.seed, "timeout_s": TIMEOUT_S}
        print(json.dumps(figure("faults.kills", found.ways.total(), "count", "higher", **shown)))
        for quantity, value in found.faults.items():
            print(json.dumps(figure(f"faults.{quantity}", value, "count", "lower", **shown)))
    return int(any(found.faults.values()))


if __name__ == "__main__":
    sys.exit(main())
