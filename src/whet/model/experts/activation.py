"""What experts compute between up and down: the function of each experts class, and whether the kernels know it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from whet.compat.torch_private import copy_module_without_weights

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
