"""Private API of flash-attn-4 (`flash_attn.cute.interface`), seen in 4.0.0b36.

torch's own adapter (`activate_flash_attention_impl("FA4")` in 2.11 and 2.13) expects two results of `_flash_attn_fwd`;
this version returns five.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from whet.core.files import cache_dir


@functools.cache
def has_flash_attention_4() -> bool:
    """Whether the package and its compiler are installed; imports neither."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in ("flash_attn.cute", "cutlass"))
    except (ImportError, ValueError):  # another package is called flash_attn
        return False


@functools.cache
def _interface() -> Any:
    """Its kernels are compiled when they are first used, which takes seconds; whet's cache keeps them."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_dir() / "compiled" / "flash-attn-4"))
    from flash_attn.cute import interface

    return interface


def flash_attention_4_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """`_flash_attn_fwd`, causal within documents: [T H E] and [T K E] → [T H E], and [H T] fp32: ln of the sum of
    exponentials. Window 0: none."""
    out, lse, *_ = _interface()._flash_attn_fwd(
        query, key, value, return_lse=True, softmax_scale=scale, **_bounds(cu_seqlens, longest, window)
    )
    return out, lse


def flash_attention_4_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, out: Tensor, lse: Tensor,
    longest: int, scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`_flash_attn_bwd`: the gradients of query, key and value."""
    dq, dk, dv, *_ = _interface()._flash_attn_bwd(
        query, key, value, out, d_out, lse, softmax_scale=scale, **_bounds(cu_seqlens, longest, window)
    )
    return dq, dk, dv


def _bounds(cu_seqlens: Tensor, longest: int, window: int) -> dict[str, Any]:
    return {
        "causal": True,
        "window_size_left": window - 1 if window else None,
        "window_size_right": 0 if window else None,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def why_not_flash_attention_4() -> str | None:
    """Why this machine cannot use it; None if it can."""
    if not has_flash_attention_4():
        return "needs the package flash-attn-4: pip install 'whet[flash]'"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10):
        return "needs an NVIDIA GPU of the Hopper generation or later"
    return None
