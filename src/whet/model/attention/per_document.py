"""torch's own attention, one document at a time: runs everywhere."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.model.attention.ask import Ask, Documents
from whet.model.attention.reference import attended, causal


@torch.compiler.disable
def per_document_sdpa(query: Tensor, key: Tensor, value: Tensor, ask: Ask, documents: Documents) -> Tensor:
    """Scaled dot-product attention over each document; the definition where a layer asks for more than that knows."""
    parts = [
        _one(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], ask)
        for a, b in itertools.pairwise(documents.edges)
        if b > a
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


def _one(query: Tensor, key: Tensor, value: Tensor, ask: Ask) -> Tensor:
    length = query.shape[2]
    if ask.softcap is not None or ask.sinks is not None:
        return attended(query, key, value, ask, causal(length, ask.window, query.device))
    # a mask costs the fast kernels: only where the document outgrows the window
    windowed = ask.window is not None and ask.window < length
    mask = causal(length, ask.window, query.device) if windowed else None
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=ask.scale, enable_gqa=True
    )
