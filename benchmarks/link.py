"""Wall clock of one layer call over a link of limited speed: two ranks, each in a network namespace of its own.

Fixed ownership, UltraEP's policy and this package's layer at drops of 0.2 and 0.5 take turns call by call in the same
two processes, on the same routing, with two slots for copies each and under one `layer_budget`, enough for all of them
to keep their activations. Sizes are those of benchmarks/layer.py over two ranks (hidden 512, expert width 192, 32
experts, top-8, 2048 tokens a rank, fp32); popularity is lognormal, drawn anew for each of several calls of a round. The
rate of the link is found first: with it the exchange of a call with balanced counts takes a third of the call, by the
wall's clock, less the CPU time of the ranks' threads, where results travel home before the next product begins. In
the calls that are compared products go on meanwhile, in all systems; two more lanes show what that changes. Nothing is
modelled: a call lasts from a barrier to the end of
backward on the slower rank.

    sudo python benchmarks/link.py --json

Names: link.drop<d>.wall_over_fixed, link.drop<d>.wall_over_ultraep, link.ultraep.wall_over_fixed, and over the same
without products beside the results' way home link.drop<d>.wall_over_in_turn: medians over calls of ratios of the same
routing and round.

Needs root and iproute2; without them it says so and prints nothing. Expected duration on 2 cores: 2 to 4 minutes.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import command_line
from host_pair import BITS, Host, host_pair, leave, limit, rank_of_pair, rank_options, run_pair, why_not
from layer_variants import Case
from link_rank import FIXED, OURS, ULTRAEP, Lane, Timed, Work, play, timed_of
from rich.console import Console
from rich.table import Column, Table
from rounds import spread

from lrmoe.telemetry import figure

BALANCED = "balanced"
IN_TURN = ".in_turn"  # the same without work that is left for the time while results travel
DROPS = (0.2, 0.5)
LANES = (
    Lane(name=FIXED, system=FIXED),
    Lane(name=ULTRAEP, system=ULTRAEP),
    *(Lane(name=f"drop{drop:g}", system=OURS, max_drop=drop) for drop in DROPS),
    *(Lane(name=f"drop{drop:g}{IN_TURN}", system=OURS, max_drop=drop, in_turn=True) for drop in DROPS),
)
SHARE = 1 / 3  # of a balanced call that exchange takes
CLOSE = 0.03  # how near to it the rate is taken
TRIES, FURTHER = 5, 3.0  # rates that are tried, and how far apart two may be
BUDGET = "192MiB"  # enough for all of them to keep their activations: nobody is slowed by it


def work(rank: int, address: str, call: Path) -> None:
    """One rank: what the file says; rank 0 writes the calls."""
    with rank_of_pair(rank, address, call) as given:
        lines = play(given["work"])
        if rank == 0:
            given["out"].write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def run(hosts: Sequence[Host], folder: Path, what: Work, name: str) -> list[Timed]:
    """Execute calls, a rank on each host."""
    out = folder / f"{name}.jsonl"
    run_pair(hosts, Path(__file__), folder, name, {"work": what, "out": out})
    return timed_of([json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()])


def exchange_share(calls: Sequence[Timed]) -> float:
    """Part of these calls' time in which the ranks' threads do not compute."""
    wall = statistics.median(call.wall_ms for call in calls)
    return 1 - statistics.median(call.cpu_ms for call in calls) / wall


def first_rate(calls: Sequence[Timed]) -> float:
    """Bytes per second at which what these calls sent takes SHARE of a call, if nothing else had to be waited for."""
    compute_s = statistics.median(call.cpu_ms for call in calls) / 1e3
    return statistics.median(call.sent_bytes for call in calls) / (compute_s * SHARE / (1 - SHARE))


def next_rate(rate: float, share: float) -> float:
    """The rate after `rate`, with which exchange took `share` of a call; at most FURTHER away."""
    share = min(max(share, 0.01), 0.99)
    factor = share / (1 - share) / (SHARE / (1 - SHARE))
    return rate * min(max(factor, 1 / FURTHER), FURTHER)


def find_rate(hosts: Sequence[Host], folder: Path, what: Work) -> tuple[float, float]:
    """The link's rate in bytes per second, set on it, and the share of exchange that was seen with it."""
    lanes = (Lane(name=BALANCED, system=FIXED, balanced=True, in_turn=True),)
    what = replace(what, lanes=lanes, draws=what.draws[:2], rounds=2)
    rate = first_rate(run(hosts, folder, what, "free"))
    seen: dict[float, float] = {}
    for number in range(TRIES):
        limit(hosts, rate)
        seen[rate] = share = exchange_share(run(hosts, folder, what, f"rate{number}"))
        print(
            f"link: at {rate * BITS / 1e6:.0f} Mbit/s exchange takes {share:.0%}", file=sys.stderr, flush=True
        )
        if abs(share - SHARE) <= CLOSE:
            break
        rate = next_rate(rate, share)
    best = min(seen, key=lambda one: abs(seen[one] - SHARE))
    limit(hosts, best)
    return best, seen[best]


