"""The KV cache: one slot per sequence, the attention that reads and writes it, and a probe for models it supports.

The attention function is registered with transformers like whet's document attention, so models stay unmodified.
Prompts are prefilled without padding, several packed into one row; sequences in a decode step may differ in length.

Shape letters: N sequences, H query heads, K key-value heads, T tokens, S slot length, E head width, V value head width.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from whet.compat.transformers_private import attention_implementation
from whet.model.attention import inspect_attention, native_attention, unsupported_attention
from whet.model.attention.backends import reference_attention
from whet.model.attention.dispatch import BACKENDS
from whet.model.attention.interface import AttentionSpec, Documents, spec_from_call
from whet.model.attention.requirements import LayerAttention
from whet.model.lora.peft_adapters import embedding_rows
from whet.model.packing_check import length_dependent_rope

_ATTENTION_NAME = "whet_kv_cache"


class KVCache:
    """Keys [num_slots, S, K, E] and values [num_slots, S, K, V] of each layer, allocated when the layer first runs."""

    def __init__(self, num_slots: int, slot_length: int) -> None:
        self.num_slots, self.slot_length = num_slots, slot_length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, indices: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key [T K E] and value [T K V] at `indices` [T] into the flattened slots; return the layer's tensors."""
        if layer not in self.layers:
            # zeros, not uninitialised memory: a masked position contributes nothing only if it holds a finite number
            self.layers[layer] = (
                key.new_zeros((self.num_slots, self.slot_length, *key.shape[1:])),
                value.new_zeros((self.num_slots, self.slot_length, *value.shape[1:])),
            )
        keys, values = self.layers[layer]
        keys.flatten(0, 1).index_copy_(0, indices, key)
        values.flatten(0, 1).index_copy_(0, indices, value)
        return keys, values

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot into another."""
        for tensors in self.layers.values():
            for tensor in tensors:
                tensor[target, :length].copy_(tensor[source, :length])


class PrefillAttention:
    """Attention of a forward pass over prompts packed into one row; stores their keys and values."""

    def __init__(self, cache: KVCache, indices: Tensor, documents: Documents, backend: str) -> None:
        self._cache, self._indices, self._documents, self._backend = cache, indices, documents, BACKENDS[backend]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self._cache.write(layer, self._indices, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self._backend(query, key, value, spec, self._documents)


class DecodeAttention:
    """Attention of a forward pass over one new token of each of the first N slots, at positions [N]."""

    def __init__(self, cache: KVCache, positions: Tensor, limit: int) -> None:
        """`limit`: all positions are below it, so only the first `limit` entries of a slot are read."""
        self._cache, self._positions, self._limit = cache, positions, limit
        self._indices = positions + torch.arange(len(positions), device=positions.device) * cache.slot_length
        self._visible: dict[int | None, Tensor] = {}
        self._bias: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """→ [N 1 H V]"""
        keys, values = self._cache.write(layer, self._indices, key[:, :, 0], value[:, :, 0])
        rows = len(query)
        keys, values = (tensor[:rows, : self._limit].transpose(1, 2) for tensor in (keys, values))
        if spec.softcap is not None or spec.sinks is not None:
            return reference_attention(query, keys, values, spec, self._visible_mask(spec.window)).transpose(1, 2)
        # grouped-query attention without repeating keys: the heads of a group become queries of their key head
        grouped = query.reshape(rows, keys.shape[1], -1, query.shape[-1])
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=self._attention_bias(spec.window, query.dtype), scale=spec.scale
        )
        return out.reshape(rows, 1, query.shape[1], -1)

    def _attention_bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The visible mask as 0 and -inf, which SDPA would otherwise derive from a boolean mask in every layer."""
        if (window, dtype) not in self._bias:
            visible = self._visible_mask(window)
            zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._bias[window, dtype] = zeros.masked_fill(~visible, float("-inf"))
        return self._bias[window, dtype]

    def _visible_mask(self, window: int | None) -> Tensor:
        """[N 1 1 limit]: the positions that each sequence's new token attends to; layers share it."""
        if window not in self._visible:
            distance = self._positions[:, None] - torch.arange(self._limit, device=self._positions.device)
            visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            self._visible[window] = visible[:, None, None]
        return self._visible[window]


