"""The KV cache: one slot per sequence, the attention that reads and writes it, the decode step, and a probe
for models it supports.

The attention function is registered with transformers like whet's document attention, so models stay unmodified.
Prompts are prefilled without padding, several packed into one row; sequences in a decode step may differ in length.

Shape letters: N sequences, H query heads, K key-value heads, T tokens, S slot length, E head width, V value head width.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from whet.compat.transformers_private import attention_implementation
from whet.core.console import warn
from whet.core.resources import has_triton
from whet.execution.cuda_graphs import make_capture, root_cause
from whet.inference.sampling import Sampling, sample_next_tokens
from whet.model.attention import inspect_attention, native_attention, unsupported_attention
from whet.model.attention.backends import reference_attention
from whet.model.attention.dispatch import BACKENDS, LayerAttention
from whet.model.attention.interface import AttentionSpec, Documents, spec_from_call
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
        if spec.softcap is None and spec.sinks is None and _uses_kernel(query, keys):
            from whet.inference.decode_kernel import decode_attention

            return decode_attention(query, keys[:rows], values[:rows], self._positions, spec.scale, spec.window)
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


def _uses_kernel(query: Tensor, keys: Tensor) -> bool:
    """Whether decoding has a kernel of its own here, and enough sequences for it."""
    if not query.is_cuda or not has_triton():
        return False
    from whet.inference.decode_kernel import fills_device

    return fills_device(query, keys)


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


# The decode step: forward pass and sampling of one token per sequence, captured as a CUDA graph where possible.
#
# A decode step of a small model is hundreds of kernels of a few microseconds each, and Python takes longer to launch
# them than the GPU to run them. A CUDA graph replays the whole step with one launch.

TOKEN, POSITION, NUM_SAMPLED, RNG_KEY, ACTIVE = range(5)
"""The rows of the decode state: each sequence's newest token and its position, how many tokens were sampled, the key of
its random numbers, and 1 for a sequence in progress or 0 for padding."""


class DecodeRunner:
    """Runs decode steps on the first rows of a state [5, num_slots] that stays on the device."""

    def __init__(
        self, model: nn.Module, cache: KVCache, sampling: Sampling | None, seen_tokens: Tensor | None,
        device: torch.device, use_cuda_graphs: bool, pad_to_sizes: bool,
    ) -> None:  # fmt: skip
        """`sampling`: None if sequences differ in it; then only `logits` works. `seen_tokens` [num_slots, vocabulary]:
        the tokens of each sequence, for the repetition penalty."""
        self._model, self._cache, self._sampling, self._seen_tokens = model, cache, sampling, seen_tokens
        self.state = torch.zeros((5, cache.num_slots), dtype=torch.int64, device=device)
        self._capture, self._pad_to_sizes = make_capture() if use_cuda_graphs else None, pad_to_sizes
        self._graphs: dict[tuple[int, int], Callable[[], None] | None] = {}
        self._logits: Tensor | None = None

    def run(self, state: Tensor, max_length: int, steps: int) -> Tensor:
        """[steps, N]: the next tokens of N sequences with state [5, N] on the host; the longest has `max_length`."""
        rows = state.shape[1]
        padded, limit = self._load_state(state, max_length + steps)
        tokens = torch.empty((steps, rows), dtype=torch.int64, device=self.state.device)
        for step in range(steps):
            self._run_step(padded, limit)
            tokens[step].copy_(self.state[TOKEN, :rows])
        return tokens.cpu()

    def logits(self, state: Tensor, max_length: int) -> Tensor:
        """[N, V]: the logits of one step, for sequences that are sampled each in its own way."""
        self._run_step(*self._load_state(state, max_length + 1))
        assert self._logits is not None
        return self._logits[: state.shape[1]]

    def _load_state(self, state: Tensor, max_length: int) -> tuple[int, int]:
        """Copy the state to the device; return (rows, positions) to compute."""
        rows = state.shape[1]
        padded, limit = self._padded_shape(rows, max_length)
        if padded > rows:  # padding rows are inactive: their position stays 0
            state = torch.cat([state, state.new_zeros((5, padded - rows))], dim=1)
        state = state.contiguous()
        self.state[:, :padded].copy_(state.pin_memory() if self._capture else state, non_blocking=True)
        return padded, limit

    def _padded_shape(self, rows: int, max_length: int) -> tuple[int, int]:
        """(rows, positions) to compute, rounded up to a few sizes so that few graphs are captured.

        A capture takes as long as about ten steps, and a quarter of the rows takes nearly as long as all of them,
        because reading the weights dominates.
        """
        if not self._pad_to_sizes:
            return rows, min(max_length, self._cache.slot_length)
        padded = 1
        while padded < rows:
            padded *= 4
        limit = max(512, 1 << (max_length - 1).bit_length())
        return min(padded, self._cache.num_slots), min(limit, self._cache.slot_length)

    def _run_step(self, rows: int, limit: int) -> None:
        """The first step of a shape runs eagerly, which initialises every kernel; the second is captured."""
        shape = rows, limit
        if self._capture is None or shape not in self._graphs:
            self._graphs[shape] = None
            self._decode_step(rows, limit)
            return
        replay = self._graphs[shape]
        if replay is None:
            try:
                replay = self._capture(lambda: self._decode_step(rows, limit))
            except RuntimeError as error:
                warn(f"CUDA graph capture failed ({root_cause(error)}); decoding without graphs, which is slower")
                self._capture = None
                self._decode_step(rows, limit)
                return
            self._graphs[shape] = replay
        replay()

    def _decode_step(self, rows: int, limit: int) -> None:
        token, position, num_sampled, key, active = self.state[:, :rows]
        seen_tokens = None
        if self._seen_tokens is not None:
            seen_tokens = self._seen_tokens[:rows]
            seen_tokens.scatter_(1, token[:, None], True)
        with _sdpa_backends(token.device):
            output = self._model(
                input_ids=token[:, None], position_ids=position[:, None], use_cache=False,
                kv_attention=DecodeAttention(self._cache, position, limit),
            )  # fmt: skip
        if self._sampling is None:
            if self._logits is None:  # in the first step, which is never captured
                self._logits = output.logits.new_empty((self._cache.num_slots, output.logits.shape[-1]))
            self._logits[:rows].copy_(output.logits[:, -1])
            return
        token.copy_(sample_next_tokens(output.logits[:, -1], key, num_sampled, self._sampling, seen_tokens))
        position.add_(active)
        num_sampled.add_(1)


def _sdpa_backends(device: torch.device) -> AbstractContextManager[None]:
    """Excludes cuDNN attention on CUDA: it builds a plan for every new shape, which takes longer than many steps."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
