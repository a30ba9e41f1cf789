"""Whether two ways to the same logits agree, as far as rounding allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.files import hash_file

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of a logit, relative to the largest logit, that rounding explains."""


@torch.inference_mode()
def logits_of(model: nn.Module, probes: Sequence[Sequence[int]]) -> Tensor:
    """[N, V] of every position of every probe, one probe at a time."""
    model.eval()
    device = next(model.parameters()).device
    return torch.cat([model(input_ids=torch.tensor([list(ids)], device=device)).logits[0].float() for ids in probes])


def compared(wanted: Tensor, found: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """What a certificate says of them. A greedy answer may differ where two logits are as good as equal."""
    difference = (found - wanted).abs().max().item()
    agree = (found.argmax(dim=-1) == wanted.argmax(dim=-1)).double().mean().item()
    allowed = _TOLERANCE.get(dtype, 0.1) * max(1.0, wanted.abs().max().item())
    return {
        "verified": difference <= allowed and agree > 0.95,  # false for NaN too
        "tokens": len(wanted),
        "max_logit_difference": difference,
        "same_next_token": agree,
    }


def file_hashes(folder: Path) -> dict[str, str]:
    """Of the files with weights."""
    return {file.name: hash_file(file) for file in sorted(folder.glob("*.safetensors"))}
