"""The KV cache: one slot per sequence, the attention function that reads and writes it, and a probe that tells which models it supports."""

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

# Keys and values of answers under way, a slot for each, and the attention that reads and writes them.
#
# The attention function is registered with transformers, as whet's document attention is; models stay as they are. So a
# prompt is computed without padding, several in one row, and rows of a step may be of any lengths. Shape letters: N rows,
# H heads, K key-value heads, G = H / K, T tokens, S places of a slot, E head width, V head width of values.

_ATTENTION_NAME = "whet_slots"


class KVCache:
    """The memory: for each layer keys [slots, S, K, E] and values, made when the layer first asks."""

    def __init__(self, count: int, places: int) -> None:
        self.count, self.places = count, places
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, at: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep key [T K E] and value at places [T] of all slots laid end to end; gives the layer's memory."""
        if layer not in self.layers:
            # zeros, not garbage: a hidden place adds nothing only if it holds a number
            self.layers[layer] = (
                key.new_zeros((self.count, self.places, *key.shape[1:])),
                value.new_zeros((self.count, self.places, *value.shape[1:])),
            )
        keys, values = self.layers[layer]
        keys.flatten(0, 1).index_copy_(0, at, key)
        values.flatten(0, 1).index_copy_(0, at, value)
        return keys, values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of a slot into another."""
        for pair in self.layers.values():
            for memory in pair:
                memory[target, :length].copy_(memory[source, :length])


class PrefillAttention:
    """A forward pass over prompts, packed into one row."""

    def __init__(self, slots: KVCache, at: Tensor, documents: Documents, backend: str) -> None:
        self._slots, self._at, self._documents, self._backend = slots, at, documents, BACKENDS[backend]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self._slots.write(layer, self._at, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self._backend(query, key, value, spec, self._documents)


class DecodeAttention:
    """A forward pass over one further token of each of the first N slots, at positions [N]."""

    def __init__(self, slots: KVCache, positions: Tensor, limit: int) -> None:
        """`limit`: no position is beyond it, so no place behind it is read."""
        self._slots, self._positions, self._limit = slots, positions, limit
        self._at = positions + torch.arange(len(positions), device=positions.device) * slots.places
        self._visible: dict[int | None, Tensor] = {}
        self._added: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """→ [N 1 H V]"""
        keys, values = self._slots.write(layer, self._at, key[:, :, 0], value[:, :, 0])
        rows = len(query)
        keys, values = (memory[:rows, : self._limit].transpose(1, 2) for memory in (keys, values))
        if spec.softcap is not None or spec.sinks is not None:
            return reference_attention(query, keys, values, spec, self._seen_through(spec.window)).transpose(1, 2)
        # the heads of a group as further queries of their key head: nothing is repeated, and no kernel needs to know
        grouped = query.reshape(rows, keys.shape[1], -1, query.shape[-1])
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=self._mask(spec.window, query.dtype), scale=spec.scale
        )
        return out.reshape(rows, 1, query.shape[1], -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The same as numbers to add to scores, which kernels would otherwise make of it in every layer."""
        if (window, dtype) not in self._added:
            seen = self._seen_through(window)
            zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._added[window, dtype] = zeros.masked_fill(~seen, float("-inf"))
        return self._added[window, dtype]

    def _seen_through(self, window: int | None) -> Tensor:
        """[N 1 1 limit] which places a row's new token sees; layers share it."""
        if window not in self._visible:
            back = self._positions[:, None] - torch.arange(self._limit, device=self._positions.device)
            seen = (back >= 0) if window is None else (back >= 0) & (back < window)
            self._visible[window] = seen[:, None, None]
        return self._visible[window]


def _attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, *,
    slots: PrefillAttention | DecodeAttention, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    spec = spec_from_call(query, scaling, **kwargs)
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    return slots.attend(id(module), query.to(dtype), key.to(dtype), value.to(dtype), spec), None


@contextlib.contextmanager
def use_kv_cache(model: nn.Module) -> Iterator[None]:
    """`model` attends through slots for a while; each forward pass is told which by the keyword `slots`."""
    AttentionInterface.register(_ATTENTION_NAME, _attention_forward)
    before = attention_implementation(model)
    model.set_attn_implementation(_ATTENTION_NAME)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]


# Whether a model can be served through slots, found out by trying.
#
# Models with state (Mamba, Qwen3-Next), with a cache of their own kind, or with an attention that is not transformers'
# common one keep something that slots do not hold. No list knows them all, so each model is tried once: two prompts and
# a further token of each, compared with what the model says of the whole texts.

_UNSUPPORTED_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
_probe_results: weakref.WeakKeyDictionary[nn.Module, list[LayerAttention] | None] = weakref.WeakKeyDictionary()


def probe_kv_cache(model: nn.Module, longest: int) -> list[LayerAttention] | None:
    """What each layer asks of attention, if slots serve the model for texts of up to `longest` tokens; else None."""
    if length_dependent_rope(model, longest) is not None:
        return None
    if model not in _probe_results:
        seen = inspect_attention(model)
        _probe_results[model] = (
            seen if seen and unsupported_attention(model, seen) is None and _matches_model_attention(model) else None
        )
    return _probe_results[model]


def _matches_model_attention(model: nn.Module) -> bool:
    """Whether two short texts have the same logits through slots as by the model's own attention."""
    vocabulary = embedding_rows(model)
    device = next(model.parameters()).device
    texts = [torch.arange(n, device=device) * 7919 % vocabulary for n in (7, 4)]
    try:
        with native_attention(model):
            expected = torch.stack([model(input_ids=text[None], use_cache=False).logits[0, -1] for text in texts])
        found = _last_logits_with_cache(model, texts)
    except torch.OutOfMemoryError:
        raise
    except _UNSUPPORTED_ERRORS:
        return False
    coarse = torch.is_autocast_enabled(device.type) or expected.dtype.itemsize < 4
    size = expected.float().abs().max().item()
    difference = (expected.float() - found.float()).abs().max().item()
    return difference <= (0.05 if coarse else 1e-3) * size


def _last_logits_with_cache(model: nn.Module, texts: Sequence[Tensor]) -> Tensor:
    """[N V] logits of the last token of each text: all others are read as prompts, packed, then it is written."""
    device = texts[0].device
    slots = KVCache(len(texts), 16)
    lengths = [len(text) - 1 for text in texts]
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    at = torch.cat([torch.arange(length, device=device) + 16 * row for row, length in enumerate(lengths)])
    documents = Documents(torch.tensor(edges, dtype=torch.int32, device=device), max(lengths), edges)
    with use_kv_cache(model):
        model(
            input_ids=torch.cat([text[:-1] for text in texts])[None], position_ids=positions[None], use_cache=False,
            slots=PrefillAttention(slots, at, documents, "sdpa"),
        )  # fmt: skip
        last = torch.tensor(lengths, device=device)
        output = model(
            input_ids=torch.stack([text[-1:] for text in texts]), position_ids=last[:, None], use_cache=False,
            slots=DecodeAttention(slots, last, 16),
        )  # fmt: skip
    return output.logits[:, -1]
