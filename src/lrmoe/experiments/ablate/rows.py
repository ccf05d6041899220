"""From an ablation's runs to its rows: differences to nothing dropped, paired by seed, and between rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from lrmoe.experiments.ablate.rules import Cell
from lrmoe.experiments.trajectories.regimes import get_regime
from lrmoe.report.figures import ABLATE
from lrmoe.statistics import Paired, averaged, paired
from lrmoe.telemetry.figures import finite

if TYPE_CHECKING:
    from lrmoe.experiments.trajectories.trajectory import Trajectory

RULE = ("score", "estimator", "variant", "quota_rule", "router_grad", "select_in", "drop")
COLUMNS = (
    "regime", "label", *RULE, "seeds", "dloss", "dloss_se", "dppl", "dppl_se", "loss", "steps_ratio",
    "steps_ratio_se", "kept_share", "dropped_energy", "added_variance",
)  # fmt: skip

Values = Mapping[str, Any]


def cell_values(cell: Cell, trajectory: Trajectory) -> dict[str, Any]:
    """What a summary keeps of one run; `loss` is null where the run lost its finite loss."""
    rule, target = cell.rule, get_regime(cell.regime).target_loss
    fields = {} if rule is None else {name: getattr(rule, name) for name in RULE}
    return {
        "regime": cell.regime,
        "seed": cell.seed,
        "label": "nothing dropped" if rule is None else rule.label,
        **fields,
        "name": None if rule is None else rule.name,
        "loss": finite(trajectory.final_loss),
        "steps_to_target": None if target is None else trajectory.steps_to(target),
        "kept_share": finite(float(trajectory.kept_share.mean())),
        "dropped_energy": finite(float(trajectory.dropped_energy.mean())),
        "added_variance": finite(float(trajectory.added_variance.mean())),
    }


def rows_of(cells: Sequence[Values]) -> list[dict[str, Any]]:
    """One row per regime and rule, drop included, over its seeds.

    `dloss` is the mean difference of the final loss to nothing dropped, `dppl` that of the perplexity as a share of it,
    `steps_ratio` that of steps to the target where both arrived; `_se` their standard errors, null with one seed.
    """
    exact = {(cell["regime"], cell["seed"]): cell for cell in cells if cell["name"] is None}
    return [_row(group, exact) for group in _groups(cells)]


def _row(group: Sequence[Values], exact: Mapping[tuple[str, int], Values]) -> dict[str, Any]:
    pairs = [(cell, exact[cell["regime"], cell["seed"]]) for cell in group]
    first = group[0]
    ours, base = [a["loss"] for a, _ in pairs], [b["loss"] for _, b in pairs]
    row = {"regime": first["regime"], "label": first["label"], **{name: first[name] for name in RULE}}
    row["name"] = first["name"]
    row["seeds"] = [cell["seed"] for cell in group]
    row |= _stated("dloss", _difference(ours, base))
    row |= _stated("dppl", _difference(_ratio(ours, base), [1.0] * len(pairs)))
    steps = [(a["steps_to_target"], b["steps_to_target"]) for a, b in pairs]
    ratios = [a / b for a, b in steps if a is not None and b is not None]
    arrived = bool(ratios) and len(ratios) == len(pairs)
    row |= _stated("steps_ratio", averaged(ratios) if arrived else None)
    for name in ("loss", "kept_share", "dropped_energy", "added_variance"):
        row[name] = _mean([cell[name] for cell in group])
    return row


def between(cells: Sequence[Values]) -> list[dict[str, Any]]:
    """Differences of the final loss between rules of one regime, estimator and drop, over the seeds both have.

    Of each pair `worse` has the higher mean.
    """
    found = []
    for one, other in combinations(_groups(cells), 2):
        if any(one[0][name] != other[0][name] for name in ("regime", "estimator", "drop")):
            continue
        losses = {cell["seed"]: cell["loss"] for cell in other}
        both = [(cell["loss"], losses[cell["seed"]]) for cell in one if cell["seed"] in losses]
        difference = _difference([a for a, _ in both], [b for _, b in both])
        if difference is None:
            continue
        better, worse = (one, other) if difference.mean <= 0 else (other, one)
        found.append(
            {
                "regime": one[0]["regime"],
                "better": better[0]["name"],
                "worse": worse[0]["name"],
                "seeds": difference.n,
                "gap": abs(difference.mean),
                "gap_se": finite(difference.standard_error),
                "resolved": difference.resolved(),
            }
        )
    return found


def _groups(cells: Sequence[Values]) -> list[list[Values]]:
    groups: dict[tuple[str, str], list[Values]] = {}
    for cell in cells:
        if cell["name"] is not None:
            groups.setdefault((cell["regime"], cell["name"]), []).append(cell)
    return list(groups.values())


def _difference(ours: Sequence[float | None], base: Sequence[float | None]) -> Paired | None:
    """None where a run has no finite loss, or there is no pair."""
    known = [(a, b) for a, b in zip(ours, base, strict=True) if a is not None and b is not None]
    if not known or len(known) < len(ours):
        return None
    return paired([a for a, _ in known], [b for _, b in known])


def _ratio(ours: Sequence[float | None], base: Sequence[float | None]) -> list[float | None]:
    return [None if a is None or b is None else math.exp(a - b) for a, b in zip(ours, base, strict=True)]


def _stated(name: str, found: Paired | None) -> dict[str, float | None]:
    if found is None:
        return {name: None, f"{name}_se": None}
    return {name: found.mean, f"{name}_se": finite(found.standard_error)}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def figures_of(summary: Values) -> Iterator[tuple[str, float, str, dict[str, Any]]]:
    """(name, value, unit, context) of every figure: ablate.<regime>.<score>.<variant>.drop<d>.<quantity>."""
    for row in summary["rows"]:
        context = {
            "model": summary["model"],
            "aux": summary["aux"],
            "seeds": row["seeds"],
            "rule": row["label"],
        }
        for quantity, (unit, _) in ABLATE.items():
            if row[quantity] is not None:
                own = {**context, "standard_error": row[f"{quantity}_se"]}
                yield f"ablate.{row['regime']}.{row['name']}.{quantity}", row[quantity], unit, own
