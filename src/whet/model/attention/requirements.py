"""A look at what each layer asks of attention: a few tokens run through the model, and the questions are written down.

A window can come twice: by name with the call, which back-ends serve, and in the mask that transformers builds, which
whet never does. Where the two differ, the model would be trained with another attention than its own, and no short
probe would notice, because windows are thousands of tokens wide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from whet.compat.transformers_private import attention_implementation
from whet.core.errors import WhetError
from whet.model.attention.backends import causal_mask, reference_attention
from whet.model.attention.interface import AttentionSpec
from whet.model.modules import eval_mode

_RECORDER_NAME = "whet_look"
_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's attention."""

    ask: AttentionSpec
    width: int
    """Of its widest head."""
    mask: int | str | None = None
    """What its mask is beside causal: a window of so many tokens, or something else in words."""


def inspect_attention(model: nn.Module) -> list[LayerAttention]:
    """What each attention of `model` asks, in order; those before the first error where the model cannot be run."""
    seen: list[LayerAttention] = []
    masks: list[int | str | None] = []

    def note_mask(q_length: Any = None, mask_function: Any = None, local_size: int | None = None, **_: Any) -> Tensor:
        # every number in the mask says which one it is, so that a model may slice it
        masks.append(_classify_mask(mask_function, local_size))
        device = next(model.parameters()).device
        return torch.full((1, 1, _PROBE_TOKENS, _PROBE_TOKENS), len(masks) - 1, dtype=torch.float64, device=device)

    def note_call(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        scaling: float | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        ask = spec_from_call(query, scaling, **kwargs)
        kind = masks[int(mask.flatten()[0])] if mask is not None else None
        if kwargs.get("is_causal") is False:
            kind = "tokens that see the ones after them"
        seen.append(LayerAttention(ask, max(query.shape[-1], value.shape[-1]), kind))
        query, key = query.to(value.dtype), key.to(value.dtype)
        out = reference_attention(query, key, value, ask, causal_mask(query.shape[2], None, query.device))
        return out.transpose(1, 2), None

    AttentionInterface.register(_RECORDER_NAME, note_call)
    AttentionMaskInterface.register(_RECORDER_NAME, note_mask)
    before = attention_implementation(model)
    tokens = torch.arange(_PROBE_TOKENS, device=next(model.parameters()).device)[None]
    # compiled layers would be compiled anew for this
    with torch.no_grad(), eval_mode(model), torch.compiler.set_stance("force_eager"), contextlib.suppress(Exception):
        model.set_attn_implementation(_RECORDER_NAME)  # type: ignore[operator]
        model(input_ids=tokens, use_cache=False)
    model.set_attn_implementation(before)  # type: ignore[operator]
    return seen


def unsupported_attention(model: nn.Module, seen: list[LayerAttention] | None = None) -> str | None:
    """What the model wants of attention and would not get from any back-end; None: nothing. `seen`: what a look at it
    found before."""
    for number, layer in enumerate(inspect_attention(model) if seen is None else seen):
        if isinstance(layer.mask, str):
            return f"its attention {number} uses {layer.mask}"
        if layer.mask != layer.ask.window:
            named, masked = (f"a window of {size}" if size else "no window" for size in (layer.ask.window, layer.mask))
            return f"its attention {number} asks for {named} by name and for {masked} by its mask"
    return None


def spec_from_call(
    query: Tensor, scaling: float | None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **others: Any,
) -> AttentionSpec:  # fmt: skip
    """The question in the words of a transformers model."""
    for name in ("position_bias", "indices", "block_indices"):
        if others.get(name) is not None:
            raise WhetError(f"model.path: this model's attention uses '{name}', which whet cannot do")
    return AttentionSpec(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)


def _classify_mask(mask_function: Callable[..., Any], size: int | None) -> int | str | None:
    """What a mask of transformers hides beside the future, found by asking it for pairs of positions near and far."""

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(*(torch.tensor(index) for index in (0, 0, query, key))))

    reach = size or 10**6
    queries = [reach - 1, reach, reach + 1, 2 * reach - 1, 3 * reach + 1]
    pairs = [(q, k) for q in queries for k in (0, 1, q - reach, q - reach + 1, q - 1, q, q + 1) if k >= 0]
    try:
        if all(sees(q, k) == (k <= q and (size is None or k > q - size)) for q, k in pairs):
            return size
    except (IndexError, RuntimeError, TypeError):
        pass
    return f"chunks of {size} tokens" if size else "a mask of its own"
