"""Options of a table of the configuration: fields with a description and limits, checked when the table is built."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import field
from typing import Any

from lrmoe.errors import ConfigError

NUMBER = (int, float)


def described(
    doc: str,
    *,
    kind: type | tuple[type, ...],
    least: float = -math.inf,
    below: float = math.inf,
    choices: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What `option` gives a field as its metadata, for a field whose default is made anew."""
    return {"doc": doc, "kind": kind, "least": least, "below": below, "choices": choices}


def option(default: Any, doc: str, **limits: Any) -> Any:
    """A field with its description and its limits: `least` <= value < `below`. A default of None may stay None."""
    return field(default=default, metadata=described(doc, **limits))


class Table:
    """Checks every field of a table against its limits."""

    TABLE: str

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            _check(f"{self.TABLE}.{item.name}", getattr(self, item.name), item)


def _check(name: str, value: Any, item: dataclasses.Field[Any]) -> None:
    limits = item.metadata
    if not limits or (value is None and item.default is None):
        return
    kind = limits["kind"]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise ConfigError(f"{name}={value!r}: must be of type {' or '.join(k.__name__ for k in kinds)}")
    if limits["choices"] and value not in limits["choices"]:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(repr, limits['choices']))}")
    if isinstance(value, NUMBER) and not limits["least"] <= value < limits["below"]:
        below = "" if limits["below"] == math.inf else f" and below {limits['below']}"
        raise ConfigError(f"{name}={value!r}: must be at least {limits['least']}{below}")
