"""Random calls of the layer: each ends in the right answer or in a documented error, or the smallest example is shown.

Drawn by hypothesis: sizes from nothing on, ids of no expert, dtypes mixed, strides, NaN and infinities, padding,
budgets, every setting of the configuration, gradient checkpointing, retained graphs, evaluation, autocast, several
micro-batches in flight; through MoELayer, and through `enable` on an experts module of Transformers. One call in five
has a fault (a wrong type, shape or value) and must be refused by an error that names the field. Answers are compared
with the plain float64 loop over experts, gradients with the same loop pruned to the kept set.

One call in five is made over several ranks, each a process with its own number of tokens; fuzz_ranks.py says how.

    python benchmarks/fuzz.py --json
    python benchmarks/fuzz.py --calls 10000
    python benchmarks/fuzz.py --calls 1000 --ranks 4

Names: fuzz.calls, fuzz.failures: distinct failures (exit code 1 if any); their context says how many calls were made on
how many ranks.

Expected duration on 2 cores: 1 to 3 minutes for 1,000 calls, 10 to 30 for 10,000.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import command_line
import torch
from fuzz_calls import FuzzCall
from fuzz_draws import calls
from fuzz_faults import FAULTS, judge_fault
from fuzz_run import WrongError
from fuzz_truth import judge
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from rich.console import Console

from lrmoe.errors import InfeasibleError, LRMoEError
from lrmoe.telemetry import figure
from lrmoe.training.launch import run_workers

ROUND = 250  # calls between two looks at what was found; each round has a seed of its own
LIMIT_S = 20.0
MOST_FAILURES = 10  # of which the smallest example is looked for


class HangError(WrongError):
    """A call that did not end in time."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """HangError in what takes longer."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError(f"a call took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(
        signal.ITIMER_REAL, seconds, 1.0
    )  # again and again: what is raised in a callback is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(call: FuzzCall) -> None:
    """One call; raises where it ends otherwise than it may."""
    with limited(LIMIT_S):
        if call.fault:
            judge_fault(call)
            return
        try:
            judge(call)
        except InfeasibleError as error:
            budgets = [name for name in ("layer_budget", "memory_budget") if name in dict(call.config)]
            if not any(name in str(error) for name in budgets):
                raise


class Fuzz:
    """Runs rounds of calls and keeps what failed.

    Args:
        check: what a call must pass. drawn: where calls come from.

    Attributes:
        calls: made so far. failures: the smallest example of each kind of failure, with what went wrong.
    """

    def __init__(
        self,
        *,
        check: Callable[[Any], None] = check,
        drawn: SearchStrategy[Any] | None = None,
    ) -> None:
        self.calls = 0
        self.failures: dict[str, str] = {}
        self._check = check
        self._drawn = calls(faults=tuple(FAULTS)) if drawn is None else drawn
        self._example: Any = None

    def run(self, number: int, random_seed: int, progress: Callable[[str], None]) -> None:
        """At least `number` calls, unless too much fails."""
        turn = 0
        while self.calls < number and len(self.failures) < MOST_FAILURES:
            self._round(min(ROUND, number - self.calls), random_seed * 1_000_003 + turn)
            turn += 1
            progress(f"{self.calls} of {number} calls, {len(self.failures)} failures")

    def _round(self, number: int, round_seed: int) -> None:
        """One round; of a failure hypothesis looks for the smallest example, and the round ends."""

        def one(call: Any) -> None:
            self._example = call
            self._check(call)
            self.calls += 1

        asked = settings(
            max_examples=number,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        try:
            seed(round_seed)(asked(given(self._drawn)(one)))()
        except Exception as error:
            self.calls += 1
            self._keep(error)

    def _keep(self, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} at {last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
        vars(error).pop("__notes__", None)  # hypothesis repeats the example there
        text = "".join(traceback.format_exception(error, limit=-6))
        self.failures.setdefault(f"{kind}: {str(error)[:60]}", f"{self._example!r}\n{text}")


def over_ranks(ranks: int, number: int, random_seed: int) -> tuple[int, dict[str, str]]:
    """Calls over several ranks, in new processes: how many were made, and what failed."""
    try:
        results = run_workers("fuzz_ranks:work", ranks, (number, random_seed))
    except LRMoEError as error:  # they ended before their answers could be judged
        return number, {f"{type(error).__name__}: {str(error)[:60]}": traceback.format_exc()}
    made, failures = results[0]
    return made, failures


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=1_000, help="how many calls to make (default 1000)")
    parser.add_argument(
        "--ranks", type=int, default=2, help="of one call in five; 1 makes all on one rank (default 2)"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console(stderr=True)
    fuzz = Fuzz()
    together = args.calls // 5 if args.ranks > 1 else 0
    fuzz.run(args.calls - together, args.seed, console.print)
    made, failures = {1: fuzz.calls}, dict(fuzz.failures)
    if together:
        made[args.ranks], more = over_ranks(args.ranks, together, args.seed)
        failures |= {f"{args.ranks} ranks: {kind}": example for kind, example in more.items()}
    for kind, example in failures.items():
        console.print(f"FAILED {kind}\n{example}", markup=False, highlight=False, soft_wrap=True)
    context: dict[str, Any] = {
        "seed": args.seed,
        "calls_by_ranks": {str(ranks): calls for ranks, calls in made.items()},
    }
    for row in (
        figure("fuzz.calls", sum(made.values()), "calls", "higher", **context),
        figure("fuzz.failures", len(failures), "failures", "lower", **context),
    ):
        print(json.dumps(row) if args.json else f"{row['name']:16} {row['value']}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
