"""cuDNN's attention, one document at a time: the fastest there is for long ones.

It plans anew for each length, which takes longer than the attention itself, so documents are filled up to a few
lengths. What is filled up comes last, where nothing that is real can see it.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from whet.core.errors import WhetError
from whet.model.attention.ask import Ask, Documents

WIDEST = 128
"""The head width up to which it goes backward."""
_STEP = 1024


@torch.compiler.disable
def cudnn(query: Tensor, key: Tensor, value: Tensor, ask: Ask, documents: Documents) -> Tensor:
    """A compiled layer is two graphs around it, because where documents begin is known on the host alone."""
    windowed = ask.window is not None and ask.window < documents.longest
    if windowed or ask.softcap is not None or ask.sinks is not None:
        raise WhetError("model.attention: cudnn knows neither windows nor soft-caps nor sinks, which this model uses")
    edges = [(a, b) for a, b in itertools.pairwise(documents.edges) if b > a]
    parts = [_one(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], ask.scale) for a, b in edges]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


def _one(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    length = query.shape[2]
    missing = -length % _STEP
    if missing:
        query, key, value = (F.pad(states, (0, 0, 0, missing)) for states in (query, key, value))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out[:, :, :length]
