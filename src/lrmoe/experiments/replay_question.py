"""What `lrmoe replay` is asked, from options as typed: the call, the sizes, the device, the link."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import torch

from lrmoe.config import LRMoEConfig
from lrmoe.errors import ConfigError, PlanError
from lrmoe.experiments.capacity.model import find_model
from lrmoe.experiments.simulation import parse_options
from lrmoe.planning.hardware import get_hardware
from lrmoe.planning.memory import ExpertShape
from lrmoe.planning.problem import Topology
from lrmoe.simulate.cluster import Calls
from lrmoe.simulate.generators import Shape
from lrmoe.simulate.published import EXPERTS, RANKS, TOKENS, TOP_K
from lrmoe.simulate.replay import ACTIVATIONS, DTYPES, Question
from lrmoe.simulate.replay_calls import SEED, generated_call, published_call, recorded_call
from lrmoe.simulate.run import MODEL
from lrmoe.simulate.scenario import Allowance, Layer
from lrmoe.telemetry.traces import load

_CPU_SCALE = 8  # a CPU replays rows of an eighth of the model's width unless told otherwise
_RULE = "third"
_PRODUCTS = (
    3  # a process's memory over its ranks' own buffers: copies inside products, what the allocator keeps
)


def make_question(
    *,
    systems: Sequence[str],
    trace: Path | None = None,
    trace_system: str | None = None,
    layer: int | None = None,
    call: int | None = None,
    generator: str | None = None,
    pattern: Sequence[str] = (),
    ranks: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    tokens: int | None = None,
    seed: int | None = None,
    slots: int = 2,
    max_drop: float = 0.2,
    estimator: str = "sampled",
    model: str | None = None,
    hidden: int | None = None,
    dtype: str = "bf16",
    device: str | None = None,
    link: str | None = None,
    activations: str = ACTIVATIONS[0],
    repeats: int = 1,
    workers: int = 1,
) -> Question:
    """The question that options ask.

    Args:
        trace, trace_system, layer, call: of a recorded call. generator, pattern ("key=value"), ranks, experts, top_k,
            tokens, seed: of a generated one; neither: the published comparison's.
        slots, max_drop, estimator: of the systems. model: whose sizes; hidden: instead of the model's (on a CPU an
            eighth of it unless given).
        dtype: bf16, fp32 or fp64. device: cpu or cuda; None takes CUDA where it is.
        activations: recompute or stash, of every system.
        workers: ranks that run at the same time, each with memory of its own; on CUDA one.
        link: "third", a device of the hardware table, or bytes per second; None: "third" on a CPU, else h100.

    Raises:
        ConfigError: values that do not fit each other.
    """
    where = _device(device)
    recorded = None if trace is None else load(trace, system=trace_system)
    about = {} if recorded is None or model is not None else recorded.about
    shape = find_model(model or MODEL)
    width = _whole(about.get("width")) or shape.expert_width
    own = _whole(about.get("hidden")) or shape.hidden
    if hidden is not None and hidden < 1:
        raise ConfigError(f"--hidden {hidden}: must be at least 1")
    chosen = hidden or (own if where.type == "cuda" else max(own // _CPU_SCALE, 1))
    k = top_k or _whole(about.get("top_k")) or shape.top_k
    if recorded is not None:
        _refuse(generator=generator, pattern=pattern, tokens=tokens, experts=experts)
        calls = recorded_call(recorded, ranks, layer, call)
    else:
        _refuse(trace_system=trace_system, layer=layer, call=call)
        calls = _generated(generator, pattern, seed, ranks, experts, k, tokens)
    counts_RE = calls.counts[-1]
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    try:
        topology = Topology(ranks=counts_RE.shape[0], experts=counts_RE.shape[1])
        sizes = ExpertShape(hidden=chosen, width=width, element_bytes=DTYPES[dtype].itemsize)
    except PlanError as error:
        raise ConfigError(str(error)) from error
    return Question(
        systems=systems,
        calls=calls,
        topology=topology,
        layer=Layer(shape=sizes, top_k=k),
        allowance=Allowance(slots=slots, max_drop=max_drop),
        config=LRMoEConfig(max_drop=max_drop, estimator=estimator, seed=0 if seed is None else seed),
        dtype=dtype,
        device=where,
        activations=activations,
        repeats=repeats,
        workers=workers,
        link_bytes_per_s=_link(link, where),
    )


def _generated(
    generator: str | None,
    pattern: Sequence[str],
    seed: int | None,
    ranks: int | None,
    experts: int | None,
    top_k: int,
    tokens: int | None,
) -> Calls:
    sizes = {
        "ranks": ranks or RANKS,
        "experts": experts or EXPERTS,
        "top_k": top_k,
        "tokens": TOKENS if tokens is None else tokens,
    }
    Shape(**sizes)
    chosen = SEED if seed is None else seed
    if chosen < 0:
        raise ConfigError(f"seed={chosen}: must be at least 0")
    published = (sizes["ranks"], sizes["experts"], top_k) == (RANKS, EXPERTS, TOP_K)
    if generator is None and not pattern and published:
        return published_call(sizes["tokens"], chosen)
    calls = generated_call(generator or "lognormal", parse_options(pattern), seed=chosen, **sizes)
    return changed(calls, name=f"{generator or 'lognormal'}, {calls.name}")


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value != ():
            raise ConfigError(f"{name}={value!r}: a trace has its own counts; give one or the other")


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _device(name: str | None) -> torch.device:
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device={name!r}: must be cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no CUDA device")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _link(text: str | None, device: torch.device) -> float | None:
    if text is None:
        text = _RULE if device.type == "cpu" else "h100"
    if text == _RULE:
        return None
    try:
        speed = float(text)
    except ValueError:
        try:
            hardware = get_hardware(text)
        except PlanError as error:
            raise ConfigError(
                f"link={text!r}: must be {_RULE}, bytes per second, or a device ({error})"
            ) from error
        return hardware.link_bytes_per_s(hardware.inner_link)
    if not 0 < speed < float("inf"):
        raise ConfigError(f"link={text!r}: must be positive and finite")
    return speed


def check_memory(question: Question) -> None:
    """Refuse a replay that the device cannot hold, before it starts.

    Raises:
        ConfigError: names what is needed, what is there and what to change.
    """
    needed, there = needed_bytes(question), _memory(question.device)
    if needed > there:
        raise ConfigError(
            f"hidden={question.layer.shape.hidden}: a replay needs about {needed / 2**30:.1f} GiB and "
            f"{question.device.type} has {there / 2**30:.1f}: take a smaller --hidden, or fewer --tokens or --workers"
        )


def needed_bytes(question: Question) -> int:
    """About what a replay needs: weights, all tokens, routes of every system, fixed ownership's fullest ranks."""
    shape, counts_RE = question.layer.shape, question.calls.counts[-1]
    pairs, ranks = int(counts_RE.sum()), question.topology.ranks
    load_E = counts_RE.sum(axis=0)
    fullest = int(load_E.reshape(ranks, -1).sum(axis=1).max())
    # Blocks of a CPU hold a seat's rows; a GPU computes all of a rank's at once.
    run = int(load_E.max()) if question.device.type == "cpu" else fullest
    row = 3 * shape.row_bytes + (
        2 * shape.width * shape.element_bytes if question.activations == "stash" else 0
    )
    scratch = run * (6 * shape.width + 3 * shape.hidden) * shape.element_bytes
    tokens = 2 * shape.row_bytes * -(-pairs // question.layer.top_k)
    return (
        question.topology.experts * shape.weight_bytes
        + tokens
        + _PRODUCTS * (fullest * row + scratch) * question.workers
        + 64 * pairs * (len(question.systems) + 1)
    )


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
