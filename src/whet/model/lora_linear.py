"""Linear layers with the same input and their adapters as one operator: y = x·Wᵀ + bias + (x·(scale·A)ᵀ)·Bᵀ of each.

Adapters give what the products are added to, forward and backward, which then cost no further pass over memory,
and x meets the A of all layers at once. Kept are x and its thin products. To the compiler it is opaque. It computes in
the type of x; gradients of A and B come in the type of A and B.

Shape letters: T tokens, E width of the input, O of an output, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whet.model.frozen_weight import matrix_from
from whet.model.lora_products import Adapted, narrowed, precise, rows


def lora_linear(x: Tensor, *layers: Adapted) -> list[Tensor]:
    """The outputs for x [..., E], which is in the type to compute in. Either all layers have a bias or none has."""
    outputs: list[Tensor] = _forward(
        x,
        [part for layer in layers for part in layer.frozen],
        [layer.bias for layer in layers if layer.bias is not None],
        [matrix for layer in layers for matrix in (layer.a, layer.b)],
        [layer.scale for layer in layers],
    )
    return outputs[: len(layers)]


@torch.library.custom_op(
    "whet::lora_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor[] frozen, Tensor[] biases, Tensor[] adapters, float[] scales) -> Tensor[]",
)
def _forward(
    x: Tensor, frozen: Sequence[Tensor], biases: Sequence[Tensor], adapters: Sequence[Tensor], scales: Sequence[float]
) -> list[Tensor]:
    """The outputs, and x·[scaled A of each]ᵀ."""
    with torch.autocast(x.device.type, enabled=False):
        x_te = rows(x)
        scaled = list(zip(adapters[::2], scales, strict=True))
        a_all, *bs = narrowed([scaled, *([(b, 1.0)] for b in adapters[1::2])], x.dtype)
        thin = x_te @ a_all.T
        outputs = []
        for number, (b, part) in enumerate(zip(bs, _split(thin, adapters), strict=True)):
            y_to = torch.addmm(biases[number].to(x.dtype), part, b.T) if biases else part @ b.T
            matrix = _matrix(number, frozen, adapters, x.dtype)
            outputs.append(y_to.addmm_(x_te, matrix.T).view(*x.shape[:-1], len(b)))
            del matrix  # of a 4-bit layer: or the next would be made beside it
        return [*outputs, thin]


@_forward.register_fake
def _(
    x: Tensor, frozen: Sequence[Tensor], biases: Sequence[Tensor], adapters: Sequence[Tensor], scales: Sequence[float]
) -> list[Tensor]:
    outputs = [x.new_empty(*x.shape[:-1], len(b)) for b in adapters[1::2]]
    return [*outputs, x.new_empty(x.shape[:-1].numel(), sum(len(a) for a in adapters[::2]))]


@torch.library.custom_op(
    "whet::lora_linear_backward",
    mutates_args=(),
    schema="(Tensor[] d_outputs, Tensor x, Tensor thin, Tensor[] frozen, Tensor[] adapters, float[] scales, "
    "bool needs_x) -> Tensor[]",
)
def _backward(
    d_outputs: Sequence[Tensor], x: Tensor, thin: Tensor, frozen: Sequence[Tensor], adapters: Sequence[Tensor],
    scales: Sequence[float], needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x (empty if it needs none) and of the adapters."""
    with torch.autocast(x.device.type, enabled=False):
        outer, dtype = [rows(d_y) for d_y in d_outputs], adapters[0].dtype
        # the scale is B's here: then what flows back into A need not be scaled
        scaled = [[pair] for pair in zip(adapters[1::2], scales, strict=True)]
        a_all, *bs = narrowed([[(a, 1.0) for a in adapters[::2]], *scaled], x.dtype)
        d_thins = [d_y @ b for d_y, b in zip(outer, bs, strict=True)]
        d_thin = d_thins[0] if len(outer) == 1 else torch.cat(d_thins, dim=1)
        d_bs = [precise(d_y.T, part, dtype) for d_y, part in zip(outer, _split(thin, adapters), strict=True)]
        sums = precise(d_thin.T, rows(x), dtype).split([len(a) for a in adapters[::2]])
        # an operator's results have no memory in common
        d_as = list(sums) if len(outer) == 1 else [part.clone() for part in sums]
        d_x = x.new_empty(0)
        if needs_x:
            d_x = d_thin @ a_all
            for number, d_y in enumerate(outer):
                matrix = _matrix(number, frozen, adapters, x.dtype)
                d_x.addmm_(d_y, matrix)
                del matrix
            d_x = d_x.view(x.shape)
        return [d_x, *(found for pair in zip(d_as, d_bs, strict=True) for found in pair)]


@_backward.register_fake
def _(
    d_outputs: Sequence[Tensor], x: Tensor, thin: Tensor, frozen: Sequence[Tensor], adapters: Sequence[Tensor],
    scales: Sequence[float], needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape if needs_x else 0), *(torch.empty_like(adapter) for adapter in adapters)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, frozen, biases, adapters, ctx.scales = inputs
    ctx.set_materialize_grads(False)  # nothing depends on the thin products but the outputs
    ctx.sizes = len(biases), len(adapters)
    ctx.save_for_backward(x, output[-1], *adapters, *frozen)


def _gradients(ctx: Any, d_outputs: list[Tensor | None]) -> tuple[Any, ...]:
    biases, count = ctx.sizes
    x, thin, *others = ctx.saved_tensors
    adapters, frozen = others[:count], others[count:]
    outer = [
        x.new_zeros(*x.shape[:-1], len(b)) if d_y is None else d_y
        for d_y, b in zip(d_outputs[:-1], adapters[1::2], strict=True)
    ]
    needs_x = ctx.needs_input_grad[0]
    d_x, *found = _backward(outer, x, thin, frozen, adapters, ctx.scales, needs_x)
    return d_x if needs_x else None, [None] * len(frozen), [None] * biases, found, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _matrix(number: int, frozen: Sequence[Tensor], adapters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """W [O, E] of a layer; it is as high and wide as its adapter says."""
    size = 2 * len(frozen) // len(adapters)
    a, b = adapters[2 * number : 2 * number + 2]
    return matrix_from(frozen[number * size : (number + 1) * size], len(b), a.shape[1], dtype)


def _split(thin: Tensor, adapters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The thin product of each layer."""
    return thin.split([len(a) for a in adapters[::2]], dim=1)
