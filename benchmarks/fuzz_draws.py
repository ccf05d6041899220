"""How random calls of the layer are drawn: everything is likely enough to be met in some hundred calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fuzz_calls import DTYPES, FILLS, ID_DTYPES, LAYOUTS, PASSES, ROWS, STRANGE_IDS, FuzzCall, RanksCall
from hypothesis import strategies as st
from tests.reference import GRADS

from lrmoe.config import FORWARD_SCORES, POLICIES, SCORES, LRMoEConfig

_DEFAULTS = LRMoEConfig()
# Lists, with what shall be likely in them often: numbers of a range are mostly drawn from its ends.
_TOKENS = [0, 1, 2, 3, 5, 8, 13, 16, 17, 21, 24, 32, 33, 40, 40, 64]


@st.composite
def calls(draw: st.DrawFn, faults: tuple[str, ...] = ()) -> FuzzCall:
    """Any call; one in five has a fault."""
    sizes = _sizes(draw)
    config = draw(configs())
    entry = draw(st.sampled_from(["layer", "layer", "layer", "enable"]))
    fault = draw(st.sampled_from(["", "", "", "", "fault"])) and draw(st.sampled_from(faults or ("",)))
    made = draw(st.sampled_from(["plain"] * 4 + list(PASSES)))
    nobody = draw(st.sampled_from(["none", "none", *STRANGE_IDS]))
    return FuzzCall(
        **sizes,
        entry="layer" if fault else entry,
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
        dtypes=draw(_dtypes()),
        autocast=draw(st.sampled_from([""] * 5 + ["bf16", "fp16"])),
        ids=draw(st.sampled_from(["int64"] * 4 + list(ID_DTYPES))),
        strange=nobody,
        doubled=draw(st.booleans()),
        fill=draw(_fills()),
        scale=draw(st.sampled_from([1.0, 1.0, 0.0, 1e-3, 30.0])),
        layouts=draw(_layouts()),
        one_row=draw(st.sampled_from([False] * 5 + [True])),
        batched=draw(st.booleans()) and entry == "layer",
        mask=draw(st.sampled_from([""] * 6 + ["some", "some", "all", "none"])),
        needs=draw(_needs()),
        made=made,
        micro_batches=draw(st.sampled_from([1, 1, 2, 3])) if made != "inference_mode" else 1,
        reverse=draw(st.booleans()),
        step=draw(st.sampled_from([0, 0, 1, 5])),
        config=tuple(config.items()),
        fault=fault,
    )


@st.composite
def rank_calls(
    draw: st.DrawFn, ranks: int, faults: tuple[str, ...] = (), differences: tuple[str, ...] = ()
) -> RanksCall:
    """Any call over several ranks; in one of five something is wrong on one of them, or other than on the rest."""
    sizes = tuple(draw(st.lists(st.sampled_from(_TOKENS), min_size=ranks, max_size=ranks)))
    call = draw(calls())
    experts = ranks * draw(st.sampled_from([1, 2, 4]))
    config = dict(call.config)
    if not any("budget" in name for name in config):
        config["storage"] = draw(st.sampled_from(["owned", "owned", "owned", "sharded"]))
    config["lean_wire"] = draw(st.sampled_from(["auto", "auto", False]))
    wrong = draw(st.sampled_from(["", "", "", "", "", "", "", "fault", "difference"]))
    call = replace(
        call,
        entry="layer",
        tokens=sum(sizes),
        experts=experts,
        top_k=min(call.top_k, experts),
        config=tuple((name, value) for name, value in config.items() if value != getattr(_DEFAULTS, name)),
        fault=draw(st.sampled_from(faults)) if wrong == "fault" else "",
    )
    if wrong == "difference":
        call = replace(call, made="plain", autocast="", needs=GRADS)  # so that it is one
    return RanksCall(
        call=call,
        sizes=sizes,
        odd=draw(st.integers(0, ranks - 1)),
        differs=draw(st.sampled_from(differences)) if wrong == "difference" else "",
    )


def _sizes(draw: st.DrawFn) -> dict[str, Any]:
    experts = draw(st.sampled_from([1, 2, 3, 5, 8, 16]))
    return {
        "experts": experts,
        "tokens": draw(st.sampled_from(_TOKENS)),
        "top_k": draw(st.integers(1, min(experts, 4))),
        "hidden": draw(st.sampled_from([1, 3, 8, 16])),
        "width": draw(st.sampled_from([1, 5, 12])),
        "seed": draw(st.integers(0, 2**20)),
        "skew": draw(st.sampled_from([0.0, 1.0, 4.0])),
    }


def _dtypes() -> st.SearchStrategy[tuple[str, str, str]]:
    same = st.sampled_from(list(DTYPES)).map(lambda name: (name, name, name))
    wide_routing = st.sampled_from(["bf16", "fp16"]).map(lambda name: (name, "fp32", name))
    return st.one_of(same, wide_routing, st.tuples(*[st.sampled_from(list(DTYPES))] * 3))


def _fills() -> st.SearchStrategy[tuple[str, str]]:
    some = st.tuples(st.sampled_from(list(FILLS)), st.sampled_from(["hidden", "weights", "grad"]))
    return st.one_of(st.just(("", "")), st.just(("", "")), st.just(("", "")), some)


def _layouts() -> st.SearchStrategy[tuple[str, str, str, str]]:
    plain = st.just(("contiguous",) * 4)
    return st.one_of(plain, st.tuples(*[st.sampled_from(list(LAYOUTS))] * 4))


def _needs() -> st.SearchStrategy[tuple[str, ...]]:
    every = [tuple(n for i, n in enumerate(GRADS) if bits >> i & 1) for bits in range(16)]
    return st.sampled_from([GRADS] * 48 + every)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a valid configuration that are not at their defaults."""
    drop = draw(st.sampled_from([0.0, 0.05, 0.3, 0.3, 0.5, 0.5, 0.95]))
    estimator = draw(st.sampled_from(["sampled", "topk"]))
    sampled = estimator == "sampled"
    select_in = draw(st.sampled_from(["backward", "backward", "forward"]))
    found: dict[str, Any] = {
        "max_drop": drop,
        "policy": "lrmoe" if drop else draw(st.sampled_from(POLICIES)),
        "estimator": estimator,
        "drop": draw(st.sampled_from(["always", "always", "overload", *(["auto"] if sampled else [])])),
        "score": draw(st.sampled_from(SCORES if select_in == "backward" else FORWARD_SCORES)),
        "select_in": select_in,
        "selection": draw(st.sampled_from(["global", "local"])),
        "router_grad": draw(st.sampled_from(["auto", "full", "retained"])),
        "activations": draw(st.sampled_from(["auto", "stash", "recompute"])),
        "min_keep": draw(st.sampled_from([1, 1, 3, 100] if sampled else [0, 1, 3])),
        "max_added_variance": draw(st.sampled_from([None, None, 0.01, 1.0])) if sampled else None,
        "replica_slots": draw(st.sampled_from([0, 2])),
        "warmup_steps": draw(st.sampled_from([0] * 7 + [3])),
        "observe": draw(st.sampled_from([False] * 9 + [True])),
        "seed": draw(st.integers(0, 9)),
    }
    found |= draw(_limits())
    return {name: value for name, value in found.items() if value != getattr(_DEFAULTS, name)}


@st.composite
def _limits(draw: st.DrawFn) -> dict[str, Any]:
    """Budgets from far too small to ample, or a check of the gradient, or neither."""
    sizes = st.sampled_from([64, 20_000, "1GiB", "50%", *ROWS])
    kind = draw(
        st.sampled_from([""] * 5 + ["layer_budget", "layer_budget", "memory_budget", "both", "check_every"])
    )
    if kind == "both":
        return {"layer_budget": draw(sizes), "memory_budget": draw(sizes)}
    if kind == "check_every":
        return {"check_every": draw(st.sampled_from([1, 2]))}
    return {kind: draw(sizes)} if kind else {}
