"""The computation of experts in plain torch, as the definition of kernels.py: grouped products, and what is between.

    x_s = x[token],  xa = x_s · aᵀ                    gather_rows
    h = act(up0 + xa · b),  ha = h · aᵀ               activate
    y += ha · b                                       add_low_rank_
    out = Σ weight · y                                sum_over_choices

and their gradients. `a` and `b` are the adapter of a layer, [G, R, I] and [G, R, O], or None; its scale is in `a`.
`kernels.py` computes the same in fewer passes over memory.

Shape letters: T tokens, K experts of a token, S sorted rows, G experts (groups), I and O features, R rank, U outputs of
gate and up together, F intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from whet.compat.torch_private import autograd_inside_operator, copy_module_without_weights, grouped_mm
from whet.model.modules import KeepFloat64

# The activation between up and down: the function of each experts class, and whether the kernels support it.

_PROBE = 64


class GatedSilu(NamedTuple):
    """h = g · sigmoid(slope · g) · (u + shift), where g = min(gate, limit) and u = up between ±limit.

    Gate and up are the halves of a row, or alternate in it. Plain SwiGLU has slope 1, shift 0 and no limit."""

    interleaved: bool
    slope: float
    limit: float
    shift: float

    def __call__(self, row: Tensor) -> Tensor:
        gate, up = (row[..., ::2], row[..., 1::2]) if self.interleaved else row.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.slope * gate) * (up + self.shift)


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation of an experts module."""

    function: Callable[[Tensor], Tensor]
    """[S, U] → [S, F]"""
    gated_silu: GatedSilu | None
    """The same as numbers, which is what kernels take; None for other functions."""

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.dtype != torch.float64:
            return self.function(rows)
        with KeepFloat64():  # that of the whole pass does not reach into an operator
            return self.function(rows)


# An operator takes no Python function, so it gets the activation's number. Layers whose modules have the same class and
# the same plain attributes share one: torch.compile would compile each number separately. What is registered stays for
# the process, so it holds no weights.

_WITHOUT_EFFECT = ("training", "layer_idx", "whet_activation")
_ACTIVATIONS: list[Activation] = []
_NUMBERS: dict[Any, int] = {}


def register_activation(module: Any) -> int:
    """The number of a module's activation."""
    plain = tuple(
        sorted(
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and name not in _WITHOUT_EFFECT
        )
    )
    act_fn = getattr(module, "act_fn", None)
    act = type(act_fn) if isinstance(act_fn, nn.Module) else act_fn
    key = type(module), act, plain
    if key not in _NUMBERS:
        bare = copy_module_without_weights(module)
        function = bare._apply_gate if module.has_gate else module.act_fn
        _NUMBERS[key] = len(_ACTIVATIONS)
        _ACTIVATIONS.append(Activation(function, _as_gated_silu(function, module)))
    return _NUMBERS[key]


def activation(number: int) -> Activation:
    return _ACTIVATIONS[number]


def _as_gated_silu(function: Callable[[Tensor], Tensor], module: Any) -> GatedSilu | None:
    """By comparison, over a range that reaches the limits of those that have one."""
    if not module.has_gate:
        return None
    limit = getattr(module, "limit", getattr(module, "swiglu_limit", None))
    alpha = getattr(module, "alpha", None)
    candidates = [GatedSilu(False, 1.0, math.inf, 0.0)]
    if isinstance(limit, float | int):
        candidates += [
            GatedSilu(interleaved, float(slope), float(limit), shift)
            for interleaved in (False, True)
            for slope, shift in ((1.0, 0.0), (alpha if isinstance(alpha, float | int) else 1.0, 1.0))
        ]
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(_PROBE, 2 * _PROBE, generator=draw) * torch.logspace(-1, 2, _PROBE)[:, None]
    with torch.no_grad(), torch.random.fork_rng([]):
        found = function(rows)
        for candidate in candidates:
            own = candidate(rows)
            if own.shape == found.shape and torch.allclose(own, found, rtol=1e-4, atol=1e-5):
                return candidate
    return None


# Sorting of tokens by expert, and matrix products of each expert's rows with its own matrix.
#
# Every token goes to K experts, so there are S = T · K rows. Sorted by expert, the rows of each are contiguous, and one
# grouped product multiplies all of them. The definition is a loop over the experts; on CUDA bf16 products are torch's
# grouped matrix products, which do not read the numbers of rows on the host.


class SortedRows(NamedTuple):
    """The rows of a batch in the order of their experts; rows of an expert are in the order of tokens."""

    order: Tensor
    """[S] int32: which of the T · K choices, token by token, each sorted row is."""
    inverse: Tensor
    """[S] int32: the sorted row of each choice."""
    ends: Tensor
    """[G] int32: where the rows of each expert end."""


