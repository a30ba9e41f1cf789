"""Which modules are gated MLPs, y = down(silu(gate(x)) · up(x)), by what they compute, not by what they are called."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS = ("gate_proj", "up_proj", "down_proj")
_LOUD = 1000
"""So many times as large, inputs reach limits that some MLPs set to gate and up."""
_TOKENS, _WIDTH, _MIDDLE = 3, 8, 12
_INTO, _OUT = (_WIDTH, _MIDDLE), (_MIDDLE, _WIDTH)


def is_gated_mlp(module: nn.Module) -> bool:
    """Tried out on small layers in the place of its own, so that its weights need not be there, or not here.

    In training, so that a dropout shows.
    """
    if {name for name, _ in module.named_children()} != {*LAYERS, "act_fn"}:
        return False
    grid, draw = torch.linspace(-6, 6, 97), torch.Generator().manual_seed(0)  # and nobody else's random numbers
    small: Any = copy.copy(module)
    small.__dict__["_modules"] = {"act_fn": module.act_fn}
    small.__dict__.pop("forward", None)  # what others have wrapped around it
    small.training = True
    for name, (inside, outside) in zip(LAYERS, (_INTO, _INTO, _OUT), strict=True):
        layer = nn.Linear(inside, outside, device="meta").to_empty(device="cpu")
        for weight in layer.parameters():
            nn.init.normal_(weight, std=inside**-0.5, generator=draw)
        setattr(small, name, layer)
    x = torch.randn(1, _TOKENS, _WIDTH, generator=draw)
    # a dropout that is not one of layers would draw all the same
    with torch.random.fork_rng([]), torch.no_grad():
        try:
            if not torch.allclose(small.act_fn(grid), F.silu(grid), rtol=1e-5, atol=1e-6):
                return False
            return all(_is_gated_for(small, x * volume) for volume in (1, _LOUD))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False  # it takes something of its layers that small ones have not


def _is_gated_for(small: Any, x: Tensor) -> bool:
    found = small.forward(x)  # without hooks
    own = small.down_proj(F.silu(small.gate_proj(x)) * small.up_proj(x))
    return isinstance(found, Tensor) and found.shape == own.shape and torch.allclose(found, own, rtol=1e-4, atol=1e-5)
