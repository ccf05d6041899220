"""What tables and documents say of a policy."""

from __future__ import annotations

from dataclasses import dataclass

from lrmoe.errors import PlanError

INPUTS = ("nothing", "current counts", "history", "both")
SLOTS = ("none", "shared", "resident", "unbounded")


@dataclass(frozen=True, kw_only=True)
class PolicyInfo:
    """The facts of one system that a fair comparison has to show.

    Attributes:
        title: name shown in tables.
        source: where its rule comes from.
        inputs: what placement is decided from: "nothing", "current counts", "history" or "both".
        acts: when it decides.
        moves: what it moves besides rows.
        slots: "none", "shared" (foreign slots serve all layers), "resident" (held per layer all the time) or
            "unbounded" (no limit on foreign copies of its own).
        drops: whether it may leave pairs out of forward; a policy from a user's file needs it for backward too.
        note: what is ours where the source is silent, and other remarks.

    Raises:
        PlanError: `inputs` or `slots` is none of these.
    """

    title: str
    source: str
    inputs: str
    acts: str
    moves: str
    slots: str
    drops: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        for name, valid in (("inputs", INPUTS), ("slots", SLOTS)):
            value = getattr(self, name)
            if value not in valid:
                raise PlanError(f"{name}={value!r}: must be one of {', '.join(map(repr, valid))}")
