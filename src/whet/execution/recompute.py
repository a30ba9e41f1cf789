"""Activation recomputation (selective or full) in the backward pass."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from whet.compat.bitsandbytes_private import GEMM_4BIT_OP
from whet.compat.torch_private import function_modes

# Recomputing: the backward pass computes a layer again instead of keeping what the forward pass made.
#
# Kept for each token and layer of a Llama of width E (feed-forward 3.5 E, a quarter as many key-value heads), in bytes:
#
# none 94 E, selective 50 E, full 4 E     in fp32
# none 64 E, selective 30 E, full 4 E     in bf16 over fp32 weights; with LoRA 57 E, 27 E, 4 E
#
# With LoRA on CUDA, where adapters are fused with their layers (model/fused_lora.py) and layers are compiled, it is 23 E.

LayerForward = Callable[..., Any]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_MATMULS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::_scaled_mm": 0,
    "aten::_grouped_mm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
}
"""Matrix products, and which argument their first matrix is."""
_LOW_RANK_RATIO = 8
_ALWAYS_SAVED = (
    "scaled_dot_product", "varlen_attn", "flex_attention", "flash_attn", "flash_attention", "short_attention",
    "whet::lora_linear", "whet::lora_mlp", GEMM_4BIT_OP, "_c10d_functional::all_reduce",
)  # fmt: skip
"""Attention, layers fused with their adapters, products with 4-bit weights, which only frozen ones are, and sums over
processes that compute a layer together."""


def with_recompute(forward: LayerForward, kind: Literal["selective", "full"]) -> LayerForward:
    """The same forward pass, of which the backward pass computes again what `kind` does not keep."""
    first = next(iter(inspect.signature(forward).parameters))

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not args:  # torch looks at positional arguments for the device, its randomness, and what can be offloaded
            args = (kwargs.pop(first),)
        contexts = functools.partial(_checkpoint_contexts, kind, function_modes())
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def with_recompute_in_eager(forward: LayerForward) -> LayerForward:
    """The same forward pass for the compiler, which is to compute it again by itself; wherever it runs uncompiled, as
    when a fault is looked for, it is computed again in full."""
    again = with_recompute(forward, "full")

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if torch.compiler.is_compiling() else again(*args, **kwargs)

    return run


def has_dropout(model: nn.Module) -> bool:
    """Whether random numbers are drawn in its layers, as for dropout. Where compiled code computes something again, it
    would draw others, and gradients would be wrong; `recomputed` draws the same."""
    if any(isinstance(module, _DROPOUTS) and module.p > 0 for module in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    settings = {} if config is None else config.to_dict()
    return any("drop" in name and isinstance(value, float | int) and value > 0 for name, value in settings.items())


def _checkpoint_contexts(
    kind: str, modes: list[Any]
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Around the forward pass and around the recomputation. torch restores autocast and randomness by itself, but not
    function modes: without HonestDouble a layer would be computed again in fp32."""
    if kind == "full":
        return contextlib.nullcontext(), _CombinedContexts(modes)
    keeping, kept = create_selective_checkpoint_contexts(_selective_policy)
    return keeping, _CombinedContexts([*modes, kept])


class _CombinedContexts(AbstractContextManager[object]):
    """Several contexts entered as one; unlike an ExitStack, prepared before it is entered."""

    def __init__(self, contexts: list[AbstractContextManager[object]]) -> None:
        self._contexts, self._stack = contexts, ExitStack()

    def __enter__(self) -> object:
        for context in self._contexts:
            self._stack.enter_context(context)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def _selective_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is dear to compute: matrix products and attention."""
    name = operation.name().partition(".")[0]  # aten::mm of aten::mm.out
    first = _MATMULS.get(name)
    dear = any(part in name for part in _ALWAYS_SAVED) if first is None else _is_expensive(args[first], args[first + 1])
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def _is_expensive(left: Tensor, right: Tensor) -> bool:
    """A number of a product costs as much as the matrices are long inside; an adapter's wide one is cheap.

    Kept too, it would make `selective` keep more than `none` with LoRA: 93 bytes a token, layer and width, not 87.
    """
    return left.shape[-1] * _LOW_RANK_RATIO >= right.shape[-1]
