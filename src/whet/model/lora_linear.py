"""A linear layer and its adapter as one operator: y = x·Wᵀ + bias + (x·(scale·A)ᵀ)·Bᵀ.

The adapter's part is added where the product stands, forward and backward, instead of being a matrix of its own; kept
are the input and x·(scale·A)ᵀ, which is thin. To the compiler it is opaque. It computes in the type of x; gradients of
A and B come in the type of A and B.

Shape letters: T tokens, E width of the input, O of the output, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whet.model.frozen_weight import matrix_from
from whet.model.lora_products import Adapted, precise, rows, scaled


def lora_linear(x: Tensor, layer: Adapted) -> Tensor:
    """The layer's output for x [..., E], which is in the type to compute in."""
    return _forward(x, *layer)[0]  # type: ignore[no-any-return]


@torch.library.custom_op("whet::lora_linear", mutates_args=())
def _forward(
    x: Tensor, frozen: Sequence[Tensor], bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        x_te = rows(x)
        matrix = matrix_from(frozen, len(b), a.shape[1], x.dtype)
        y_to = x_te @ matrix.T if bias is None else torch.addmm(bias.to(x.dtype), x_te, matrix.T)
        thin = x_te @ scaled(a, scale, x.dtype).T
        y_to.addmm_(thin, b.to(x.dtype).T)
        return y_to.view(*x.shape[:-1], len(b)), thin


@_forward.register_fake
def _(
    x: Tensor, frozen: Sequence[Tensor], bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], len(b)), x.new_empty(x.shape[:-1].numel(), len(a))


@torch.library.custom_op("whet::lora_linear_backward", mutates_args=())
def _backward(
    d_y: Tensor, x: Tensor, thin: Tensor, frozen: Sequence[Tensor], a: Tensor, b: Tensor, scale: float, needs_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        x_te, d_to = rows(x), rows(d_y)
        d_thin = d_to @ b.to(x.dtype)
        d_b = precise(d_to.T, thin, b.dtype)
        d_a = precise(d_thin.T, x_te, a.dtype).mul_(scale)
        if not needs_x:
            return x.new_empty(0), d_a, d_b
        d_x = d_to @ matrix_from(frozen, len(b), a.shape[1], x.dtype)
        d_x.addmm_(d_thin, scaled(a, scale, x.dtype))
        return d_x.view(x.shape), d_a, d_b


@_backward.register_fake
def _(
    d_y: Tensor, x: Tensor, thin: Tensor, frozen: Sequence[Tensor], a: Tensor, b: Tensor, scale: float, needs_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape if needs_x else 0), torch.empty_like(a), torch.empty_like(b)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, frozen, _, a, b, ctx.scale = inputs
    ctx.set_materialize_grads(False)  # nothing depends on the thin product but y
    ctx.save_for_backward(x, output[1], a, b, *frozen)


def _gradients(ctx: Any, d_y: Tensor, _: None) -> tuple[Any, ...]:
    x, thin, a, b, *frozen = ctx.saved_tensors
    needs_x = ctx.needs_input_grad[0]
    d_x, d_a, d_b = _backward(d_y, x, thin, frozen, a, b, ctx.scale, needs_x)
    return d_x if needs_x else None, [None] * len(frozen), None, d_a, d_b, None


_forward.register_autograd(_gradients, setup_context=_keep)
