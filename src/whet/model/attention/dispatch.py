"""Choosing an attention back-end and registering it with transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from whet.compat.transformers_private import attention_implementation, supports_sdpa
from whet.core.console import warn
from whet.core.errors import WhetError
from whet.core.imports import has_triton
from whet.model.attention import backends
from whet.model.attention.backends import (
    VARLEN_MAX_HEAD_DIM,
    cudnn_attention_forward,
    eager_attention_forward,
    flex_attention_forward,
    sdpa_attention_forward,
)
from whet.model.attention.interface import AttentionBackend, Documents
from whet.model.attention.requirements import LayerAttention, spec_from_call
from whet.model.attention.short import short_attention_forward

# Which back-end serves.

CUDNN_MIN_LENGTH = 8192
"""Tokens from which on a document by itself is faster: cuDNN's kernels are a sixth faster than `short` at 32 768, and
take a call for each document, filled up to the next of a few lengths."""
_SHORT_MAX_HEAD_DIM = 128
"""The head width up to which `short` is known to be faster than varlen."""


def choose_backend(
    wanted: str, device: torch.device, dtype: torch.dtype, seen: Sequence[LayerAttention] = (), typical: float = 0
) -> str:
    """The back-end asked for, or the best for the device, for what the layers ask (`look`) and for documents of
    `typical` length: of the document in which the typical token stands."""
    reasons = {
        "cudnn": _why_not_cudnn(device, dtype, seen),
        "short": _why_not_short(device, dtype, seen),
        "varlen": _why_not_varlen(device, dtype, seen),
        "flex": _why_not_flex(device, dtype),
    }
    if wanted == "auto":
        if dtype.itemsize > 2:  # nothing is gained over sdpa, which is exact
            return "sdpa"
        better = {
            "cudnn": typical >= CUDNN_MIN_LENGTH,
            "short": all(layer.width <= _SHORT_MAX_HEAD_DIM for layer in seen),
        }
        serving = (name for name, reason in reasons.items() if reason is None and better.get(name, True))
        return next(serving, "sdpa")
    if reasons.get(wanted):
        raise WhetError(f"model.attention: {wanted} {reasons[wanted]}. Leave model.attention out to let whet choose")
    return wanted


def _why_not_cudnn(device: torch.device, dtype: torch.dtype, seen: Sequence[LayerAttention]) -> str | None:
    against = _why_not_varlen(device, dtype, seen)
    if against is None and any(layer.ask.window is not None for layer in seen):
        return "knows no windows, which this model uses"
    if against is None and any(layer.width > backends.CUDNN_MAX_HEAD_DIM for layer in seen):
        return f"knows heads up to {backends.CUDNN_MAX_HEAD_DIM} wide; this model's are wider"
    return against


def _why_not_varlen(device: torch.device, dtype: torch.dtype, seen: Sequence[LayerAttention]) -> str | None:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"needs a CUDA device and bf16 or fp16; here are {device.type} and {dtype}"
    if torch.version.hip or (torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)):
        return "needs an NVIDIA GPU of the Ampere generation or later"
    if any(layer.ask.softcap is not None or layer.ask.sinks is not None for layer in seen):
        return "knows neither soft-caps nor sinks, which this model uses; flex does"
    if any(layer.width > VARLEN_MAX_HEAD_DIM for layer in seen):
        return f"knows heads up to {VARLEN_MAX_HEAD_DIM} wide; this model's are {max(layer.width for layer in seen)}"
    return None


def _why_not_short(device: torch.device, dtype: torch.dtype, seen: Sequence[LayerAttention]) -> str | None:
    if not has_triton():
        return "needs Triton, which is not installed"
    return _why_not_varlen(device, dtype, seen)  # asks for the same, and has tiles for heads as wide


def _why_not_flex(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or dtype == torch.float64:
        return f"needs a CUDA device and no fp64; here are {device.type} and {dtype}"
    return None


# Back-ends, registered with transformers.

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
    "eager": "whet_reference",
    "varlen": "whet_varlen",
    "flex": "whet_blocks",
    "cudnn": "whet_long",
    "short": "whet_short",
}
"""A name with `sdpa`, `flex` or `flash` in it would make transformers check for its own."""


_WRAPPED_SUFFIX = "_across"

_FULLGRAPH_BACKENDS = ("varlen", "short", "eager")
"""The compiler passes by the others, which need to know on the host where documents begin, or ask other processes."""


def install_backend(
    model: nn.Module, backend: str, around: Callable[[AttentionBackend], AttentionBackend] | None = None
) -> None:
    """Make `model` (a transformers model) attend by documents from now on; `around` changes how the back-end is called,
    as for rows that several processes compute together."""
    if any(getattr(model.config, name, 0) for name in ("attention_dropout", "attn_pdrop")):
        warn("the model's configuration asks for dropout inside attention; whet trains without it")
    if backend == "varlen":
        backends.activate_newest_flash_attention()
    compute = around(BACKENDS[backend]) if around else BACKENDS[backend]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        scaling: float | None = None, *, documents: Documents, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        ask = spec_from_call(query, scaling, **kwargs)
        # rotary positions and norms leave fp32 behind under autocast
        kind = query.device.type
        mixed = kind != "meta" and torch.is_autocast_enabled(kind)  # torch knows no mixed precision there
        dtype = torch.get_autocast_dtype(kind) if mixed else value.dtype
        return compute(query.to(dtype), key.to(dtype), value.to(dtype), ask, documents), None

    # no mask goes with it: documents are told apart by their edges, and to see whether it needs one, transformers would
    # ask the device in every forward pass
    name = registered_name(backend) + (_WRAPPED_SUFFIX if around else "")
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)  # type: ignore[operator]


def registered_name(backend: str) -> str:
    """What transformers knows a back-end by."""
    return _REGISTERED_NAMES[backend]


def needs_document_spans(model: nn.Module) -> bool:
    """Whether the back-end that serves `model` asks for each token's document (`described`)."""
    return attention_implementation(model).removesuffix(_WRAPPED_SUFFIX) == registered_name("short")


def current_backend(model: nn.Module) -> str:
    """The back-end that serves `model`."""
    installed = attention_implementation(model).removesuffix(_WRAPPED_SUFFIX)
    return next((backend for backend, name in _REGISTERED_NAMES.items() if name == installed), f"its own ({installed})")


def describe_backend(model: nn.Module) -> str:
    """The back-end that serves `model`, and its kernel where that is not torch's own: `varlen (FA3)`."""
    backend = current_backend(model)
    kernel = backends.active_flash_attention() if backend == "varlen" else None
    return f"{backend} ({kernel})" if kernel else backend


def supports_fullgraph(model: nn.Module) -> bool:
    """Whether a compiled layer of `model` is one graph, with attention inside it, and not two around it."""
    return attention_implementation(model) in [_REGISTERED_NAMES[backend] for backend in _FULLGRAPH_BACKENDS]


def use_native_attention(model: nn.Module) -> None:
    """Make `model` attend as it does by itself."""
    # transformers' sdpa leaves soft-caps out without a word, and not every version says that it does not serve them
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    model.set_attn_implementation("sdpa" if supports_sdpa(model) and not capped else "eager")  # type: ignore[operator]


@contextlib.contextmanager
def native_attention(model: nn.Module) -> Iterator[None]:
    """transformers' own attention for a while, as for generating: that of documents knows no cache."""
    before = attention_implementation(model)
    use_native_attention(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
