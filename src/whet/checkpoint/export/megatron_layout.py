"""Where Megatron-Core keeps the weights of a Llama: which of ours make one of its, and which part each process has.

Queries, keys and values are one matrix in which each group has its queries, then its key, then its value; gate and up
are one matrix, each process's gate over its up. Norms stand inside the matrix that follows them (Transformer Engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Part = Literal["whole", "rows", "columns", "vocabulary", "groups", "halves"]
_ROUNDING = 128  # Megatron's make-vocab-size-divisible-by


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model's configuration decides the layout."""

    layers: int
    heads: int
    groups: int
    head_size: int
    rows: int
    tied: bool
    biased: bool
    norms_heads: bool
    parallel: int

    @classmethod
    def of(cls, settings: Any, parallel: int) -> Shape:
        head = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
        return cls(
            settings.num_hidden_layers, settings.num_attention_heads, settings.num_key_value_heads, head,
            settings.vocab_size, bool(settings.tie_word_embeddings), settings.model_type == "qwen2",
            settings.model_type == "qwen3", parallel,
        )  # fmt: skip

    @property
    def padded_rows(self) -> int:
        unit = _ROUNDING * self.parallel
        return -(-self.rows // unit) * unit


@dataclass(frozen=True, slots=True)
class Entry:
    """One of Megatron's weights: its name, ours that it consists of, and how it is divided."""

    name: str
    ours: tuple[str, ...]
    part: Part


def entries(shape: Shape) -> list[Entry]:
    found = [Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary")]
    for number in range(shape.layers):
        to, ours = f"decoder.layers.{number}", f"model.layers.{number}"
        attention, mlp = f"{ours}.self_attn", f"{ours}.mlp"
        qkv = tuple(f"{attention}.{which}_proj" for which in "qkv")
        found += [
            Entry(f"{to}.self_attention.linear_qkv.layer_norm_weight", (f"{ours}.input_layernorm.weight",), "whole"),
            Entry(f"{to}.self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in qkv), "groups"),
            Entry(f"{to}.self_attention.linear_proj.weight", (f"{attention}.o_proj.weight",), "columns"),
            Entry(f"{to}.mlp.linear_fc1.layer_norm_weight", (f"{ours}.post_attention_layernorm.weight",), "whole"),
            Entry(f"{to}.mlp.linear_fc1.weight", (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), "halves"),
            Entry(f"{to}.mlp.linear_fc2.weight", (f"{mlp}.down_proj.weight",), "columns"),
        ]
        if shape.biased:
            name = f"{to}.self_attention.linear_qkv.bias"
            found.append(Entry(name, tuple(f"{one}.bias" for one in qkv), "groups"))
        if shape.norms_heads:
            for which in "qk":
                name = f"{to}.self_attention.{which}_layernorm.weight"
                found.append(Entry(name, (f"{attention}.{which}_norm.weight",), "whole"))
    found.append(Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "whole"))
    if not shape.tied:
        found.append(Entry("output_layer.weight", ("lm_head.weight",), "vocabulary"))
    return found


def join(entry: Entry, ours: Sequence[Tensor], shape: Shape, rank: int) -> Tensor:
    """The part of process `rank`."""
    if entry.part == "whole":
        return ours[0]
    if entry.part == "vocabulary":
        padding = ours[0].new_zeros(shape.padded_rows - shape.rows, ours[0].shape[1])
        return _share(torch.cat([ours[0], padding]), shape, rank)
    if entry.part == "columns":
        return _share(ours[0], shape, rank, dim=1)
    if entry.part == "halves":
        return torch.cat([_share(half, shape, rank) for half in ours])
    grouped = [one.reshape(shape.groups, -1, *one.shape[1:]) for one in ours]
    joined = torch.cat(grouped, dim=1)
    return _share(joined.reshape(-1, *joined.shape[2:]), shape, rank)


def divide(entry: Entry, parts: Sequence[Tensor], shape: Shape) -> list[Tensor]:
    """`join` undone: ours, from the parts of all processes."""
    if entry.part == "whole":
        return [parts[0]]
    if entry.part == "vocabulary":
        return [torch.cat(list(parts))[: shape.rows]]
    if entry.part == "columns":
        return [torch.cat(list(parts), dim=1)]
    if entry.part == "halves":
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[which] for half in halves]) for which in (0, 1)]
    whole = torch.cat(list(parts))
    grouped = whole.reshape(shape.groups, -1, *whole.shape[1:])
    queries = shape.heads // shape.groups * shape.head_size
    pieces = grouped.split([queries, shape.head_size, shape.head_size], dim=1)
    return [piece.reshape(-1, *piece.shape[2:]) for piece in pieces]


def _share(whole: Tensor, shape: Shape, rank: int, dim: int = 0) -> Tensor:
    return whole.chunk(shape.parallel, dim=dim)[rank]
