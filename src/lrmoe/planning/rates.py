"""What replicas cost in rows of compute: bytes over links against FLOP, from sizes and what the device is.

Nothing is timed, so that plans can be made again. A row is one pair: 6 H I FLOP in forward, as much again for the
gradient of its input and for that of the weights. A copy is 3 H I parameters: weights out, again for backward,
gradients home in the dtype of sums. So a copy costs

    bytes per parameter / (2 * passes) * (FLOP/s over link bytes/s)    rows, whatever H and I are, and its fixed time.

Known devices take both rates from the datasheet (hardware.py, with the usual shares of calibration.Constants). Where
nothing is known of the link (CPU, other devices, other dtypes), it is as fast as telemetry assumes: the exchange of a
balanced, complete call takes one third of its time. Then a copy costs about 1.1 to 1.5 I rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from lrmoe.planning.calibration import Constants
from lrmoe.planning.hardware import HARDWARE, Hardware, product

CPU, UNKNOWN = -1, 0  # device codes; known devices count from 1 in the order of HARDWARE
LEAN = 2 / 3  # of the rows of a balanced call, what crosses where tokens cross once per rank

_FLOPS = {
    CPU: 50e9,
    UNKNOWN: 100e12,
}  # of one thread; of a usual accelerator. Only a copy's fixed time reads them
_COPY_S = {CPU: 1e-3}  # CPU time of one more copy in a call besides its bytes, on one thread


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the price of a call's copies depends on besides the device.

    Attributes:
        hidden, width: of an expert. ranks: of the group. element_bytes: of the compute dtype.
        backward: whether there is one. weights: whether it makes weight gradients.
        lean: whether tokens cross once per rank.
    """

    hidden: int
    width: int
    ranks: int
    element_bytes: int
    backward: bool = True
    weights: bool = True
    lean: bool = False

    @property
    def passes(self) -> int:
        """GEMM passes over a row."""
        return 1 + (1 + self.weights if self.backward else 0)

    @property
    def copy_bytes(self) -> int:
        """Bytes per parameter of a copy that cross in a call."""
        out = self.element_bytes * (2 if self.backward else 1)
        return out + (max(self.element_bytes, 4) if self.backward and self.weights else 0)


def device_code(kind: str, name: str) -> int:
    """What a device is, as an integer that ranks can compare.

    Args:
        kind: "cpu", "cuda" or another. name: of the product, as its driver says.
    """
    if kind == "cpu":
        return CPU
    known = product(name)
    return UNKNOWN if known is None else 1 + list(HARDWARE).index(known.name)


def agreed(codes: Sequence[int]) -> int:
    """One code for all ranks: theirs, or UNKNOWN where they differ."""
    return codes[0] if len(set(codes)) == 1 else UNKNOWN


@cache  # a layer asks in every call, of a few sizes
def copy_price(device: int, sizes: Sizes, *, hosts: int = 1) -> tuple[float, float]:
    """(`copy_rows`, `cross_rows`) of a Problem.

    A lean wire hardly has more to carry to a loaded rank than to others (a token crosses once however many of its
    pairs go there), so with it crossing rows are left out: copies must pay by compute alone.

    Args:
        device: an agreed device code. hosts: machines that the group spans; several: the network carries copies.
    """
    known = list(HARDWARE.values())[device - 1] if device > 0 and sizes.element_bytes == 2 else None
    if known is None:
        device = min(device, UNKNOWN)
        ratio = _by_rule(sizes)
        fixed = _COPY_S.get(device, _latency(None, hosts) * sizes.passes)
        flops = _FLOPS[device]
    else:
        ratio, flops = _ratio(known, hosts), known.flops * Constants().gemm_efficiency
        fixed = _latency(known, hosts) * sizes.passes
    row_flop = 6 * sizes.hidden * sizes.width * sizes.passes
    copy_rows = sizes.copy_bytes / (2 * sizes.passes) * ratio + fixed * flops / row_flop
    crossings = 4 if sizes.backward else 2
    cross_rows = crossings * sizes.element_bytes / (6 * sizes.width * sizes.passes) * ratio
    return copy_rows, 0.0 if sizes.lean else cross_rows


def _by_rule(sizes: Sizes) -> float:
    """FLOP per byte: rows of a balanced training call cross four times, in half the time of its 18 H I FLOP each."""
    crossing = (sizes.ranks - 1) / sizes.ranks * (LEAN if sizes.lean else 1.0)
    return 9 * sizes.width / (4 * sizes.element_bytes * crossing) if sizes.ranks > 1 else 0.0


def _ratio(known: Hardware, hosts: int) -> float:
    constants = Constants()
    link = known.inner_link if hosts == 1 else "network"
    rate = known.link_bytes_per_s(link) * getattr(constants, f"{link}_efficiency")
    return known.flops * constants.gemm_efficiency / rate


def _latency(known: Hardware | None, hosts: int) -> float:
    """Fixed seconds of one exchange more."""
    link = "network" if hosts > 1 else "nvlink" if known is None else known.inner_link
    return float(getattr(Constants(), f"{link}_latency_us")) / 1e6
