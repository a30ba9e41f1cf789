"""A module that computes some positions only: those whose result anyone will look at.

The loss looks at supervised positions. Attention of the last layer needs all of them, its feed-forward part does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Forward = Callable[..., Any]


class Chosen:
    """Which positions the running forward pass of a layer is about."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        """[N] without repetition, except of one that nobody looks at; None: all."""


def on_chosen(forward: Forward, chosen: Chosen) -> Forward:
    """The same forward pass of a module that treats each position by itself: zeros where a position is not chosen."""

    @functools.wraps(forward)
    def run(hidden: Tensor) -> Any:
        if chosen.rows is None:
            return forward(hidden)
        return _Spread.apply(forward(_Pick.apply(hidden, chosen.rows)), chosen.rows, hidden.shape[-2])

    return run


def choosing(forward: Forward, chosen: Chosen) -> Forward:
    """The same forward pass of the layer around that module, which it tells what the pass was told of its documents.
    Set anew each time: the backward pass may compute the layer again, and generating passes know of no documents."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        chosen.rows = getattr(kwargs.get("documents"), "chosen", None)
        result = forward(*args, **kwargs)
        chosen.rows = None
        return result

    return run


class _Pick(torch.autograd.Function):
    """[..., T, E] → [..., N, E]. torch's own backward pass adds, because positions might repeat: many times slower."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.length = hidden.shape[-2]
        return hidden.index_select(-2, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return _spread(grads[0], rows, ctx.length), None


class _Spread(torch.autograd.Function):
    """[..., N, E] → [..., T, E], zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, picked: Tensor, rows: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(rows)
        return _spread(picked, rows, length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grads[0].index_select(-2, rows), None, None


def _spread(picked: Tensor, rows: Tensor, length: int) -> Tensor:
    whole = picked.new_zeros(*picked.shape[:-2], length, picked.shape[-1])
    return whole.index_copy(-2, rows, picked)
