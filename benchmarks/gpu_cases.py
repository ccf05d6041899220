"""Known faults of MoE libraries as checks on this machine, for `gpu_check.py`; each is named after its case in tests/.

On a CPU the same checks run on tiny shapes, which shows that they work and nothing else.

Shape letters: T tokens, K experts per token, E experts, H hidden, I expert width, N rows (pairs).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from gpu_report import Report, make_layer, run_layer
from plain import Case, Shape, grouped_loop, make_case, run_plain
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lrmoe import MoELayer, ops
from lrmoe.telemetry.tracking import StorageTracker

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for in deterministic mode
SHAPE = Shape(tokens=256, hidden=64, width=48, experts=8, top_k=4, repeats=1)
ODD_COUNTS = [1, 7, 9, 0, 15]
IDLE_COUNTS = [162, 0, 2577, 446, 0, 83]
Check = Callable[[Report, torch.device, int], None]


def check_cases(report: Report, device: torch.device, seed: int) -> None:
    """All cases, one after the other."""
    for check in CASES.values():
        check(report, device, seed)


def from_counts(
    counts: list[int], hidden: int, width: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Shape, Case]:
    """One expert per token, `counts[e]` tokens of expert e."""
    shape = Shape(tokens=sum(counts), hidden=hidden, width=width, experts=len(counts), top_k=1, repeats=1)
    case = make_case(shape, dtype, device, seed)
    ids = torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device))
    return shape, dataclasses.replace(case, ids=ids.unsqueeze(1))


def idle_experts(report: Report, device: torch.device, seed: int) -> None:
    """U02: gradients of experts without rows are exactly zero, whatever memory held before."""
    counts = IDLE_COUNTS if device.type == "cuda" else [n // 50 for n in IDLE_COUNTS]
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        shape, case = from_counts(counts, 64, 64, dtype, device, seed)
        layer, wrong = make_layer(shape, max_drop=0.0), 0
        for _ in range(2):
            _poison(device)
            found = run_layer(layer, case)
            idle = [e for e, n in enumerate(counts) if n == 0]
            wrong += sum(int((grad[idle] != 0).sum()) for grad in found[3:])
        report.at_most(f"cases.u02.{name}.nonzero_of_idle", wrong, 0, "entries")
        report.check(f"cases.u02.{name}", found, run_plain(case, torch.float64), run_plain(case, dtype))


def _poison(device: torch.device) -> None:
    """Blocks of many sizes, filled with NaN and freed: what is not written shows."""
    blocks = [torch.full((2**n,), float("nan"), device=device) for n in range(8, 22) for _ in range(4)]
    del blocks


def recomputed_calls(report: Report, device: torch.device, seed: int) -> None:
    """U06: a call that a checkpoint computes again in backward gives the same bits as one that is kept."""
    case = make_case(SHAPE, torch.bfloat16, device, seed)
    for name, fields in {"late": {}, "early": {"select_in": "forward", "score": "alpha"}}.items():
        kept = run_layer(make_layer(SHAPE, max_drop=0.5, **fields), case)
        layer = make_layer(SHAPE, max_drop=0.5, **fields)
        call = functools.partial(_called, layer, case.ids)
        out = checkpoint(call, *case.leaves(), use_reentrant=False)
        again = [out.detach(), *torch.autograd.grad(out, case.leaves(), case.grad)]
        differ = sum(not torch.equal(one, other) for one, other in zip(kept, again, strict=True))
        report.at_most(f"cases.u06.{name}.differing_tensors", differ, 0, "tensors")


def _called(layer: MoELayer, ids: Tensor, hidden: Tensor, weights: Tensor, *experts: Tensor) -> Tensor:
    return layer(hidden, ids, weights, *experts, training=True)


def large_offsets(report: Report, device: torch.device, seed: int) -> None:
    """U07: rows times width beyond 2^31 elements; the last rows come out right, packed, multiplied and moved back."""
    cuda = device.type == "cuda"
    rows, hidden = (300_000, 7168) if cuda else (300, 72)
    counts, tail = [rows - 64 - 7, 0, 7, 64], slice(rows - 64, rows)
    gen = torch.Generator(device=device).manual_seed(seed)
    source = torch.randn(rows, hidden, generator=gen, device=device, dtype=torch.bfloat16)
    weight = torch.randn(4, 64, hidden, generator=gen, device=device, dtype=torch.bfloat16)
    order = torch.arange(rows - 1, -1, -1, device=device)
    packed = ops.gather_rows(source, order)
    report.at_most("cases.u07.misplaced", int((packed[tail] != source[:64].flip(0)).sum()), 0, "entries")
    grad = torch.randn(rows, 64, generator=gen, device=device, dtype=torch.bfloat16)
    actual = (
        ops.grouped_mm(packed, weight, counts)[tail],
        ops.grouped_mm_input(grad, weight, counts)[tail],
        ops.grouped_mm_weight(grad, packed, counts, out=torch.empty_like(weight))[3:],
    )
    ends = [(packed[tail].to(t), grad[tail].to(t), weight[3:].to(t), [64]) for t in _TRUTH]
    exact, plain = (grouped_loop(*end) for end in ends)
    report.check("cases.u07", actual, exact, plain)


_TRUTH = (torch.float64, torch.bfloat16)


def odd_counts(report: Report, device: torch.device, seed: int) -> None:
    """U09: row counts and base pointers that are no multiples of anything."""
    for hidden in (24, 20):
        shape, case = from_counts(ODD_COUNTS, hidden, 40, torch.bfloat16, device, seed)
        odd = {name: _misaligned(getattr(case, name)) for name in ("hidden", "gate_up", "down")}
        exact, plain = (run_plain(case, dtype) for dtype in _TRUTH)
        for activations in ("stash", "recompute"):
            layer = make_layer(shape, max_drop=0.0, activations=activations)
            found = run_layer(layer, dataclasses.replace(case, **odd, grad=_misaligned(case.grad)))
            report.check(f"cases.u09.{activations}.h{hidden}", found, exact, plain)


def _misaligned(tensor: Tensor) -> Tensor:
    """The same values, one element off the start of a storage; a leaf if `tensor` is one that learns."""
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = storage[1:].view(tensor.shape).copy_(tensor.detach())
    return view.requires_grad_(tensor.requires_grad)


def mixed_dtypes(report: Report, device: torch.device, seed: int) -> None:
    """U10: weights and rows in two dtypes, in and outside autocast: computed in the weights' or autocast's dtype."""
    half = torch.bfloat16
    case = make_case(SHAPE, torch.float32, device, seed)
    rounded = case.to(half).to(torch.float32)  # values that both dtypes hold
    narrow = rounded.to(half)
    exact, plain = run_plain(rounded, torch.float64), run_plain(narrow, half)
    mixes = {
        "narrow_weights": dataclasses.replace(rounded, gate_up=narrow.gate_up, down=narrow.down),
        "narrow_rows": dataclasses.replace(rounded, hidden=narrow.hidden, grad=narrow.grad),
        "autocast": rounded,
    }
    for name, given in mixes.items():
        layer = make_layer(SHAPE, max_drop=0.0)
        with torch.autocast(device.type, dtype=half, enabled=name == "autocast"):
            found = run_layer(layer, given)
        asked = [given.hidden, *given.leaves()]
        wrong = sum(one.dtype != wanted.dtype for one, wanted in zip(found, asked, strict=True))
        report.at_most(f"cases.u10.{name}.wrong_dtypes", wrong, 0, "tensors")
        report.check(f"cases.u10.{name}", [t.to(half) for t in found], exact, plain)
    _same_choice_when_scaled(report, device, seed)


def _same_choice_when_scaled(report: Report, device: torch.device, seed: int) -> None:
    """A loss scale changes no choice in fp16, though squares of scaled gradients would overflow."""
    case = make_case(SHAPE, torch.float16, device, seed)
    kept = []
    for scale in (1.0, 1024.0):
        layer = make_layer(SHAPE, max_drop=0.5, estimator="topk", router_grad="retained")
        found = run_layer(layer, dataclasses.replace(case, grad=case.grad.clamp(-8, 8) * scale))
        kept.append(found[2] != 0)
    report.at_most("cases.u10.choice_moved_by_scale", int((kept[0] != kept[1]).sum()), 0, "pairs")


def repeated_runs(report: Report, device: torch.device, seed: int) -> None:
    """U12: the same bits in every run, in torch's deterministic mode, which refuses nothing."""
    case = make_case(SHAPE, torch.bfloat16, device, seed)
    modes: dict[str, dict[str, Any]] = {
        "exact": {"max_drop": 0.0},
        "sampled": {"max_drop": 0.5},
        "topk": {"max_drop": 0.5, "estimator": "topk"},
    }
    with _deterministic():
        for name, fields in modes.items():
            first = run_layer(make_layer(SHAPE, **fields), case)
            differ = 0
            for _ in range(20 if device.type == "cuda" else 3):
                again = run_layer(make_layer(SHAPE, **fields), case)
                differ += any(not torch.equal(one, other) for one, other in zip(first, again, strict=True))
            report.at_most(f"cases.u12.{name}.differing_runs", differ, 0, "runs")


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def steady_memory(report: Report, device: torch.device, seed: int) -> None:
    """U26: nothing of a call outlives it, over steps with other numbers of rows each."""
    layer, cuda = make_layer(SHAPE, max_drop=0.3), device.type == "cuda"
    gen = torch.Generator().manual_seed(seed)
    case = make_case(SHAPE, torch.float32, device, seed)
    held: list[int] = []
    for step in range(60 if cuda else 6):
        # The largest first: buffers that are kept for the next call are then as large as they get.
        tokens = int(torch.randint(1, SHAPE.tokens, (), generator=gen)) if step else SHAPE.tokens
        run_layer(layer, _first(case, tokens))
        layer.clock.advance()
        layer.telemetry.drain()
        held.append(_held(device))
    warm = len(held) // 3
    report.at_most("cases.u26.growth", max(held[warm:]) - max(held[:warm]), 0, "bytes")


