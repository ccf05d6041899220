"""What policies plan from, as JSON can hold it: the last plan, and counts of past calls.

Everything is looked at before anything is made of it: a plan is read only if it is legal.

Shape letters: R ranks, E experts, J instances.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from lrmoe.errors import ConfigError, PlanError
from lrmoe.planning.plan import LayerPlan, Traffic
from lrmoe.planning.problem import History, IntArray, Problem, Topology
from lrmoe.planning.restore import value_of

_TOPOLOGY = "topology"  # of the layer that plans, and so no part of the state
_WORDS = {"reason": str, "forward_chunks": int, "backward_chunks": int, "recompute": bool}


def history_state(history: History) -> dict[str, Any]:
    """JSON-able: `step`, `counts` of each call, and `previous`, the last plan or None."""
    return {
        "step": history.step,
        "counts": [counts_RE.tolist() for counts_RE in history.counts],
        "previous": None if history.previous is None else _plan_state(history.previous),
    }


def read_history(state: Any, topology: Topology) -> History:
    """The history that `history_state` gave.

    Args:
        topology: of the layer that goes on with it.

    Raises:
        ConfigError: a field is missing, of another type or shape, or the plan is no legal one of these ranks and
            experts; names the field.
    """
    table = _table(state, "past", ("step", "counts", "previous"))
    if not isinstance(table["counts"], list):
        raise ConfigError(f"past.counts={table['counts']!r}: must be a list")
    shape = (topology.ranks, topology.experts)
    counts = tuple(
        _integers(one, f"past.counts[{number}]", shape) for number, one in enumerate(table["counts"])
    )
    if any((one < 0).any() for one in counts):
        raise ConfigError("past.counts holds a negative number")
    previous = None if table["previous"] is None else _read_plan(table["previous"], topology)
    return History(counts=counts, previous=previous, step=value_of(int, table["step"], "past.step"))


def _plan_state(plan: LayerPlan) -> dict[str, Any]:
    return {item.name: _plain(getattr(plan, item.name)) for item in fields(plan) if item.name != _TOPOLOGY}


def _plain(value: Any) -> Any:
    if isinstance(value, Traffic):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value


def _read_plan(state: Any, topology: Topology) -> LayerPlan:
    where = "past.previous"
    names = [item.name for item in fields(LayerPlan) if item.name != _TOPOLOGY]
    table = _table(state, where, names)
    values: dict[str, Any] = {}
    for name in names:
        value, place = table[name], f"{where}.{name}"
        if name in _WORDS:
            values[name] = _word(_WORDS[name], value, place)
        elif name == "traffic":
            values[name] = None if value is None else _read_traffic(value, topology, place)
        else:
            values[name] = None if value is None else _integers(value, place)
    try:
        plan = LayerPlan(topology=topology, **values)
        plan.check(_any_problem(plan))
    except (PlanError, AttributeError, IndexError) as error:  # the latter two: None where an array has to be
        raise ConfigError(f"{where}: {error}") from error
    return plan


def _any_problem(plan: LayerPlan) -> Problem:
    """The question with the fewest limits that a plan may be an answer to."""
    return Problem(
        counts_RE=plan.counts_RE,
        topology=plan.topology,
        max_drop=math.nextafter(1.0, 0.0),
        min_keep=0,
        max_chunks=sys.maxsize,
    )


def _read_traffic(state: Any, topology: Topology, where: str) -> Traffic:
    names = [item.name for item in fields(Traffic)]
    table = _table(state, where, names)
    return Traffic(**{name: _integers(table[name], f"{where}.{name}", (topology.ranks,)) for name in names})


def _table(state: Any, where: str, names: tuple[str, ...] | list[str]) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise ConfigError(f"{where}={state!r}: must be a table")
    missing = [name for name in names if name not in state]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    return state


def _word(kind: type, value: Any, where: str) -> Any:
    if kind is not str:
        return value_of(kind, value, where)
    if not isinstance(value, str):
        raise ConfigError(f"{where}={value!r}: must be text")
    return value


def _integers(value: Any, where: str, shape: tuple[int, ...] | None = None) -> IntArray:
    """Lists of integers, as long as each other, int64."""
    try:
        found = np.array(value)
    except ValueError as error:  # lists of different lengths
        raise ConfigError(f"{where}: must be equally long lists of integers: {error}") from error
    if not isinstance(value, list) or found.dtype != np.int64:
        raise ConfigError(f"{where}: holds {found.dtype}: must be lists of integers")
    if shape is not None and found.shape != shape:
        raise ConfigError(f"{where} has shape {found.shape}: must be {shape}")
    return found
