"""What a model needs of its attention, which back-end serves it, and its registration with transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from whet.compat.flash_attention import why_not_flash_attention_4
from whet.compat.transformers_private import attention_implementation, supports_sdpa
from whet.core.errors import WhetError
from whet.core.resources import has_triton
from whet.model.attention import backends
from whet.model.attention.backends import (
    VARLEN_MAX_HEAD_DIM,
    causal_mask,
    cudnn_attention_forward,
    eager_attention_forward,
    fa4_attention_forward,
    flex_attention_forward,
    reference_attention,
    sdpa_attention_forward,
    short_attention_forward,
)
from whet.model.attention.interface import AttentionBackend, AttentionSpec, Documents, PackingError, spec_from_call
from whet.model.attention.recurrent import recurrent_layers
from whet.model.modules import eval_mode

# What each layer needs of its attention, recorded from a forward pass over a few tokens
#
# A sliding window can be given twice: as a keyword argument, which back-ends implement, and in the mask that
# transformers builds, which whet does not use. If the two differ, whet would train with another attention than the
# model's own, and no short comparison would notice, because windows are thousands of tokens wide. So both are recorded
# and compared.

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


FA4_MIN_LENGTH = 4096
"""Typical document length from which fa4 is chosen: 1.1 to 1.3 times as fast as `short` and cudnn, both passes
together, on an H200."""
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
        "fa4": _why_not_fa4(device, dtype, layers),
        "cudnn": _why_not_cudnn(device, dtype, layers),
        "short": _why_not_short(device, dtype, layers),
        "varlen": _why_not_varlen(device, dtype, layers),
        "flex": _why_not_flex(device, dtype),
    }
    if requested == "auto":
        if dtype.itemsize > 2:  # no other back-end is faster than sdpa there
            return "sdpa"
        is_faster = {
            "fa4": typical_length >= FA4_MIN_LENGTH,
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


def _why_not_fa4(device: torch.device, dtype: torch.dtype, layers: Sequence[LayerAttention]) -> str | None:
    reason = _why_not_varlen(device, dtype, layers) or why_not_flash_attention_4()
    if reason is None and any(layer.head_dim not in backends.FA4_HEAD_DIMS for layer in layers):
        dims = " and ".join(map(str, backends.FA4_HEAD_DIMS))
        return f"supports head dimensions of {dims}; this model has others"
    if reason is None and torch.are_deterministic_algorithms_enabled():
        return "is not deterministic (train.deterministic)"
    return reason


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
    "fa4": fa4_attention_forward,
    "flex": flex_attention_forward,
    "cudnn": cudnn_attention_forward,
    "short": short_attention_forward,
}

_REGISTERED_NAMES = {
    "sdpa": "whet_per_document",
    "eager": "whet_eager",
    "varlen": "whet_varlen",
    "fa4": "whet_fa4",
    "flex": "whet_block_mask",
    "cudnn": "whet_cudnn",
    "short": "whet_short",
}
"""transformers runs its own availability checks for names that contain `sdpa`, `flex` or `flash`."""

_WRAPPED_SUFFIX = "_wrapped"

_FULLGRAPH_BACKENDS = ("varlen", "fa4", "short", "eager")
"""The others break the graph: they read document boundaries on the host, or communicate with other processes."""


def install_backend(
    model: nn.Module, backend: str, wrap: Callable[[AttentionBackend], AttentionBackend] | None = None
) -> None:
    """Make `model` (a transformers model) attend within documents. `wrap` decorates the back-end, as sequence
    parallelism does."""
    if backend == "varlen":
        backends.activate_flash_attention_3()
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
