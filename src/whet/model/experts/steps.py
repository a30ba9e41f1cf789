"""What experts compute between their large products: the definition in plain torch.

    x_s = x[token],  xa = x_s · aᵀ                    gather_rows
    h = act(up0 + xa · b),  ha = h · aᵀ               activate
    y += ha · b                                       add_low_rank_
    out = Σ weight · y                                sum_over_choices

and their gradients. `a` and `b` are the adapter of a layer, [G, R, I] and [G, R, O], or None; its scale is in `a`.
`kernels.py` computes the same in fewer passes over memory.

Shape letters as in `products.py`; U outputs of gate and up together, F intermediate size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from whet.compat.torch_private import autograd_inside_operator
from whet.model.experts.activation import Activation
from whet.model.experts.products import SortedRows, grouped_outer, grouped_product


def gather_rows(x: Tensor, rows: SortedRows, choices: int, right: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows of x [T, I] that the experts take, [S, I], and their product with right [G, R, I], transposed: [S, R]"""
    x_s = x[rows.order // choices]
    return x_s, None if right is None else grouped_product(x_s, right.transpose(1, 2), rows.ends)


def activate(
    up0: Tensor, xa: Tensor | None, up_b: Tensor | None, down_a: Tensor | None, rows: SortedRows, activation: Activation
) -> tuple[Tensor, Tensor | None]:
    """h [S, F] from up0 [S, U], which is without its adapter, and its product with the A of the next layer."""
    h = activation.function(_with_adapter(up0, xa, up_b, rows)).to(up0.dtype)
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
        h = activation.function(before)
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