def _attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, *,
    kv_attention: PrefillAttention | DecodeAttention, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    spec = spec_from_call(query, scaling, **kwargs)
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    return kv_attention.attend(id(module), query.to(dtype), key.to(dtype), value.to(dtype), spec), None


@contextlib.contextmanager
def use_kv_cache(model: nn.Module) -> Iterator[None]:
    """Let `model` attend through a KV cache; every forward pass then needs the keyword argument `kv_attention`."""
    AttentionInterface.register(_ATTENTION_NAME, _attention_forward)
    previous = attention_implementation(model)
    model.set_attn_implementation(_ATTENTION_NAME)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(previous)  # type: ignore[operator]


# Does the cache support a model? Models with recurrent state (Mamba, Qwen3-Next), a cache class of their own, or an
# attention outside transformers' interface do not work with it. No list is complete, so each model is probed once: two
# prompts and one decode step, compared with the model's own logits.

_UNSUPPORTED_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
_probe_results: weakref.WeakKeyDictionary[nn.Module, list[LayerAttention] | None] = weakref.WeakKeyDictionary()


def probe_kv_cache(model: nn.Module, max_length: int) -> list[LayerAttention] | None:
    """The attention of each layer, if the cache supports the model for sequences up to `max_length` tokens; or None."""
    if length_dependent_rope(model, max_length) is not None:
        return None
    if model not in _probe_results:
        layers = inspect_attention(model)
        supported = layers and unsupported_attention(model, layers) is None and _matches_model_attention(model)
        _probe_results[model] = layers if supported else None
    return _probe_results[model]


def _matches_model_attention(model: nn.Module) -> bool:
    """Whether two short sequences have the same last logits with the cache as with the model's own attention."""
    vocabulary = embedding_rows(model)
    device = next(model.parameters()).device
    sequences = [torch.arange(n, device=device) * 7919 % vocabulary for n in (7, 4)]
    try:
        with native_attention(model):
            expected = torch.stack([model(input_ids=ids[None], use_cache=False).logits[0, -1] for ids in sequences])
        found = _last_logits_with_cache(model, sequences)
    except torch.OutOfMemoryError:
        raise
    except _UNSUPPORTED_ERRORS:
        return False
    is_16_bit = torch.is_autocast_enabled(device.type) or expected.dtype.itemsize < 4
    scale = expected.float().abs().max().item()
    difference = (expected.float() - found.float()).abs().max().item()
    return difference <= (0.05 if is_16_bit else 1e-3) * scale


def _last_logits_with_cache(model: nn.Module, sequences: Sequence[Tensor]) -> Tensor:
    """[N vocabulary]: the logits after the last token; all tokens but the last are prefilled, then one is decoded."""
    device = sequences[0].device
    cache = KVCache(len(sequences), 16)
    lengths = [len(ids) - 1 for ids in sequences]
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    indices = torch.cat([torch.arange(length, device=device) + 16 * slot for slot, length in enumerate(lengths)])
    documents = Documents(torch.tensor(edges, dtype=torch.int32, device=device), max(lengths), edges)
    with use_kv_cache(model):
        model(
            input_ids=torch.cat([ids[:-1] for ids in sequences])[None], position_ids=positions[None], use_cache=False,
            kv_attention=PrefillAttention(cache, indices, documents, "sdpa"),
        )  # fmt: skip
        last = torch.tensor(lengths, device=device)
        output = model(
            input_ids=torch.stack([ids[-1:] for ids in sequences]), position_ids=last[:, None], use_cache=False,
            kv_attention=DecodeAttention(cache, last, 16),
        )  # fmt: skip
    return output.logits[:, -1]