def _first(case: Case, tokens: int) -> Case:
    cut = {name: getattr(case, name)[:tokens] for name in ("hidden", "ids", "weights", "grad")}
    return dataclasses.replace(case, **cut)


def _held(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    # Fake tensors that a compiler left have no memory, and sizes that are no numbers.
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
    return sum(t.numel() * t.element_size() for t in tensors if t.is_floating_point())


def hot_expert(report: Report, device: torch.device, seed: int) -> None:
    """U27: a call whose pairs all go to one expert needs no more memory than one that is balanced."""
    shape = dataclasses.replace(SHAPE, tokens=4096 if device.type == "cuda" else 512, top_k=2)
    case = make_case(shape, torch.bfloat16, device, seed)
    even = torch.arange(case.ids.numel(), device=device).view(case.ids.shape) % shape.experts
    peaks = {}
    for name, ids in (("even", even), ("hot", torch.zeros_like(even))):
        layer, given = make_layer(shape, max_drop=0.0), dataclasses.replace(case, ids=ids)
        run_layer(layer, given)
        peaks[name] = _peak(functools.partial(run_layer, layer, given), device)
    # On a CPU the intermediates of a block of rows are what a large expert needs more.
    report.at_most("cases.u27.hot_over_even", peaks["hot"] / peaks["even"], 1.1, "ratio")


def _peak(call: Callable[[], object], device: torch.device) -> int:
    if device.type != "cuda":
        tracker = StorageTracker()
        with tracker:
            call()
        return tracker.peak
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def unfinished_counts(report: Report, device: torch.device, seed: int) -> None:
    """U33: counts are read when they are there, also with a single expert and much work queued before."""
    cuda = device.type == "cuda"
    shape = dataclasses.replace(SHAPE, experts=1, top_k=1)
    case, layer = make_case(shape, torch.float32, device, seed), make_layer(shape, max_drop=0.0)
    queue = torch.randn(4096 if cuda else 32, 4096 if cuda else 32, device=device)
    gen, wrong = torch.Generator(device=device).manual_seed(seed), 0
    for _ in range(200 if cuda else 4):
        missing = torch.rand(case.ids.shape, generator=gen, device=device) < 0.3
        wrong += _differs(layer, case, queue, missing)
    report.at_most("cases.u33.differing_calls", wrong, 0, "calls")


def _differs(layer: MoELayer, case: Case, queue: Tensor, missing: Tensor) -> bool:
    """Whether a call behind a long queue gives something else than one that starts with nothing to wait for."""
    for _ in range(4):
        queue = queue @ queue / queue.shape[0]
    given = dataclasses.replace(case, ids=torch.where(missing, -1, case.ids))
    hasty = run_layer(layer, given)
    if queue.is_cuda:
        torch.cuda.synchronize(queue.device)
    patient = run_layer(layer, given)
    return any(not torch.equal(one, other) for one, other in zip(hasty, patient, strict=True))


CASES: Mapping[str, Check] = MappingProxyType(
    {
        "U02": idle_experts,
        "U06": recomputed_calls,
        "U07": large_offsets,
        "U09": odd_counts,
        "U10": mixed_dtypes,
        "U12": repeated_runs,
        "U26": steady_memory,
        "U27": hot_expert,
        "U33": unfinished_counts,
    }
)
