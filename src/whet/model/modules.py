"""Small tools for modules: eval mode as a context, mixin classes, gated-MLP detection, and fp64 that stays fp64."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whet.compat.torch_private import copy_module_without_children, set_module_class

# Looking at a model without changing it.


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout for a while; every module is left in the mode it was found in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


# Giving a module another forward pass: it stays the same object, so names, weights, hooks and places hold on.


def add_mixin(module: nn.Module, other: Any) -> None:
    """Let `module` be an `other` too, a class whose methods come first and whose `super()` is what the module was."""
    own: Any = type(module)
    set_module_class(module, _mixed_class(own, other))


@functools.cache
def _mixed_class(own: Any, other: Any) -> Any:
    """One class for all modules of a kind: the compiler compiles for a class, not for a module."""
    return type(own.__name__, (other, own), {"__module__": own.__module__})


# Which modules are gated MLPs, y = down(silu(gate(x)) · up(x)), by what they compute, not by what they are called.

GATED_MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
_LARGE_INPUT_SCALE = 1000
"""So many times as large, inputs reach limits that some MLPs set to gate and up."""
_PROBE_TOKENS, _PROBE_HIDDEN, _PROBE_INTERMEDIATE = 3, 8, 12
_PROBE_IN_SHAPE, _PROBE_OUT_SHAPE = (_PROBE_HIDDEN, _PROBE_INTERMEDIATE), (_PROBE_INTERMEDIATE, _PROBE_HIDDEN)


def is_gated_mlp(module: nn.Module) -> bool:
    """Tried out on small layers in the place of its own, so that its weights need not be there, or not here.

    In training, so that a dropout shows.
    """
    if {name for name, _ in module.named_children()} != {*GATED_MLP_LAYERS, "act_fn"}:
        return False
    grid, draw = torch.linspace(-6, 6, 97), torch.Generator().manual_seed(0)  # and nobody else's random numbers
    small = copy_module_without_children(module, {"act_fn": module.act_fn})
    small.training = True
    for name, (inside, outside) in zip(
        GATED_MLP_LAYERS, (_PROBE_IN_SHAPE, _PROBE_IN_SHAPE, _PROBE_OUT_SHAPE), strict=True
    ):
        layer = nn.Linear(inside, outside, device="meta").to_empty(device="cpu")
        for weight in layer.parameters():
            nn.init.normal_(weight, std=inside**-0.5, generator=draw)
        setattr(small, name, layer)
    x = torch.randn(1, _PROBE_TOKENS, _PROBE_HIDDEN, generator=draw)
    # a dropout that is not one of layers would draw all the same
    with torch.random.fork_rng([]), torch.no_grad():
        try:
            if not torch.allclose(small.act_fn(grid), F.silu(grid), rtol=1e-5, atol=1e-6):
                return False
            return all(_computes_gated_mlp(small, x * volume) for volume in (1, _LARGE_INPUT_SCALE))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False  # it takes something of its layers that small ones have not


def _computes_gated_mlp(small: Any, x: Tensor) -> bool:
    found = small.forward(x)  # without hooks
    own = small.down_proj(F.silu(small.gate_proj(x)) * small.up_proj(x))
    return isinstance(found, Tensor) and found.shape == own.shape and torch.allclose(found, own, rtol=1e-4, atol=1e-5)


# Arithmetic in honest double precision, for proofs.
#
# Models of transformers convert to fp32 in places (norms, rotary positions, softmax), whatever type they are in. In an
# fp64 model that rounds: two layouts that differ by 1e-16 can come out 1e-7 apart where a value falls on the other side
# of a rounding border (seen: losses 4e-9 apart after six steps). Inside this context such conversions do nothing.

_SOFTMAX_FUNCTIONS = (F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax)
_MATMUL_FUNCTIONS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class KeepFloat64(TorchFunctionMode):
    """fp64 tensors stay fp64 when a model asks for fp32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.float) and args[0].dtype == torch.float64:
            asked = [*args[1:], *kwargs.values()] if func is Tensor.to else [torch.float32]
            if torch.float32 in [value for value in asked if isinstance(value, torch.dtype)]:
                return args[0]
        if func in _SOFTMAX_FUNCTIONS and args[0].dtype == torch.float64 and kwargs.get("dtype") == torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func in _MATMUL_FUNCTIONS and args[0].dtype == torch.float64 and args[0].shape[-1] == 1:
            args = (args[0], args[1].double())  # the angle of one position by positions, which are counted in fp32
        return func(*args, **kwargs)
