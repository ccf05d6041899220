"""CPU tensors that say they lie on a GPU, and raise where a GPU's would: to walk what only runs there.

Only the thread that asks pretends: others see tensors of the CPU. A storage is there or it is not, and all tensors on
it with it. What is made from tensors that are there is there, too. Copies between both sides that wait, and reads, are
counted by where in this package they were asked for.
"""

from __future__ import annotations

import collections
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import lrmoe

CUDA = torch.device("cuda", 0)
_PACKAGE = str(Path(lrmoe.__file__).parent)
_DEVICE, _IS_CUDA, _IS_CPU = (getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu"))
_READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique", "bincount"}
_MAY_MIX = {"copy_", "__getitem__", "__setitem__"}  # an index may lie on the host


class Event:
    """All work is done when it is asked for."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timed, self._recorded = enable_timing, False

    def record(self, stream: object = None) -> None:
        self._recorded = True

    def synchronize(self) -> None:
        assert self._recorded, "waits for an event that was not recorded"

    def query(self) -> bool:
        return self._recorded

    def elapsed_time(self, other: Event) -> float:
        assert self._timed, "an event without a time"
        return 0.5


class Pretend(TorchFunctionMode):
    """The mode; `waits` counts what would wait for the device: (what, where)."""

    def __init__(self) -> None:
        super().__init__()
        self._there: set[int] = set()
        self.waits: collections.Counter[tuple[str, str]] = collections.Counter()

    def there(self, tensor: Tensor) -> bool:
        """Whether a tensor says that it lies on the GPU."""
        return tensor.untyped_storage()._cdata in self._there

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor's storage says so from now on."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._there:
            self._there.add(storage._cdata)
            weakref.finalize(storage, self._there.discard, storage._cdata)
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "__get__":
            return self._attribute(func, args)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [self.there(tensor) for tensor in given]
        args, target = self._asked(name, args, kwargs)
        kwargs.pop("pin_memory", None)
        if name in ("numpy", "pin_memory") and any(there):
            raise TypeError(f"{name} of a tensor on a GPU, in {_where()}")
        if name in _READS and any(there):
            self.waits[name, _where()] += 1
        self._compare(name, given, there, target, waits=not kwargs.get("non_blocking"))
        if name == "pin_memory":
            return given[0].clone()
        result = func(*args, **kwargs)
        if target is not None and given and name in ("to", "cpu") and any(there) != (target == "cuda"):
            if not kwargs.get("non_blocking"):
                self.waits[f"copy to {target}", _where()] += 1
            result = result.clone()
        known = {tensor.untyped_storage()._cdata for tensor in given}
        if target == "cuda" or (target is None and any(there)):
            for made in tree_leaves(result):
                if isinstance(made, Tensor) and made.untyped_storage()._cdata not in known:
                    self.put(made)
        return result

    def _attribute(self, func: Any, args: Any) -> Any:
        there = self.there(args[0])
        if func == _DEVICE and there:
            return CUDA
        if func in (_IS_CUDA, _IS_CPU):
            return there == (func == _IS_CUDA)
        return func(*args)

    def _asked(self, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, str | None]:
        """Arguments with the CPU for any device; the device that was asked for, None where the operands decide."""
        target = "cpu" if name in ("cpu", "from_numpy") else None
        if kwargs.get("device") is not None:
            target, kwargs["device"] = torch.device(kwargs["device"]).type, "cpu"
        for at, one in enumerate(args):
            if isinstance(one, torch.device):
                target, args = one.type, (*args[:at], torch.device("cpu"), *args[at + 1 :])
        return args, target

    def _compare(
        self, name: str, given: list[Tensor], there: list[bool], target: str | None, *, waits: bool
    ) -> None:
        if len(set(there)) < 2 or target is not None:
            return
        if name == "copy_" and waits:
            self.waits["copy", _where()] += 1
        far = [tuple(t.shape) for t, is_there in zip(given, there, strict=True) if not is_there and t.dim()]
        if far and name not in _MAY_MIX:
            raise RuntimeError(f"{name} of tensors on a GPU and on the host {far}, in {_where()}")


def _where() -> str:
    """The function of this package that asks."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_PACKAGE)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""


@contextmanager
def pretending() -> Iterator[Pretend]:
    """Within, `.to("cuda")` does as if; what a call asks of `torch.cuda` is answered as a Hopper GPU would."""
    properties = SimpleNamespace(multi_processor_count=132, total_memory=2**37, major=9, minor=0)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_stream": lambda device=None: None,
        "device": lambda device: nullcontext(),
        "Event": Event,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 2**20,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: "NVIDIA H200",
    }
    mode = Pretend()

    def grad(outputs: Tensor, inputs: list[Tensor], grad_outputs: Tensor) -> tuple[Tensor, ...]:
        """As `torch.autograd.grad`, but so that the mode sees what backward does."""
        return torch.autograd.graph._engine_run_backward(
            (outputs,), (grad_outputs,), False, False, tuple(inputs), False, accumulate_grad=False
        )

    generator, made = torch.Generator, mock.patch.object
    with (
        mock.patch.multiple(torch.cuda, **answers),
        made(torch.autograd, "grad", grad),
        made(torch, "Generator", lambda device="cpu": generator()),
        mode,
    ):
        yield mode
