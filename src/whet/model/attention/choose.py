"""Which back-end serves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from whet.core.errors import WhetError
from whet.core.imports import has_triton
from whet.model.attention import long_documents
from whet.model.attention.look import Asked
from whet.model.attention.variable_length import WIDEST

LONG = 8192
"""Tokens from which on a document by itself is faster: cuDNN's kernels are a sixth faster than `short` at 32 768, and
take a call for each document, filled up to the next of a few lengths."""
_MEASURED = 128
"""The head width up to which `short` is known to be faster than varlen."""


def choose(
    wanted: str, device: torch.device, dtype: torch.dtype, seen: Sequence[Asked] = (), typical: float = 0
) -> str:
    """The back-end asked for, or the best for the device, for what the layers ask (`look`) and for documents of
    `typical` length: of the document in which the typical token stands."""
    reasons = {
        "cudnn": _against_cudnn(device, dtype, seen),
        "short": _against_short(device, dtype, seen),
        "varlen": _against_varlen(device, dtype, seen),
        "flex": _against_flex(device, dtype),
    }
    if wanted == "auto":
        if dtype.itemsize > 2:  # nothing is gained over sdpa, which is exact
            return "sdpa"
        better = {"cudnn": typical >= LONG, "short": all(layer.width <= _MEASURED for layer in seen)}
        serving = (name for name, reason in reasons.items() if reason is None and better.get(name, True))
        return next(serving, "sdpa")
    if reasons.get(wanted):
        raise WhetError(f"model.attention: {wanted} {reasons[wanted]}. Leave model.attention out to let whet choose")
    return wanted


def _against_cudnn(device: torch.device, dtype: torch.dtype, seen: Sequence[Asked]) -> str | None:
    against = _against_varlen(device, dtype, seen)
    if against is None and any(layer.ask.window is not None for layer in seen):
        return "knows no windows, which this model uses"
    if against is None and any(layer.width > long_documents.WIDEST for layer in seen):
        return f"knows heads up to {long_documents.WIDEST} wide; this model's are wider"
    return against


def _against_varlen(device: torch.device, dtype: torch.dtype, seen: Sequence[Asked]) -> str | None:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"needs a CUDA device and bf16 or fp16; here are {device.type} and {dtype}"
    if torch.version.hip or (torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)):
        return "needs an NVIDIA GPU of the Ampere generation or later"
    if any(layer.ask.softcap is not None or layer.ask.sinks is not None for layer in seen):
        return "knows neither soft-caps nor sinks, which this model uses; flex does"
    if any(layer.width > WIDEST for layer in seen):
        return f"knows heads up to {WIDEST} wide; this model's are {max(layer.width for layer in seen)}"
    return None


def _against_short(device: torch.device, dtype: torch.dtype, seen: Sequence[Asked]) -> str | None:
    if not has_triton():
        return "needs Triton, which is not installed"
    return _against_varlen(device, dtype, seen)  # asks for the same, and has tiles for heads as wide


def _against_flex(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or dtype == torch.float64:
        return f"needs a CUDA device and no fp64; here are {device.type} and {dtype}"
    return None
