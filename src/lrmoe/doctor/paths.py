"""Fast paths: whether each can be used here, tried and not guessed, and why not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from lrmoe.doctor.finding import Finding
from lrmoe.ops.cpu import state
from lrmoe.ops.triton import missing, usable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NOT_TAKEN = "not taken: "


def fast_paths() -> Iterator[Finding]:
    """Grouped products by device and dtype, Triton, compiled passes, device-to-device links."""
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for dtype in DTYPES:
            yield _grouped(device, dtype)
    yield _triton()
    yield _compiled()
    if torch.cuda.device_count() > 1:
        yield _peers()


def _compiled() -> Finding:
    """Passes between matrix products on a CPU."""
    usable, text = state()
    if not usable:
        return Finding(
            area="fast paths", name="compiled CPU passes", state="no", text=f"{text}; torch's operators serve"
        )
    text = f"for fp32 and bf16, instructions of {text}; fp16 and fp64 take torch's operators"
    return Finding(area="fast paths", name="compiled CPU passes", state="ok", text=text)


def _grouped(device: str, dtype: torch.dtype) -> Finding:
    """torch's grouped matrix product, which the layer takes on CUDA in bf16."""
    name = f"F.grouped_mm {device} {str(dtype).removeprefix('torch.')}"
    taken = device == "cuda" and dtype == torch.bfloat16
    trouble = _try_grouped(device, dtype)
    if trouble is not None:
        return Finding(area="fast paths", name=name, state="no", text=f"{_NOT_TAKEN}{trouble}")
    if not taken:
        why = "a loop over experts is taken on CPU" if device == "cpu" else "only bf16 is taken, others loop"
        return Finding(area="fast paths", name=name, state="no", text=f"works here; {_NOT_TAKEN}{why}")
    return Finding(
        area="fast paths", name=name, state="ok", text="taken where operands are aligned to 16 bytes"
    )


def _try_grouped(device: str, dtype: torch.dtype) -> str | None:
    """What is wrong with it, None where it gives the right numbers."""
    grouped = getattr(F, "grouped_mm", None)
    if grouped is None:
        return f"torch {torch.__version__} has none"
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(32, 16, generator=generator).to(device, dtype)
    right = torch.randn(2, 16, 16, generator=generator).to(device, dtype)
    try:
        ends = torch.tensor([16, 32], dtype=torch.int32, device=device)
        found = grouped(left, right, offs=ends).float()
    except Exception as error:  # whatever a kernel says of a device or dtype it does not serve
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    exact = torch.cat([left[:16].float() @ right[0].float(), left[16:].float() @ right[1].float()])
    off = float((found - exact).abs().max() / exact.abs().max())
    return None if off < 2e-2 else f"wrong numbers (relative error {off:.1e})"


def _triton() -> Finding:
    """lrmoe's Triton kernels, tried on every CUDA device."""
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    troubles = [usable(torch.empty(0, device=device)) for device in devices]
    trouble = next(filter(None, troubles or [missing() or "there is no CUDA device"]), None)
    if trouble is not None:
        return Finding(area="fast paths", name="triton", state="no", text=f"{_NOT_TAKEN}{trouble}")
    text = "taken between products on CUDA: lrmoe's kernels compile here and give right numbers"
    return Finding(area="fast paths", name="triton", state="ok", text=text)


def _peers() -> Finding:
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    far = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    text = f"all {count} devices reach each other directly" if not far else f"not between {', '.join(far)}"
    return Finding(area="fast paths", name="peer access", state="no" if far else "ok", text=text)
