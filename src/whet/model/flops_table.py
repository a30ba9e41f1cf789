"""Where a model's arithmetic is, module by module; equal layers share a line."""

from __future__ import annotations

import re

import numpy as np
from torch import nn

from whet.model.flops import spans_of
from whet.model.matrices import matrices_of


def table(model: nn.Module, length: int, supervised: float) -> str:
    """FLOPs of the forward pass for a token of a document of `length` tokens, of which a part is supervised."""
    rows: dict[str, tuple[int, int, float]] = {}
    for matrix in matrices_of(model):
        _add(rows, re.sub(r"\.\d+(?=\.)", ".*", matrix.name), matrix.size, matrix.forward)
    for span in spans_of(model):
        name = "attention, all before" if span.window is None else f"attention, window of {span.window}"
        _add(rows, name, 0, span.forward * span.pairs(np.array([length])) / length)
    head = model.get_output_embeddings().weight.numel()  # type: ignore[operator]
    _add(rows, f"head, at {supervised:.0%} of the positions", head, 2 * head * supervised)
    total = sum(flops for _, _, flops in rows.values())
    wide = max(map(len, rows))
    lines = [f"{'module':<{wide}}  {'times':>5}  {'parameters':>14}  {'FLOPs/token':>14}  share"]
    for name, (count, size, flops) in sorted(rows.items(), key=lambda row: -row[1][2]):
        lines.append(f"{name:<{wide}}  {count:>5}  {size:>14,}  {flops:>14,.0f}  {flops / total:6.1%}")
    lines.append(f"{'all':<{wide}}  {'':>5}  {sum(size for _, size, _ in rows.values()):>14,}  {total:>14,.0f}")
    return "\n".join([*lines, f"Forward pass, in a document of {length} tokens.", ""])


def _add(rows: dict[str, tuple[int, int, float]], name: str, size: int, flops: float) -> None:
    count, sizes, sums = rows.get(name, (0, 0, 0.0))
    rows[name] = (count + 1, sizes + size, sums + flops)
