"""torch's variable-length flash attention on CUDA: one kernel for all documents."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention.varlen import varlen_attn

from whet.core.console import say, warn
from whet.core.errors import WhetError
from whet.model.attention.ask import Ask, Documents

WIDEST = 256
"""The head width up to which the kernel is made."""

# torch 2.13 wants to be told of grouped queries, 2.11 rejects the argument and knows by itself
_OPTIONS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen(query: Tensor, key: Tensor, value: Tensor, ask: Ask, documents: Documents) -> Tensor:
    """Compiled layers compile through this one: nothing in it looks at the edges."""
    if ask.softcap is not None or ask.sinks is not None:
        raise WhetError("model.attention: varlen knows neither soft-caps nor sinks, which this model uses; flex does")
    width = max(query.shape[-1], value.shape[-1])
    width += -width % 8  # the kernel takes one width, in eights; zeros add nothing to a score
    q, k, v = (_rows(states, width) for states in (query, key, value))
    windowed = ask.window is not None and ask.window < documents.longest
    window = (ask.window - 1, 0) if windowed and ask.window is not None else (-1, 0)
    cu_seqlens, longest = documents.cu_seqlens, documents.longest
    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=ask.scale, window_size=window, **_OPTIONS
    )
    assert isinstance(out, Tensor)
    return out[None, ..., : value.shape[-1]]


def _rows(states: Tensor, width: int) -> Tensor:
    """[1 H T E] → [T H width]"""
    rows = states[0].transpose(0, 1)
    return F.pad(rows, (0, width - rows.shape[-1])) if rows.shape[-1] < width else rows.contiguous()


def newest_kernel() -> None:
    """Let flash attention 3 or 4 serve where its package is installed for this GPU; otherwise torch's own stays."""
    activate = getattr(torch_attention, "activate_flash_attention_impl", None)
    if activate is None or not torch.cuda.is_available() or kernel() is not None:
        return
    for name in {9: ("FA3", "FA4"), 10: ("FA4",)}.get(torch.cuda.get_device_capability()[0], ()):
        try:
            activate(name)
        except ImportError:
            continue
        except (RuntimeError, ValueError, OSError, AttributeError) as error:
            warn(f"{name} is installed and cannot be used ({error}); the next best serves")
            continue
        say(f"attention: {name} serves varlen")
        return


def kernel() -> str | None:
    """FA3 or FA4 where active; None: torch's own."""
    current = getattr(torch_attention, "current_flash_attention_impl", None)
    return current() if current is not None else None
