"""Experts with their adapters as one autograd function, in operators that are opaque to torch.compile.

Saved for the backward pass are x, the order of the rows, and the output of up without its adapter. What can be gathered
or computed again in one pass over memory is not: the rows of x, the activation, the output of down. The router's
weights get their gradient from that of the activation, ⟨d h, h⟩, so the output of down is not needed at all.

Shape letters: T tokens, K experts of a token, S = T · K rows sorted by expert, G experts, E hidden size, U outputs of
gate and up together, F intermediate size, R rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whet.compat.bitsandbytes_private import dequantize_nf4
from whet.core.resources import has_triton
from whet.model.experts import steps as by_torch
from whet.model.experts.steps import SortedRows, grouped_outer, grouped_product, sort_by_expert
from whet.model.experts.steps import activation as activation_of


class ExpertsShape(NamedTuple):
    """Sizes of an experts module; the operators take them as a list."""

    experts: int
    hidden: int
    up: int
    """Outputs of the first layer: gate and up together."""
    intermediate: int
    is_transposed: int
    """1: weights are stored as [G, in, out] instead of [G, out, in]."""


class LoraPair(NamedTuple):
    """An adapter in peft's layout: A [G · R, in], B [out, R · G]."""

    a: Tensor
    b: Tensor
    scale: float


class ExpertsWeights(NamedTuple):
    """The tensors of an experts module with its adapters."""

    shape: ExpertsShape
    up: list[Tensor]
    """[weight], or NF4 values with their scales."""
    down: list[Tensor]
    up_bias: Tensor | None
    down_bias: Tensor | None
    up_lora: LoraPair | None
    down_lora: LoraPair | None
    activation: int


def experts(x: Tensor, index: Tensor, weights: Tensor, w: ExpertsWeights) -> Tensor:
    """Σ_k weights[t, k] · expert index[t, k] (x[t]), for x [T, E]; computed in the dtype of x."""
    assert weights.shape == index.shape, "the router gives one weight for each expert that it chose"
    pairs = [pair for pair in (w.up_lora, w.down_lora) if pair is not None]
    counts = [len(w.up), len(w.down), int(w.up_lora is not None), int(w.down_lora is not None)]
    result: Tensor = _Experts.apply(
        x, index, weights, w.up_bias, w.down_bias, list(w.shape), w.activation, counts, [pair.scale for pair in pairs],
        *w.up, *w.down, *(tensor for pair in pairs for tensor in (pair.a, pair.b)),
    )  # fmt: skip
    return result


class _Experts(torch.autograd.Function):
    """Forward is two operators, of which the backward pass needs the first one's results only: recomputation skips the
    product with down."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, weights: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
        shape: list[int], activation: int, counts: list[int], scales: list[float], *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        up, down, up_lora, down_lora = _split(tensors, counts)
        order, inverse, ends, up0, xa = _up_forward(x, index, up, up_bias, up_lora, scales, shape)
        y: Tensor = _down_forward(
            weights, order, inverse, ends, up0, xa, down, down_bias, up_lora, down_lora, scales, shape, activation
        )
        ctx.save_for_backward(x, weights, down_bias, order, inverse, ends, up0, xa, *tensors)
        ctx.shape, ctx.activation, ctx.counts, ctx.scales = shape, activation, counts, scales
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (up_bias, down_bias)]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, down_bias, order, inverse, ends, up0, xa, *tensors = ctx.saved_tensors
        up, down, up_lora, down_lora = _split(tensors, ctx.counts)
        needs = ctx.needs_input_grad
        first = 9  # index of the first of `tensors` among the inputs
        trained = [needs[first], needs[first + len(up)], needs[3], needs[4]]  # up, down and their biases
        found = _backward(
            grads[0], x, weights, order, inverse, ends, up0, xa, up, down, down_bias, up_lora, down_lora, ctx.scales,
            ctx.shape, ctx.activation, needs[0], trained,
        )  # fmt: skip
        d_x, d_weights, d_up, d_down, d_up_bias, d_down_bias, *d_lora = found
        return (
            d_x if needs[0] else None, None, d_weights if needs[2] else None,
            d_up_bias.to(ctx.bias_dtypes[0]) if needs[3] else None,
            d_down_bias.to(ctx.bias_dtypes[1]) if needs[4] else None, None, None, None, None,
            d_up.to(up[0].dtype) if trained[0] else None, *[None] * (len(up) - 1),
            d_down.to(down[0].dtype) if trained[1] else None, *[None] * (len(down) - 1), *d_lora,
        )  # fmt: skip


@torch.library.custom_op(
    "whet::experts_up",
    mutates_args=(),
    schema="(Tensor x, Tensor index, Tensor[] up, Tensor? bias, Tensor[] lora, float[] scales, int[] shape) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _up_forward(
    x: Tensor, index: Tensor, up: Sequence[Tensor], bias: Tensor | None, lora: Sequence[Tensor],
    scales: Sequence[float], shape: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sorted rows, up0 [S, U] without its adapter, and xa [S, R]."""
    sizes, steps = ExpertsShape(*shape), _steps(x, shape, lora)
    with torch.autocast(x.device.type, enabled=False):
        rows = sort_by_expert(index, sizes.experts)
        a = steps.cast_a(lora[0], scales[0], sizes.experts, x.dtype) if lora else None
        x_s, xa = steps.gather_rows(x, rows, index.shape[1], a)
        up0 = grouped_product(x_s, _matrix(up, sizes.hidden, sizes.up, sizes, x.dtype), rows.ends)
        _add_bias_(up0, bias, rows)
        return *rows, up0, x.new_empty(len(x_s), 0) if xa is None else xa


