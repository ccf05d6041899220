"""Marking padding where the host model passes no mask to its experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from lrmoe.errors import InputError

_MASK: ContextVar[Tensor | None] = ContextVar("lrmoe_padding", default=None)


@contextmanager
def padding(mask: Tensor | None) -> Iterator[None]:
    """Within this context padded positions carry no load, no gradient, and MoE layers return 0 for them.

    Args:
        mask: bool or integer, (batch, sequence) or (T,), nonzero where the token is real; None marks nothing.

    Raises:
        InputError: a mask of another rank or a floating-point dtype.
    """
    _check_tensor(mask)
    if mask is not None and (mask.ndim not in (1, 2) or mask.is_floating_point()):
        raise InputError(
            f"padding mask has shape {tuple(mask.shape)} and dtype {mask.dtype}: "
            "must be bool or integer, (batch, sequence) or (tokens,)"
        )
    token = _MASK.set(mask)
    try:
        yield
    finally:
        _MASK.reset(token)


def current_mask(tokens: int) -> Tensor | None:
    """The active mask as bool (T,), or None.

    Raises:
        InputError: the mask does not cover `tokens` tokens.
    """
    mask = _MASK.get()
    return None if mask is None else check_mask(mask, tokens)


def check_mask(mask: Tensor, tokens: int) -> Tensor:
    """The mask as bool (T,); InputError where it does not cover `tokens` tokens."""
    _check_tensor(mask)
    if mask.is_floating_point() or mask.is_complex():
        raise InputError(
            f"padding mask has dtype {mask.dtype}: must be bool or integer, nonzero where a token is real"
        )
    if mask.numel() != tokens:
        raise InputError(
            f"padding mask of shape {tuple(mask.shape)} covers {mask.numel()} tokens: must cover the layer's {tokens}"
        )
    return mask.reshape(-1) != 0


def _check_tensor(mask: object) -> None:
    if mask is not None and not isinstance(mask, Tensor):
        raise InputError(
            f"padding mask is a {type(mask).__name__}: must be a bool or integer tensor, or None"
        )
