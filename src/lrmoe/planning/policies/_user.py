"""Policies from a user's own file: loaded, called, and held to the same legality check as the built-in ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from lrmoe.errors import InfeasibleError, PlanError
from lrmoe.planning.plan import LayerPlan, Traffic
from lrmoe.planning.policies._info import PolicyInfo
from lrmoe.planning.problem import Problem


class UserPolicy:
    """A policy from a file; every plan it returns is checked before anybody acts on it.

    It sees read-only counts and history, and what it prints goes to stderr.

    Attributes:
        name: what it was asked for as, "path/to/file.py:Name".
        info: what tables say of it.
        claims: whether its file says so; otherwise nothing is known.
    """

    def __init__(
        self, name: str, plan: Callable[[Problem], Any], info: PolicyInfo, *, claims: bool = True
    ) -> None:
        self.name = name
        self.info = info
        self.claims = claims
        self._plan = plan

    def __call__(self, problem: Problem) -> LayerPlan:
        """Plan one call.

        Raises:
            PlanError: it failed or called exit, the result is no LayerPlan, was made for another problem, is illegal,
                leaves pairs out though its INFO has no drops, or fills more slots than INFO claims ("none": E / R of a
                rank, "shared" and "resident": as many and the problem's).
            InfeasibleError: it says so itself, of a problem with a budget.
        """
        who = f"policy={self.name!r}, call {_call(problem)}"
        try:
            with contextlib.redirect_stdout(sys.stderr):
                plan = self._plan(_guarded(problem))
        except (Exception, SystemExit) as error:
            if isinstance(error, InfeasibleError) and problem.budget_rows is not None:
                raise
            raise PlanError(f"{who}: failed with {_said(error)}") from error
        if not isinstance(plan, LayerPlan):
            raise PlanError(f"{who}: returned {type(plan).__name__}: must return a LayerPlan")
        if plan.topology != problem.topology:
            raise PlanError(f"{who}: returned a plan for another topology: {plan.topology}")
        try:
            plan.check(problem)
        except Exception as error:  # fields of any type may be in it
            said = str(error) if isinstance(error, PlanError) else _said(error)
            raise PlanError(f"{who}: returned an illegal plan: {said}") from error
        self._check_drops(who, plan)
        self._check_slots(problem, plan)
        return plan

    def _check_drops(self, who: str, plan: LayerPlan) -> None:
        """Hold the policy to computing every pair, unless its INFO says that it drops some."""
        missing = plan.pairs - plan.kept
        if missing and not self.info.drops:
            raise PlanError(
                f"{who}: leaves {missing} of {plan.pairs} pairs out; a policy that does needs drops=True in its INFO"
            )

    def _check_slots(self, problem: Problem, plan: LayerPlan) -> None:
        """Hold the policy to the slots that its INFO claims."""
        if self.info.slots == "unbounded":
            return
        limit = problem.topology.experts_per_rank + (0 if self.info.slots == "none" else problem.slots)
        copies_J = np.ones_like(plan.instance_rank_J) if plan.copies_J is None else plan.copies_J
        copies_R = np.zeros(problem.topology.ranks, dtype=np.int64)
        np.add.at(copies_R, plan.instance_rank_J, copies_J)
        if (copies_R > limit).any():
            rank = int(np.argmax(copies_R))
            raise PlanError(
                f"policy={self.name!r} puts {int(copies_R[rank])} experts on rank {rank}: slots={self.info.slots!r} of "
                f"its INFO allows {limit}"
            )


def _call(problem: Problem) -> str:
    step = "without history" if problem.history is None else str(problem.history.step)
    return f"{step} ({problem.topology.ranks} ranks, {problem.topology.experts} experts)"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _guarded(problem: Problem) -> Problem:
    """The same question over arrays that cannot be written to: those of the caller serve every system."""
    history = problem.history
    if history is not None:
        previous = history.previous
        history = dataclasses.replace(
            history,
            counts=tuple(map(_read_only, history.counts)),
            previous=None if previous is None else _read_only_fields(previous),
        )
    changes: dict[str, Any] = {"counts_RE": _read_only(problem.counts_RE), "history": history}
    for name in ("score_mean_E", "score_bins"):
        if (value := getattr(problem, name)) is not None:
            changes[name] = _read_only(value)
    return dataclasses.replace(problem, **changes)


def _read_only_fields(record: Any) -> Any:
    """A dataclass with read-only views of its arrays, also of those in its traffic."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            changes[field.name] = _read_only(value)
        elif isinstance(value, Traffic):
            changes[field.name] = _read_only_fields(value)
    return dataclasses.replace(record, **changes)


def _read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


def load_policy(name: str) -> UserPolicy:
    """Load "path/to/file.py:Name", where Name is a function of a Problem, or a class whose instances are.

    A class is built without arguments. One object serves the whole process, so it must keep no state: what lasts
    from call to call is in `problem.history`. A module-level or class-level `INFO` (a PolicyInfo) describes it.

    Raises:
        PlanError: no such file or name, an error while loading it, or something that cannot be called so.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not attribute.isidentifier():
        raise PlanError(f"policy={name!r}: must look like 'my_file.py:MyPolicy'")
    if not path.is_file():
        raise PlanError(f"policy={name!r}: no file {path.resolve()}")
    return _load(name, path.resolve(), path.stat().st_mtime_ns, attribute)


@functools.lru_cache(maxsize=64)
def _load(name: str, path: Path, changed_ns: int, attribute: str) -> UserPolicy:
    module = _run(name, path, changed_ns)
    found = getattr(module, attribute, None)
    if found is None:
        own = [
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        ]
        raise PlanError(
            f"policy={name!r}: {path.name} has no {attribute!r}; it defines {', '.join(own) or 'nothing'}"
        )
    plan = _instance(name, found) if inspect.isclass(found) else found
    _check_signature(name, plan)
    info = getattr(found, "INFO", None) or getattr(module, "INFO", None)
    claims = isinstance(info, PolicyInfo)
    if not isinstance(info, PolicyInfo):
        info = PolicyInfo(
            title=attribute,
            source=path.name,
            inputs="both",
            acts="unknown",
            moves="unknown",
            slots="unbounded",
            note="a user's policy without INFO: nothing about it is known",
        )
    return UserPolicy(name, plan, info, claims=claims)


def _run(name: str, path: Path, changed_ns: int) -> ModuleType:
    """Execute the file as a module of its own."""
    digest = hashlib.blake2b(f"{path}:{changed_ns}".encode(), digest_size=6).hexdigest()
    key = f"_lrmoe_policy_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # dataclasses look their module up
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[key]
        raise PlanError(f"policy={name!r}: loading {path} failed: {_said(error)}") from error
    return module


def _instance(name: str, policy: type) -> Callable[[Problem], Any]:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            made = policy()
    except (Exception, SystemExit) as error:
        raise PlanError(
            f"policy={name!r}: {policy.__name__}() failed, and it must be built without arguments: "
            f"{_said(error)}"
        ) from error
    return made


def _check_signature(name: str, plan: Any) -> None:
    if not callable(plan):
        raise PlanError(
            f"policy={name!r}: {type(plan).__name__} cannot be called; must be callable with a Problem"
        )
    if inspect.iscoroutinefunction(plan):
        raise PlanError(f"policy={name!r}: must be a plain function, not a coroutine")
    try:
        inspect.signature(plan).bind(object())
    except TypeError as error:
        raise PlanError(
            f"policy={name!r}: must be callable with one argument, the Problem; its signature is "
            f"{inspect.signature(plan)}"
        ) from error
    except ValueError:
        return  # built without a signature: the first call will tell
