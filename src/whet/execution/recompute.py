"""Activation recomputation (checkpointing), selective or full: the backward pass computes a layer again instead of
keeping its activations.

Bytes saved per token and layer of a Llama of width E (MLP width 3.5 E, a quarter as many key/value heads as heads):

    fp32                              none 94 E, selective 50 E, full 4 E
    bf16 over fp32 weights            none 64 E, selective 30 E, full 4 E
    bf16 over fp32 weights, LoRA      none 57 E, selective 27 E, full 4 E

With LoRA on CUDA, where adapters are fused (model/lora/fuse.py) and layers are compiled, none is 23 E.
"""

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
from whet.model.attention import PackedDocuments, current_documents

_MATMULS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::_scaled_mm": 0,
    "aten::_grouped_mm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
}
"""Matrix products, and the index of their first matrix among the arguments."""
_LOW_RANK_RATIO = 8
_ALWAYS_SAVED = (
    "scaled_dot_product", "varlen_attn", "flex_attention", "flash_attn", "flash_attention", "short_attention",
    "whet::lora_linear", "whet::lora_mlp", "whet::experts", GEMM_4BIT_OP, "_c10d_functional::all_reduce",
)  # fmt: skip
"""Attention, layers fused with their adapters, experts, products with 4-bit weights, tensor-parallel all-reduces."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def with_recompute(forward: Callable[..., Any], kind: Literal["selective", "full"]) -> Callable[..., Any]:
    """Wraps a forward pass so that the backward pass recomputes what `kind` does not save."""
    first = next(iter(inspect.signature(forward).parameters))

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not args:  # torch derives device and RNG state from positional arguments, and saves only those
            args = (kwargs.pop(first),)
        restored = [*function_modes(), PackedDocuments(current_documents())]
        contexts = functools.partial(_checkpoint_contexts, kind, restored)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def with_recompute_in_eager(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Full recomputation wherever a layer runs eagerly, such as when a non-finite value is diagnosed. Compiled, the
    compiler recomputes by itself."""
    recomputed = with_recompute(forward, "full")

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if torch.compiler.is_compiling() else recomputed(*args, **kwargs)

    return run


def has_dropout(model: nn.Module) -> bool:
    """Whether the model draws random numbers in training. Compiled code that recomputes would draw others, and
    gradients would be wrong; `with_recompute` restores the RNG state."""
    if any(isinstance(module, _DROPOUTS) and module.p > 0 for module in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    settings = {} if config is None else config.to_dict()
    return any(
        ("drop" in name or "jitter" in name) and isinstance(value, float | int) and value > 0
        for name, value in settings.items()
    )


def _checkpoint_contexts(
    kind: str, restored: list[Any]
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """The contexts of the forward pass and of its recomputation. torch restores autocast and RNG state; `restored` is
    the rest. Without KeepFloat64 a layer would be recomputed in fp32, and without the documents of its row a recurrent
    one would carry its state from one to the next."""
    if kind == "full":
        return contextlib.nullcontext(), _CombinedContexts(restored)
    saving, restoring = create_selective_checkpoint_contexts(_selective_policy)
    return saving, _CombinedContexts([*restored, restoring])


class _CombinedContexts(AbstractContextManager[object]):
    """Several contexts entered as one. Unlike an ExitStack, it enters none before it is entered itself."""

    def __init__(self, contexts: list[AbstractContextManager[object]]) -> None:
        self._contexts, self._stack = contexts, ExitStack()

    def __enter__(self) -> object:
        for context in self._contexts:
            self._stack.enter_context(context)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def _selective_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save what is expensive to compute: matrix products and attention."""
    name = operation.name().partition(".")[0]  # aten::mm of aten::mm.out
    first = _MATMULS.get(name)
    if first is None:
        expensive = any(part in name for part in _ALWAYS_SAVED)
    else:
        expensive = _is_expensive(args[first], args[first + 1])
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def _is_expensive(left: Tensor, right: Tensor) -> bool:
    """Recomputing an element costs the inner dimension, which is small for the second matrix of an adapter.

    Saving those too would make `selective` save more than `none` with LoRA: 93 E bytes per token and layer, not 87 E.
    """
    return left.shape[-1] * _LOW_RANK_RATIO >= right.shape[-1]