@_up_forward.register_fake
def _(
    x: Tensor, index: Tensor, up: Sequence[Tensor], bias: Tensor | None, lora: Sequence[Tensor],
    scales: Sequence[float], shape: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sizes, count = ExpertsShape(*shape), index.numel()
    rank = len(lora[0]) // sizes.experts if lora else 0
    order, inverse, ends = (index.new_empty(size, dtype=torch.int32) for size in (count, count, sizes.experts))
    return order, inverse, ends, x.new_empty(count, sizes.up), x.new_empty(count, rank)


@torch.library.custom_op(
    "whet::experts_down",
    mutates_args=(),
    schema="(Tensor weights, Tensor order, Tensor inverse, Tensor ends, Tensor up0, Tensor xa, Tensor[] down, "
    "Tensor? bias, Tensor[] up_lora, Tensor[] down_lora, float[] scales, int[] shape, int activation) -> Tensor",
)
def _down_forward(
    weights: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, up0: Tensor, xa: Tensor, down: Sequence[Tensor],
    bias: Tensor | None, up_lora: Sequence[Tensor], down_lora: Sequence[Tensor], scales: Sequence[float],
    shape: Sequence[int], activation: int,
) -> Tensor:  # fmt: skip
    """The output [T, E]."""
    sizes, rows, dtype = ExpertsShape(*shape), SortedRows(order, inverse, ends), up0.dtype
    steps = _steps(up0, shape, up_lora, down_lora)
    with torch.autocast(up0.device.type, enabled=False):
        up_b = steps.cast_b(up_lora[1], sizes.experts, dtype) if up_lora else None
        down_a, down_b = _cast_adapter(down_lora, scales[-1:], sizes, dtype, steps)
        h, ha = steps.activate(up0, xa, up_b, down_a, rows, activation_of(activation))
        y = grouped_product(h, _matrix(down, sizes.intermediate, sizes.hidden, sizes, dtype), rows.ends)
        _add_bias_(y, bias, rows)
        steps.add_low_rank_(y, ha, down_b, rows)
        return steps.sum_over_choices(y, weights, rows, weights.shape[1])


@_down_forward.register_fake
def _(
    weights: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, up0: Tensor, xa: Tensor, down: Sequence[Tensor],
    bias: Tensor | None, up_lora: Sequence[Tensor], down_lora: Sequence[Tensor], scales: Sequence[float],
    shape: Sequence[int], activation: int,
) -> Tensor:  # fmt: skip
    return up0.new_empty(len(weights), ExpertsShape(*shape).hidden)


@torch.library.custom_op(
    "whet::experts_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor x, Tensor weights, Tensor order, Tensor inverse, Tensor ends, Tensor up0, Tensor xa, "
    "Tensor[] up, Tensor[] down, Tensor? down_bias, Tensor[] up_lora, Tensor[] down_lora, float[] scales, int[] shape, "
    "int activation, bool needs_x, bool[] trained) -> Tensor[]",
)
def _backward(
    d_out: Tensor, x: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, up0: Tensor, xa: Tensor,
    up: Sequence[Tensor], down: Sequence[Tensor], down_bias: Tensor | None, up_lora: Sequence[Tensor],
    down_lora: Sequence[Tensor], scales: Sequence[float], shape: Sequence[int], activation: int, needs_x: bool,
    trained: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, of the router's weights, of up, down and their biases (empty if not needed), of the adapters."""
    sizes, rows, dtype = ExpertsShape(*shape), SortedRows(order, inverse, ends), x.dtype
    choices, steps = weights.shape[1], _steps(x, shape, up_lora, down_lora)
    with torch.autocast(x.device.type, enabled=False):
        up_a, up_b = _cast_adapter(up_lora, scales[:1], sizes, dtype, steps)
        down_a, down_b = _cast_adapter(down_lora, scales[-1:], sizes, dtype, steps)
        weight = weights.reshape(-1)[order].to(torch.promote_types(dtype, torch.float32))
        # of down's input, before it is multiplied by the router's weight
        d_s, d_ha = steps.gather_rows(d_out, rows, choices, down_b)
        d_h = grouped_product(
            d_s, _matrix(down, sizes.intermediate, sizes.hidden, sizes, dtype).transpose(1, 2), rows.ends
        )
        found = steps.activate_backward(d_h, d_ha, weight, up0, xa, up_b, down_a, rows, activation_of(activation))
        del d_h
        d_weight = found.d_weight
        if down_bias is not None:
            d_weight = d_weight + (d_s * down_bias.to(d_weight.dtype)[_experts_of_rows(rows)]).sum(dim=1)
        d_weights = d_weight[rows.inverse]
        d_x, d_up, d_down, d_up_bias, d_down_bias = (x.new_empty(0) for _ in range(5))
        if trained[1] or trained[3]:
            d_y = (d_s * weight[:, None]).to(dtype)
            d_down = _outer(found.h, d_y, rows, sizes) if trained[1] else d_down
            d_down_bias = _sum_of_rows(d_y, rows) if trained[3] else d_down_bias
        del d_s
        if trained[0]:
            d_up = _outer(steps.gather_rows(x, rows, choices, None)[0], found.d_up, rows, sizes)
        if trained[2]:
            d_up_bias = _sum_of_rows(found.d_up, rows)
        if needs_x:
            d_x_s = grouped_product(
                found.d_up, _matrix(up, sizes.hidden, sizes.up, sizes, dtype).transpose(1, 2), rows.ends
            )
            steps.add_low_rank_(d_x_s, found.d_xa, up_a, rows)
            d_x = steps.sum_over_choices(d_x_s, None, rows, choices)
            del d_x_s
        d_lora: list[Tensor] = []
        if found.d_xa is not None:
            d_a = steps.low_rank_outer(found.d_xa, x, rows, choices, scales[0])
            d_b = steps.low_rank_outer(xa, found.d_up, rows, None, is_b=True)
            d_lora += _lora_gradients(d_a, d_b, up_lora)
        if found.ha is not None and found.d_ha is not None:
            d_a = steps.low_rank_outer(found.d_ha, found.h, rows, None, scales[-1])
            d_b = steps.low_rank_outer(found.ha, d_out, rows, choices, is_b=True)
            d_lora += _lora_gradients(d_a, d_b, down_lora)
        return [d_x, d_weights.to(weights.dtype).view_as(weights), d_up, d_down, d_up_bias, d_down_bias, *d_lora]


@_backward.register_fake
def _(
    d_out: Tensor, x: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, up0: Tensor, xa: Tensor,
    up: Sequence[Tensor], down: Sequence[Tensor], down_bias: Tensor | None, up_lora: Sequence[Tensor],
    down_lora: Sequence[Tensor], scales: Sequence[float], shape: Sequence[int], activation: int, needs_x: bool,
    trained: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    sizes = ExpertsShape(*shape)
    biases = [x.new_empty(sizes.experts, size) for size in (sizes.up, sizes.hidden)]
    made = [x.new_empty(up[0].shape), x.new_empty(down[0].shape), *biases]
    needed = [each if needs else x.new_empty(0) for each, needs in zip(made, trained, strict=True)]
    lora = [torch.empty_like(tensor) for tensor in (*up_lora, *down_lora)]
    return [torch.empty_like(x) if needs_x else x.new_empty(0), torch.empty_like(weights), *needed, *lora]


def _steps(x: Tensor, shape: Sequence[int], *lora: Sequence[Tensor]) -> Any:
    """Kernels for 16-bit inputs on CUDA, torch otherwise."""
    kernels = _kernels() if x.is_cuda and x.dtype.itemsize == 2 else None
    if kernels is None or any(pair and len(pair[0]) > kernels.MAX_RANK * shape[0] for pair in lora):
        return by_torch
    return kernels


@functools.cache
def _kernels() -> Any:
    if not has_triton():
        return None
    from whet.model.experts import kernels

    return kernels


def _split(tensors: Sequence[Tensor], counts: Sequence[int]) -> tuple[list[Tensor], ...]:
    """The tensors of up, of down, and of the adapters of each."""
    parts, start = [], 0
    for size in (counts[0], counts[1], 2 * counts[2], 2 * counts[3]):
        parts.append(list(tensors[start : start + size]))
        start += size
    return tuple(parts)


def _cast_adapter(
    lora: Sequence[Tensor], scale: Sequence[float], shape: ExpertsShape, dtype: torch.dtype, steps: Any
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """A, scaled, and B as `steps` take them, from peft's layout."""
    if not lora:
        return None, None
    return steps.cast_a(lora[0], scale[0], shape.experts, dtype), steps.cast_b(lora[1], shape.experts, dtype)


def _lora_gradients(d_a: Tensor, d_b: Tensor, lora: Sequence[Tensor]) -> list[Tensor]:
    """In peft's layout."""
    return [d_a.flatten(0, 1).to(lora[0].dtype), d_b.permute(2, 1, 0).flatten(1).to(lora[1].dtype)]


def _matrix(parts: Sequence[Tensor], inputs: int, outputs: int, shape: ExpertsShape, dtype: torch.dtype) -> Tensor:
    """A weight as [G, in, out] in `dtype`; a 4-bit one is dequantized here, in each pass again."""
    stored = (shape.experts, inputs, outputs) if shape.is_transposed else (shape.experts, outputs, inputs)
    weight = parts[0].to(dtype) if len(parts) == 1 else dequantize_nf4(parts, stored, dtype)
    return weight if shape.is_transposed else weight.transpose(1, 2)


def _outer(inputs: Tensor, d_outputs: Tensor, rows: SortedRows, shape: ExpertsShape) -> Tensor:
    """The gradient of a weight, as it is stored."""
    return (
        grouped_outer(inputs, d_outputs, rows.ends)
        if shape.is_transposed
        else grouped_outer(d_outputs, inputs, rows.ends)
    )


def _sum_of_rows(y: Tensor, rows: SortedRows) -> Tensor:
    """The sum of each expert's rows [G, O]; deterministic, as index_add_ on CUDA is not."""
    return grouped_outer(y.new_ones(len(y), 8), y, rows.ends)[:, 0].contiguous()


def _experts_of_rows(rows: SortedRows) -> Tensor:
    """[S]"""
    each = torch.arange(len(rows.order), device=rows.ends.device, dtype=rows.ends.dtype)
    return torch.searchsorted(rows.ends, each, right=True)


def _add_bias_(y: Tensor, bias: Tensor | None, rows: SortedRows) -> None:
    if bias is not None:
        y += bias.to(y.dtype)[_experts_of_rows(rows)]
