"""Choosing an attention back-end and registering it with transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from whet.compat.transformers_private import attention_implementation, supports_sdpa
from whet.core.errors import WhetError
from whet.core.resources import has_triton
from whet.model.attention import backends
from whet.model.attention.backends import (
    VARLEN_MAX_HEAD_DIM,
    cudnn_attention_forward,
    eager_attention_forward,
    flex_attention_forward,
    sdpa_attention_forward,
)
from whet.model.attention.interface import AttentionBackend, Documents, PackingError, spec_from_call
from whet.model.attention.recurrent import recurrent_layers
from whet.model.attention.requirements import LayerAttention
from whet.model.attention.short import short_attention_forward

CUDNN_MIN_LENGTH = 8192
"""Typical document length from which cudnn is chosen: its kernels are a sixth faster than `short` at 32 768 tokens, but
need one call for each document, padded to one of a few lengths."""
_SHORT_MAX_HEAD_DIM = 128
"""The head dimension up to which `short` was measured to be faster than varlen."""


def choose_backend(
    requested: str, device: torch.device, dtype: torch.dtype, layers: Sequence[LayerAttention] = (),
    typical_length: float = 0,
) -> str:  # fmt: skip
    """The requested back-end, or with `auto` the fastest for the device, the model's layers and the typical document.

    `layers` comes from `inspect_attention`. `typical_length` is the length of the document that a random token is in.
    """
    reasons = {
        "cudnn": _why_not_cudnn(device, dtype, layers),
        "short": _why_not_short(device, dtype, layers),
        "varlen": _why_not_varlen(device, dtype, layers),
        "flex": _why_not_flex(device, dtype),
    }
    if requested == "auto":
        if dtype.itemsize > 2:  # no other back-end is faster than sdpa there
            return "sdpa"
        is_faster = {
            "cudnn": typical_length >= CUDNN_MIN_LENGTH,
            "short": all(layer.head_dim <= _SHORT_MAX_HEAD_DIM for layer in layers),
        }
        return next(
            (name for name, why_not in reasons.items() if why_not is None and is_faster.get(name, True)), "sdpa"
        )
    if reasons.get(requested):
        raise WhetError(
            f"model.attention: {requested} {reasons[requested]}. Set model.attention=auto to let whet choose"
        )
    return requested


def _why_not_cudnn(device: torch.device, dtype: torch.dtype, layers: Sequence[LayerAttention]) -> str | None:
    reason = _why_not_varlen(device, dtype, layers)
    if reason is None and any(layer.spec.window is not None for layer in layers):
        return "does not support sliding windows, which this model uses"
    if reason is None and any(layer.head_dim > backends.CUDNN_MAX_HEAD_DIM for layer in layers):
        return f"supports head dimensions up to {backends.CUDNN_MAX_HEAD_DIM}; this model's are larger"
    return reason


def _why_not_varlen(device: torch.device, dtype: torch.dtype, layers: Sequence[LayerAttention]) -> str | None:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"needs a CUDA device and bf16 or fp16, not {device.type} and {dtype}"
    if torch.version.hip or (torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)):
        return "needs an NVIDIA GPU of the Ampere generation or later"
    if any(layer.spec.softcap is not None or layer.spec.sinks is not None for layer in layers):
        return "supports neither soft-caps nor sinks, which this model uses; flex does"
    widest = max((layer.head_dim for layer in layers), default=0)
    if widest > VARLEN_MAX_HEAD_DIM:
        return f"supports head dimensions up to {VARLEN_MAX_HEAD_DIM}; this model's are {widest}"
    return None


def _why_not_short(device: torch.device, dtype: torch.dtype, layers: Sequence[LayerAttention]) -> str | None:
    if not has_triton():
        return "needs Triton, which is not installed"
    return _why_not_varlen(device, dtype, layers)  # the same requirements, and tiles for the same head dimensions


def _why_not_flex(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or dtype == torch.float64:
        return f"needs a CUDA device and at most fp32, not {device.type} and {dtype}"
    return None


# Registration with transformers

BACKENDS: dict[str, AttentionBackend] = {
    "sdpa": sdpa_attention_forward,
    "eager": eager_attention_forward,
    "varlen": backends.varlen_attention_forward,
    "flex": flex_attention_forward,
    "cudnn": cudnn_attention_forward,
    "short": short_attention_forward,
}

_REGISTERED_NAMES = {
    "sdpa": "whet_per_document",
    "eager": "whet_eager",
    "varlen": "whet_varlen",
    "flex": "whet_block_mask",
    "cudnn": "whet_cudnn",
    "short": "whet_short",
}
"""transformers runs its own availability checks for names that contain `sdpa`, `flex` or `flash`."""

_WRAPPED_SUFFIX = "_wrapped"

_FULLGRAPH_BACKENDS = ("varlen", "short", "eager")
"""The others break the graph: they read document boundaries on the host, or communicate with other processes."""


def install_backend(
    model: nn.Module, backend: str, wrap: Callable[[AttentionBackend], AttentionBackend] | None = None
) -> None:
    """Make `model` (a transformers model) attend within documents. `wrap` decorates the back-end, as sequence
    parallelism does."""
    if backend == "varlen":
        backends.activate_newest_flash_attention()
    compute = wrap(BACKENDS[backend]) if wrap else BACKENDS[backend]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        scaling: float | None = None, *, documents: Documents, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if len(query) != 1:  # boundaries of documents are places in one row
            raise PackingError("its attention is inside a layer that gets documents as a batch")
        spec = spec_from_call(query, scaling, **kwargs)
        # rotary embeddings and norms return fp32 under autocast
        kind = query.device.type
        mixed = kind != "meta" and torch.is_autocast_enabled(kind)  # torch has no autocast for meta
        dtype = torch.get_autocast_dtype(kind) if mixed else value.dtype
        return compute(query.to(dtype), key.to(dtype), value.to(dtype), spec, documents), None

    # no mask function is registered: back-ends use document boundaries, and transformers would synchronise with the
    # device in every forward pass to decide whether it needs a mask
    name = registered_name(backend) + (_WRAPPED_SUFFIX if wrap else "")
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)  # type: ignore[operator]


def registered_name(backend: str) -> str:
    """The name under which a back-end is registered with transformers."""
    return _REGISTERED_NAMES[backend]


def needs_document_spans(model: nn.Module) -> bool:
    """Whether the back-end of `model` reads `Documents.spans`."""
    return attention_implementation(model).removesuffix(_WRAPPED_SUFFIX) == registered_name("short")


def current_backend(model: nn.Module) -> str:
    """The back-end that `model` uses."""
    installed = attention_implementation(model).removesuffix(_WRAPPED_SUFFIX)
    return next((backend for backend, name in _REGISTERED_NAMES.items() if name == installed), f"native ({installed})")


def describe_backend(model: nn.Module) -> str:
    """The back-end that `model` uses, with the kernel if it is not torch's default: `varlen (FA3)`."""
    backend = current_backend(model)
    kernel = backends.active_flash_attention() if backend == "varlen" else None
    return f"{backend} ({kernel})" if kernel else backend


def supports_fullgraph(model: nn.Module) -> bool:
    """Whether a compiled layer of `model` is one graph, without a graph break at attention or recurrent layers."""
    names = [_REGISTERED_NAMES[backend] for backend in _FULLGRAPH_BACKENDS]
    return attention_implementation(model) in names and not recurrent_layers(model)


def use_native_attention(model: nn.Module) -> None:
    """Make `model` use transformers' own attention."""
    # transformers' sdpa silently ignores soft-caps, and not every version reports that it does not support them
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    model.set_attn_implementation("sdpa" if supports_sdpa(model) and not capped else "eager")  # type: ignore[operator]


@contextlib.contextmanager
def native_attention(model: nn.Module) -> Iterator[None]:
    """transformers' own attention inside the context, for generation: document attention has no KV cache."""
    before = attention_implementation(model)
    use_native_attention(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
