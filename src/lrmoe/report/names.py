"""What systems are called on the page, and how they are drawn: the same on every page.

Systems of the package have a colour and a dash of their own; a policy from a file ("my_file.py:MyPolicy") is called by
its own name and takes a colour that no system of the package has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import PurePath
from typing import Any

from lrmoe.report.data import BASELINE

DASHES = ("solid", "dash", "dot", "dashdot")
OURS = "lrmoe"
_OWN = (5, 6)  # colours that no system of the package has; they come first for others
_COLOURS = (*_OWN, 2, 3, 4, 7, 8, 9, 1)
_KNOWN: Mapping[str, tuple[int, str]] = {
    BASELINE: (0, "solid"),
    OURS: (1, "solid"),
    "lrmoe-sampled50": (8, "solid"),
    "lrmoe-topk20": (7, "solid"),
    "drop0.5": (8, "solid"),
    "symi": (2, "solid"),
    "ultraep": (3, "solid"),
    "fastermoe": (4, "solid"),
    "flexmoe": (9, "solid"),
    "laer": (2, "dash"),
    "topoep": (3, "dash"),
    "eplb": (4, "dash"),
    "smartmoe": (9, "dash"),
    "llep": (9, "dot"),
}


def styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Name -> (colour, dash) of curves; no two of the names share both, as far as there are enough of them."""
    names = list(names)
    found = {name: _KNOWN[name] for name in names if name in _KNOWN}
    taken = set(found.values())
    free = [(colour, dash) for dash, colour in product(DASHES, _COLOURS) if (colour, dash) not in taken]
    for i, name in enumerate(name for name in names if name not in found):
        found[name] = free[i % len(free)]
    return {name: (f"var(--series-{found[name][0]})", found[name][1]) for name in names}


def readable(keys: Sequence[str]) -> dict[str, str]:
    """Key -> what to call it: the object of "path/my_file.py:MyPolicy", with the file where two are called alike."""
    short = {key: key.rpartition(":")[2] if ":" in key else key for key in keys}
    longer = {key: f"{short[key]} ({PurePath(key.rpartition(':')[0]).name})" for key in keys if ":" in key}
    called: dict[str, str] = {}
    for key in keys:
        others = [other for other in keys if other != key]
        if all(short[other] != short[key] for other in others):
            called[key] = short[key]
        elif all(longer.get(other) != longer.get(key, key) for other in others):
            called[key] = longer.get(key, key)
        else:
            called[key] = key
    return called


def own(key: str) -> bool:
    """Whether a system is a policy from a user's file."""
    return ":" in key


def renamed(summary: Any, called: Mapping[str, str]) -> Any:
    """A summary with every mapping's keys that name systems replaced by what they are called."""
    if isinstance(summary, Mapping):
        return {called.get(key, key): renamed(value, called) for key, value in summary.items()}
    if isinstance(summary, list):
        return [renamed(value, called) for value in summary]
    return summary
