"""Reading the model's own attention mask, so that padded positions carry no load.

Shapes: B sequences, S tokens in this call, P positions known to the mask (P > S while generating with a cache).
"""

from __future__ import annotations

import inspect
import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lrmoe.errors import InputError
from lrmoe.integrations.transformers._compat import PreTrainedModel
from lrmoe.layer import padding


def hosts_of(model: nn.Module) -> list[nn.Module]:
    """The outermost Transformers models inside `model`: itself, what DDP or an adapter library wrapped, or several."""
    hosts: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            hosts.append(module)
            inside.update(module.modules())
    return hosts


class PaddingHooks:
    """Around every forward of a model: `lrmoe.padding` with the call's 2-D attention mask, if it masks anything.

    Hooks travel with a copied or unpickled model, which is not enabled: a copy of this object does nothing.
    """

    def __init__(self, host: nn.Module) -> None:
        self._alive = True
        self._names = list(inspect.signature(host.forward).parameters)
        self._open = _OpenForwards()
        self._handles: list[RemovableHandle] = [
            host.register_forward_pre_hook(self._enter, with_kwargs=True),
            host.register_forward_hook(self._leave, always_call=True),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddingHooks:
        return _idle_hooks()

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle_hooks, ()

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._alive:
            return
        stack = ExitStack()
        # Pushed first: the closing hook runs even where reading the mask raises.
        self._open.stacks.append(stack)
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        mask_BS = token_mask(given)
        if mask_BS is not None:
            stack.enter_context(padding(mask_BS))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._alive and self._open.stacks:
            self._open.stacks.pop().close()


class _OpenForwards(threading.local):
    """Forwards in progress, of each thread: masks are context-local, and so must be what takes them back."""

    def __init__(self) -> None:
        self.stacks: list[ExitStack] = []


def _idle_hooks() -> PaddingHooks:
    hooks = PaddingHooks.__new__(PaddingHooks)
    hooks._alive = False
    return hooks


def token_mask(given: dict[str, Any]) -> torch.Tensor | None:
    """The (B, S) bool mask of this call's tokens, True where real, or None where nothing is masked.

    Args:
        given: the model's arguments by name. Only a 2-D `attention_mask` (B, P) is read, its last S columns; masks of
            other kinds are the attention's own and say nothing about tokens.

    Raises:
        InputError: the mask does not fit the tokens; names both shapes.
    """
    mask_BP = given.get("attention_mask")
    if not isinstance(mask_BP, torch.Tensor) or mask_BP.dim() != 2:
        return None
    tokens = given.get("input_ids")
    if tokens is None:
        tokens = given.get("inputs_embeds")
    if tokens is None:
        return None
    batch, length = tokens.shape[:2]
    if mask_BP.shape[0] != batch or mask_BP.shape[1] < length:
        raise InputError(
            f"attention_mask has shape {tuple(mask_BP.shape)} for tokens of shape {(batch, length)}: needs "
            f"({batch}, {length}), or more columns when earlier tokens are cached"
        )
    mask_BS = mask_BP[:, -length:] if length else mask_BP[:, :0]
    mask_BS = mask_BS.to(device=tokens.device, dtype=torch.bool)
    return None if bool(mask_BS.all()) else mask_BS