def measure(what: Work, rate: float | None) -> tuple[list[Timed], float, float | None]:
    """Calls of all lanes over the limited link, its rate, and the share of exchange in a balanced call.

    Args:
        rate: bytes per second; None: it is found. Where it is given the share is not known.
    """
    with tempfile.TemporaryDirectory() as name, host_pair(Path(name)) as hosts:
        share = None
        if rate is None:
            rate, share = find_rate(hosts, Path(name), what)
        else:
            limit(hosts, rate)
        return run(hosts, Path(name), what, "wall"), rate, share


def figures(calls: Sequence[Timed], context: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ratios of wall times, lane over lane."""
    wall = {(call.lane, call.draw, call.round): call.wall_ms for call in calls}
    places = list(dict.fromkeys((call.draw, call.round) for call in calls))
    about = {**context, "lanes": {name: _about(calls, name) for name in dict.fromkeys(c.lane for c in calls)}}
    found = []
    for name, other in _pairs():
        over = [wall[name, *place] / wall[other, *place] for place in places]
        key = f"link.{name}.wall_over_{_said(name, other)}"
        value, noise = round(statistics.median(over), 4), round(spread(over), 4)
        found.append(figure(key, value, "ratio", "lower", spread=noise, calls=len(over), **about))
    return found


def _pairs() -> list[tuple[str, str]]:
    ours = [f"drop{drop:g}" for drop in DROPS]
    over = [(name, other) for name in ours for other in (FIXED, ULTRAEP)]
    return [(ULTRAEP, FIXED), *over, *((name, name + IN_TURN) for name in ours)]


def _said(name: str, other: str) -> str:
    """What a figure's name calls the lane under the line."""
    return "fixed" if other == FIXED else other.removeprefix(f"{name}.")


def _about(calls: Sequence[Timed], lane: str) -> dict[str, float]:
    mine = [call for call in calls if call.lane == lane]
    about = {"wall_ms": statistics.median(call.wall_ms for call in mine)}
    for name in (
        "forward_peak", "backward_peak", "sent_bytes", "replicas", "chunks", "stash_bytes", "peak_bytes"
    ):  # fmt: skip
        about[name] = statistics.fmean(getattr(call, name) for call in mine)
    return {name: round(value, 3) for name, value in about.items()}


def show(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Lanes and their ratios, on stderr."""
    values = {one["name"]: one["value"] for one in rows}
    columns = (
        "ms a call",
        "over fixed",
        "over ultraep",
        "over in turn",
        "forward peak",
        "backward peak",
        "chunks",
    )
    table = Table(Column(no_wrap=True), *columns, title="wall clock over a limited link")
    for name, about in row["context"]["lanes"].items():
        over = [values.get(f"link.{name}.wall_over_{other}") for other in ("fixed", ULTRAEP, IN_TURN[1:])]
        cells = ["-" if value is None else f"{value:.3f}" for value in over]
        peaks = [f"{about[column]:.2f}" for column in ("forward_peak", "backward_peak", "chunks")]
        table.add_row(name, f"{about['wall_ms']:.1f}", *cells, *peaks)
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--draws", type=int, default=4, help="calls of a round, each with a popularity of its own"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank")
    parser.add_argument("--rate", type=float, help="of the link in bytes per second; default: found")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of popularity")
    parser.add_argument("--budget", default=BUDGET, help="layer_budget of every system; 'none': no limit")
    rank_options(parser)
    args = parser.parse_args(argv)
    if args.call is not None:
        work(args.rank, args.address, args.call)
        return 0
    reason = why_not()
    if reason is not None:
        print(f"link: skipped, it {reason}", file=sys.stderr)
        return 0
    case = Case(tokens=args.tokens, sigma=args.sigma)
    budget = None if args.budget == "none" else args.budget
    draws = range(args.seed, args.seed + args.draws)
    what = Work(case=case, lanes=LANES, draws=draws, rounds=args.rounds, budget=budget)
    calls, rate, share = measure(what, args.rate)
    context = {
        "case": asdict(case), "seed": args.seed, "layer_budget": budget, "link_bytes_per_s": round(rate),
        "exchange_share_of_balanced_call": None if share is None else round(share, 4),
        "rounds": args.rounds,
    }  # fmt: skip
    rows = figures(calls, context)
    show(rows[0], rows)
    for row in rows:
        print(json.dumps(row) if args.json else f"{row['name']:45} {row['value']:.3f}")
    return 0


if __name__ == "__main__":
    leave(main())
