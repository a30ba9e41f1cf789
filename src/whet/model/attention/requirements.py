"""What each layer of a model needs of its attention, recorded from a forward pass over a few tokens.

A sliding window can be given twice: as a keyword argument, which back-ends implement, and in the mask that transformers
builds, which whet does not use. If the two differ, whet would train with another attention than the model's own, and no
short comparison would notice, because windows are thousands of tokens wide. So both are recorded and compared.
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
from whet.model.attention.backends import causal_mask, reference_attention
from whet.model.attention.interface import AttentionSpec, spec_from_call
from whet.model.modules import eval_mode

_RECORDER_NAME = "whet_recorder"
_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer."""

    spec: AttentionSpec
    head_dim: int
    """Of queries or values, whichever is larger."""
    mask: int | str | None = None
    """What its mask hides besides the future: tokens outside a window of this size, or a description of the mask."""


def inspect_attention(model: nn.Module) -> list[LayerAttention]:
    """The attention of each layer, in order; if the forward pass fails, those of the layers before."""
    layers: list[LayerAttention] = []
    masks: list[int | str | None] = []
    device = next(model.parameters()).device  # the registry keeps the functions below, which must not keep the model

    def record_mask(q_length: Any = None, mask_function: Any = None, local_size: int | None = None, **_: Any) -> Tensor:
        # every element holds the mask's index, so that it survives slicing by the model
        masks.append(_classify_mask(mask_function, local_size))
        return torch.full((1, 1, _PROBE_TOKENS, _PROBE_TOKENS), len(masks) - 1, dtype=torch.float64, device=device)

    def record_call(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        scaling: float | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        spec = spec_from_call(query, scaling, **kwargs)
        kind = masks[int(mask.flatten()[0])] if mask is not None else None
        if kwargs.get("is_causal") is False:
            kind = "bidirectional attention"
        layers.append(LayerAttention(spec, max(query.shape[-1], value.shape[-1]), kind))
        query, key = query.to(value.dtype), key.to(value.dtype)
        out = reference_attention(query, key, value, spec, causal_mask(query.shape[2], None, query.device))
        return out.transpose(1, 2), None

    AttentionInterface.register(_RECORDER_NAME, record_call)
    AttentionMaskInterface.register(_RECORDER_NAME, record_mask)
    before = attention_implementation(model)
    tokens = torch.arange(_PROBE_TOKENS, device=device)[None]
    # force_eager: compiled layers would be compiled for this pass alone
    with torch.no_grad(), eval_mode(model), torch.compiler.set_stance("force_eager"), contextlib.suppress(Exception):
        model.set_attn_implementation(_RECORDER_NAME)  # type: ignore[operator]
        model(input_ids=tokens, use_cache=False)
    model.set_attn_implementation(before)  # type: ignore[operator]
    return layers


def unsupported_attention(model: nn.Module, layers: list[LayerAttention] | None = None) -> str | None:
    """The first thing about the model's attention that no back-end implements; None if they implement all.

    `layers`: the result of an earlier `inspect_attention`.
    """
    for number, layer in enumerate(inspect_attention(model) if layers is None else layers):
        if isinstance(layer.mask, str):
            return f"its attention layer {number} uses {layer.mask}"
        if layer.mask != layer.spec.window:
            named, masked = (f"a window of {size}" if size else "no window" for size in (layer.spec.window, layer.mask))
            return f"its attention layer {number} passes {named} as an argument, but {masked} in its mask"
    return None


def _classify_mask(mask_function: Callable[..., Any], size: int | None) -> int | str | None:
    """What a mask function of transformers hides besides the future, by evaluating it at pairs near and far."""

    def is_visible(query: int, key: int) -> bool:
        return bool(mask_function(*(torch.tensor(index) for index in (0, 0, query, key))))

    reach = size or 10**6
    queries = [reach - 1, reach, reach + 1, 2 * reach - 1, 3 * reach + 1]
    pairs = [(q, k) for q in queries for k in (0, 1, q - reach, q - reach + 1, q - 1, q, q + 1) if k >= 0]
    try:
        if all(is_visible(q, k) == (k <= q and (size is None or k > q - size)) for q, k in pairs):
            return size
    except (IndexError, RuntimeError, TypeError):
        pass
    return f"chunks of {size} tokens" if size else "a custom mask"
