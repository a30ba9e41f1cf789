"""The definition of attention, written out."""

from __future__ import annotations

import torch
from torch import Tensor

from whet.model.attention.ask import Ask, Documents


def attended(query: Tensor, key: Tensor, value: Tensor, ask: Ask, visible: Tensor) -> Tensor:
    """Attention over the keys that are `visible` [T T] to each query, as [1 H T V]; all scores exist at once."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * ask.scale
    if ask.softcap is not None:
        scores = ask.softcap * torch.tanh(scores / ask.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if ask.sinks is not None:
        sinks = ask.sinks.to(scores.dtype)[None, :, None, None].expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return shares[..., : key.shape[2]] @ value


def causal(length: int, window: int | None, device: torch.device) -> Tensor:
    """[T T] which keys a query sees within one document."""
    place = torch.arange(length, device=device)
    back = place[:, None] - place[None, :]
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def eager(query: Tensor, key: Tensor, value: Tensor, ask: Ask, documents: Documents) -> Tensor:
    """All documents at once under one mask: the reference for the other back-ends."""
    length, device = query.shape[2], query.device
    place = torch.arange(length, device=device, dtype=documents.cu_seqlens.dtype)
    document = torch.searchsorted(documents.cu_seqlens, place, right=True)
    visible = causal(length, ask.window, device) & (document[:, None] == document[None, :])
    return attended(query, key, value, ask, visible).transpose(1, 2)
