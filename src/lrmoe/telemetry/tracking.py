"""An independent witness of memory: follows every tensor storage that torch operators create, until it is freed.

It knows nothing of the layer, its plans or its ledger, and so can check them. Operators are seen one level below
autograd, in the forward and in the backward that runs under the mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

_FRESH = (
    torch.ops.aten.lift_fresh.default
)  # its argument was made by torch.tensor or torch.from_numpy just now


class StorageTracker(TorchDispatchMode):
    """Bytes of the storages created while the mode is on: now, and the most since a mark.

    Enter it around the forward and around the backward (the same object may be entered again). A storage that is first
    met as an operator's argument existed before and is not counted; views count once, with their storage, and so does a
    storage that lies in the memory of another (an array over a part of a tensor). What operators allocate inside
    themselves and return to nobody is out of sight, as is memory that no tensor owns.

    Attributes:
        current: bytes of storages that were created under the mode and still live.
        peak: the most of `current` since the last `mark`, or since construction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._sizes: dict[int, int | None] = {}  # None: not counted
        self._places: dict[int, int] = {}  # addresses of what is counted
        self._alive: dict[int, weakref.ref[Any]] = {}

    def mark(self) -> int:
        """Start a new peak at what lives now, and return that, in bytes."""
        self.peak = self.current
        return self.current

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Take the storages of `tensors` out of the count: they are the caller's."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage(), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not _FRESH:
            for tensor in _tensors((args, kwargs)):
                self._meet(tensor)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if self._sizes.get(id(storage), -1) not in (None, storage.nbytes()):  # new, or resized
                self._follow(storage, None if self._lent(storage) else storage.nbytes())
        return out

    def _meet(self, tensor: Tensor) -> None:
        """An argument: a storage not seen before existed before."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._sizes:
            self._follow(storage, None)

    def _lent(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage not seen before lies in the memory of one that is counted."""
        if id(storage) in self._sizes or storage.nbytes() == 0:
            return False
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return begin != 0 and any(
            place <= begin and end <= place + (self._sizes[key] or 0) for key, place in self._places.items()
        )

    def _follow(self, storage: torch.UntypedStorage, size: int | None) -> None:
        """Count `size` bytes for a storage from now on. Its Python object lives as long as the memory does."""
        key = id(storage)
        self._count((size or 0) - (self._sizes.get(key) or 0))
        self._sizes[key] = size
        self._places.pop(key, None)
        if size:
            self._places[key] = storage.data_ptr()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._freed(key))

    def _freed(self, key: int) -> None:
        self._alive.pop(key)
        self._places.pop(key, None)
        self._count(-(self._sizes.pop(key) or 0))

    def _count(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dictionaries."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)


def profiled_peak(run: Callable[[], object]) -> int:
    """Most bytes that `run` held at once beyond what lived before, as torch's profiler sees the CPU allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    roots = found.profiler.kineto_results.experimental_event_tree()
    changes = [e for e in _events(roots) if e.tag == _EventType.Allocation]
    current = peak = 0
    for change in sorted(changes, key=lambda e: e.start_time_ns):
        current += change.extra_fields.alloc_size
        peak = max(peak, current)
    return peak


def _events(roots: Iterable[Any]) -> Iterator[Any]:
    stack = list(roots)
    while stack:
        event = stack.pop()
        yield event
        stack.extend(event.children)