def sort_by_expert(index: Tensor, experts: int) -> SortedRows:
    """`index` [T, K] holds the experts of each token. Does not synchronise with the device."""
    flat = index.reshape(-1).to(torch.int16)  # a radix sort takes a pass for each byte
    by_expert, order = torch.sort(flat, stable=True)
    inverse = torch.empty_like(order, dtype=torch.int32)
    inverse[order] = torch.arange(len(flat), device=flat.device, dtype=torch.int32)
    each = torch.arange(experts, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(by_expert, each, right=True, out_int32=True)
    return SortedRows(order.int(), inverse, ends)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [S, I] · weight [G, I, O], each row with the matrix of its expert → [S, O]."""
    if _has_grouped_kernel(x):
        return grouped_mm(x, weight, ends)
    y = x.new_empty(len(x), weight.shape[2])
    for expert, rows in _rows_of_experts(ends):
        torch.mm(x[rows], weight[expert], out=y[rows])
    return y


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The sum over each expert's rows of left [S, I] ⊗ right [S, O] → [G, I, O], zero for an expert without rows."""
    if _has_grouped_kernel(left):
        return grouped_mm(left.T, right, ends)
    y = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for expert, rows in _rows_of_experts(ends):
        torch.mm(left[rows].T, right[rows], out=y[expert])
    return y


def _has_grouped_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _rows_of_experts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have rows. Waits for the device."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def gather_rows(x: Tensor, rows: SortedRows, choices: int, right: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows of x [T, I] that the experts take, [S, I], and their product with right [G, R, I], transposed: [S, R]"""
    x_s = x[rows.order // choices]
    return x_s, None if right is None else grouped_product(x_s, right.transpose(1, 2), rows.ends)


def activate(
    up0: Tensor, xa: Tensor | None, up_b: Tensor | None, down_a: Tensor | None, rows: SortedRows, activation: Activation
) -> tuple[Tensor, Tensor | None]:
    """h [S, F] from up0 [S, U], which is without its adapter, and its product with the A of the next layer."""
    h = activation(_with_adapter(up0, xa, up_b, rows)).to(up0.dtype)
    return h, None if down_a is None else grouped_product(h, down_a.transpose(1, 2), rows.ends)


class ActivationGradients(NamedTuple):
    """Results of `activate_backward`."""

    d_up: Tensor
    """[S, U]"""
    d_xa: Tensor | None
    """[S, R] d_up · bᵀ"""
    h: Tensor
    """[S, F]"""
    ha: Tensor | None
    """[S, R] h · aᵀ of the next layer, times the router's weight."""
    d_ha: Tensor | None
    """[S, R] of `ha` before that product, times the router's weight."""
    d_weight: Tensor
    """[S] of the router's weights, without a bias of the next layer; in at least fp32."""


def activate_backward(
    d_h: Tensor, d_ha: Tensor | None, weight: Tensor, up0: Tensor, xa: Tensor | None, up_b: Tensor | None,
    down_a: Tensor | None, rows: SortedRows, activation: Activation,
) -> ActivationGradients:  # fmt: skip
    """From the gradients of h [S, F] and ha [S, R], both before they are multiplied by the router's weight [S]."""
    dtype, exact = up0.dtype, torch.promote_types(up0.dtype, torch.float32)
    d_h = d_h.to(exact)
    if down_a is not None and d_ha is not None:
        d_h = d_h + grouped_product(d_ha, down_a, rows.ends)
    with autograd_inside_operator():
        before = _with_adapter(up0, xa, up_b, rows).detach().requires_grad_()
        h = activation(before)
        (d_up,) = torch.autograd.grad(h, before, (d_h * weight[:, None]).to(h.dtype))
    h, d_up, weight = h.detach().to(dtype), d_up.to(dtype), weight[:, None]
    return ActivationGradients(
        d_up,
        None if up_b is None else grouped_product(d_up, up_b.transpose(1, 2), rows.ends),
        h,
        None if down_a is None else (grouped_product(h, down_a.transpose(1, 2), rows.ends) * weight).to(dtype),
        None if d_ha is None else (d_ha * weight).to(dtype),
        (d_h * h).sum(dim=1),
    )


def add_low_rank_(y: Tensor, xa: Tensor | None, b: Tensor | None, rows: SortedRows) -> Tensor:
    """y [S, O] += xa [S, R] · b [G, R, O]"""
    return y if xa is None or b is None else y.add_(grouped_product(xa, b, rows.ends))


def sum_over_choices(y: Tensor, weights: Tensor | None, rows: SortedRows, choices: int) -> Tensor:
    """For each token the sum of its rows of y [S, O], by weights [T, K] if given → [T, O]. In at least fp32."""
    by_token = y[rows.inverse].unflatten(0, (-1, choices)).to(torch.promote_types(y.dtype, torch.float32))
    return (by_token if weights is None else by_token * weights.unsqueeze(-1)).sum(dim=1).to(y.dtype)


def low_rank_outer(
    left: Tensor, right: Tensor, rows: SortedRows, choices: int | None, factor: float = 1.0, is_b: bool = False
) -> Tensor:
    """factor · the sum over each expert's rows of left [S, R] ⊗ right → [G, R, I] in at least fp32. right is [S, I], or
    with `choices` [T, I]: rows of tokens, which are gathered. `is_b`: the result may be stored as peft stores B."""
    exact = torch.promote_types(left.dtype, torch.float32)
    taken = right if choices is None else right[rows.order // choices]
    return grouped_outer(left.to(exact), taken.to(exact), rows.ends) * factor


def cast_a(a: Tensor, scale: float, experts: int, dtype: torch.dtype) -> Tensor:
    """scale · A in peft's layout [G · R, I] as [G, R, I] in `dtype`, rounded once."""
    scaled = a.new_empty(a.shape, dtype=dtype)
    torch.mul(a, scale, out=scaled)
    return scaled.unflatten(0, (experts, -1))


def cast_b(b: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """B in peft's layout [O, R · G] as [G, R, O] in `dtype`."""
    return b.unflatten(1, (-1, experts)).permute(2, 1, 0).to(dtype).contiguous()


def _with_adapter(up0: Tensor, xa: Tensor | None, b: Tensor | None, rows: SortedRows) -> Tensor:
    exact = up0.to(torch.promote_types(up0.dtype, torch.float32))
    return exact if b is None or xa is None else exact + grouped_product(xa, b, rows.ends)
