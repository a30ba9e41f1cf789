"""Reference forward pass of a GPT-NeoX checkpoint, rank by rank, without joining its matrices.

Shape letters: T tokens, E hidden size, H heads of a rank, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.convert.neox_files import MLP_DOWN_NAMES, MLP_UP_NAMES

if TYPE_CHECKING:
    from whet.convert.neox import NeoXCheckpoint


@torch.inference_mode()
def reference_logits(checkpoint: NeoXCheckpoint, ids: Sequence[int]) -> Tensor:
    """[T, V] in fp32, with the tensors of one layer in memory at a time."""
    tokens = torch.tensor(list(ids))
    x_te = _embed(checkpoint, tokens)
    for layer in range(2, checkpoint.layers + 2):
        x_te = _layer(checkpoint, layer, x_te)
    x_te = _norm(checkpoint, checkpoint.layers + 3, "norm", x_te)
    tied = "final_linear.weight" not in checkpoint.source.keys.get(checkpoint.layers + 4, ())
    where = (0, "word_embeddings.weight") if tied else (checkpoint.layers + 4, "final_linear.weight")
    return torch.cat([x_te @ part.float().T for part in checkpoint.source.tensors(*where)], dim=-1)


def _embed(checkpoint: NeoXCheckpoint, tokens: Tensor) -> Tensor:
    """Each rank embeds the tokens of its part of the vocabulary."""
    parts = checkpoint.source.tensors(0, "word_embeddings.weight")
    rows, total = len(parts[0]), torch.zeros(len(tokens), parts[0].shape[1])
    for rank, part in enumerate(parts):
        own = (tokens >= rank * rows) & (tokens < (rank + 1) * rows)
        total[own] = part[tokens[own] - rank * rows].float()
    return total


def _layer(checkpoint: NeoXCheckpoint, layer: int, x_te: Tensor) -> Tensor:
    attended = _attention(checkpoint, layer, _norm(checkpoint, layer, "input_layernorm", x_te))
    if not checkpoint.is_llama and checkpoint.config.use_parallel_residual:
        return x_te + attended + _mlp(checkpoint, layer, _norm(checkpoint, layer, "post_attention_layernorm", x_te))
    x_te = x_te + attended
    return x_te + _mlp(checkpoint, layer, _norm(checkpoint, layer, "post_attention_layernorm", x_te))


def _norm(checkpoint: NeoXCheckpoint, layer: int, name: str, x_te: Tensor) -> Tensor:
    def parameter(kind: str) -> Tensor:
        return checkpoint.join_replicated(checkpoint.source.tensors(layer, f"{name}.{kind}")).float()

    if checkpoint.is_llama:
        mean = x_te.pow(2).mean(dim=-1, keepdim=True)
        return x_te / (mean + checkpoint.config.rms_norm_eps).sqrt() * parameter("scale")
    return F.layer_norm(x_te, x_te.shape[-1:], parameter("weight"), parameter("bias"), checkpoint.config.layer_norm_eps)


def _bias(checkpoint: NeoXCheckpoint, layer: int, name: str | None) -> Tensor | float:
    if name is None or name not in checkpoint.source.keys[layer]:
        return 0.0
    return checkpoint.join_row_parallel_bias(checkpoint.source.tensors(layer, name)).float()


def _attention(checkpoint: NeoXCheckpoint, layer: int, x_te: Tensor) -> Tensor:
    config, ranks = checkpoint.config, checkpoint.source.ranks
    heads = config.num_attention_heads // ranks
    keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // ranks
    width = config.hidden_size // config.num_attention_heads
    name, known = "attention.query_key_value", checkpoint.source.keys[layer]
    biases = checkpoint.source.tensors(layer, f"{name}.bias") if f"{name}.bias" in known else [None] * ranks
    weights = checkpoint.source.tensors(layer, f"{name}.weight")
    outputs = checkpoint.source.tensors(layer, "attention.dense.weight")
    total = torch.zeros_like(x_te)
    for weight, bias, out in zip(weights, biases, outputs, strict=True):
        mixed = F.linear(x_te, weight.float(), None if bias is None else bias.float())
        if heads == keys:
            q, k, v = mixed.view(len(x_te), heads, 3 * width).split(width, dim=-1)
        else:
            q, k, v = mixed.split([heads * width, keys * width, keys * width], dim=-1)
        q, k, v = (side.reshape(len(x_te), -1, width).transpose(0, 1) for side in (q, k, v))  # [H, T, D]
        q, k = _apply_rotary(q, config), _apply_rotary(k, config)
        k, v = (side.repeat_interleave(heads // keys, dim=0) for side in (k, v))
        scores = q @ k.transpose(1, 2) / width**0.5
        future = torch.ones(len(x_te), len(x_te), dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v
        total += mixed.transpose(0, 1).reshape(len(x_te), -1) @ out.float().T
    return total + _bias(checkpoint, layer, "attention.dense.bias")


def _apply_rotary(x_htd: Tensor, config: object) -> Tensor:
    """Rotary positions on the first partial_rotary_factor of each head."""
    rope = config.rope_parameters  # type: ignore[attr-defined]
    rotary_dim = int(x_htd.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    rotated, rest = x_htd[..., :rotary_dim], x_htd[..., rotary_dim:]
    inv_freq = rope["rope_theta"] ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    angle = torch.arange(x_htd.shape[1]).float()[:, None] * inv_freq
    cos, sin = angle.cos(), angle.sin()
    x1, x2 = rotated.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)


def _mlp(checkpoint: NeoXCheckpoint, layer: int, x_te: Tensor) -> Tensor:
    source = checkpoint.source
    down = checkpoint.find_name(layer, MLP_DOWN_NAMES)
    assert down is not None
    parts = source.tensors(layer, down)
    total = torch.zeros_like(x_te)
    for rank, part in enumerate(parts):
        total += _mlp_hidden(checkpoint, layer, rank, x_te) @ part.float().T
    return total + _bias(checkpoint, layer, down.replace("weight", "bias"))


def _mlp_hidden(checkpoint: NeoXCheckpoint, layer: int, rank: int, x_te: Tensor) -> Tensor:
    """The intermediate activations of a rank."""
    source = checkpoint.source
    if checkpoint.has_split_mlp:
        gate, up = (source.tensors(layer, f"mlp.{name}.weight")[rank].float() for name in ("w1", "w3"))
        return F.silu(x_te @ gate.T) * (x_te @ up.T)
    name = checkpoint.find_name(layer, MLP_UP_NAMES)
    assert name is not None
    has_bias = name.replace("weight", "bias") in source.keys[layer]
    bias = source.tensors(layer, name.replace("weight", "bias"))[rank].float() if has_bias else None
    y = F.linear(x_te, source.tensors(layer, name)[rank].float(), bias)
    if checkpoint.is_llama:
        up, gate = y.chunk(2, dim=-1)
        return up * F.silu(gate)
    return F.gelu(y, approximate="tanh" if checkpoint.config.hidden_act == "gelu_pytorch_tanh" else "none")
