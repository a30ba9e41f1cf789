"""Ulysses context parallelism: all-to-all between token shards and head shards around attention.

Each process holds a slice of a row's tokens with all heads. Before attention they exchange, and each gets some of the
heads with all tokens; after attention they exchange back. The model around it is unchanged.

Query heads that share a key head stay together. If the key heads are not a multiple of the group size, every query head
gets its own copy of its key and value; if the query heads are not either, zero heads are appended and their outputs
dropped. Shape letters: T tokens, H query heads, K key heads, E and V head widths, n processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from whet.core.errors import WhetError
from whet.model.attention import AttentionSpec, Documents, current_backend, install_backend
from whet.model.attention.recurrent import recurrent_layers
from whet.model.loss.loss_model import LossModel
from whet.parallel.mesh import Mesh

AttentionFunction = Callable[[Tensor, Tensor, Tensor, AttentionSpec, Documents], Tensor]


def apply_ulysses(root: LossModel, mesh: Mesh) -> None:
    """Make a model's attention exchange tokens and heads over the context-parallel group, if there is one."""
    if mesh.context_group is None:
        return
    if root.unpacked or recurrent_layers(root.language_model):
        raise WhetError(
            f"parallel.context: {mesh.context}, but this model passes state from token to token outside attention, so "
            "its rows cannot be split over processes. Set parallel.context=1"
        )
    install_backend(root.language_model, current_backend(root.language_model), ulysses_attention(mesh.context_group))


def ulysses_attention(group: dist.ProcessGroup) -> Callable[[AttentionFunction], AttentionFunction]:
    """Wraps an attention function for a group whose members hold the slices of a row in order."""

    def wrap(compute: AttentionFunction) -> AttentionFunction:
        @torch.compiler.disable  # collectives with a process group are not traced
        def attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, documents: Documents) -> Tensor:
            heads, members = query.shape[1], group.size()
            key, value = (_repeat_kv_heads(states, heads, members) for states in (key, value))
            query, key, value = (
                _AllToAll.apply(_pad_heads(states, members), group, 1, 2) for states in (query, key, value)
            )  # [1 H T/n E] → [1 H/n T E]
            if spec.sinks is not None:
                spec = replace(spec, sinks=_pad_heads(spec.sinks[None], members)[0].chunk(members)[group.rank()])
            out = compute(query, key, value, spec, documents)  # [1 T H/n V]
            whole: Tensor = _AllToAll.apply(out, group, 1, 2)  # [1 T/n H V]
            return whole[:, :, :heads]

        return attend

    return wrap


def _repeat_kv_heads(states: Tensor, heads: int, members: int) -> Tensor:
    """[1 K T E] → [1 K' T E], such that each member's share of the query heads has its keys or values."""
    kv_heads = states.shape[1]
    if kv_heads % members == 0 and heads % members == 0:
        return states
    if members % kv_heads == 0 and heads % members == 0:  # each member needs one of them
        return states.repeat_interleave(members // kv_heads, dim=1)
    return states.repeat_interleave(heads // kv_heads, dim=1)


def _pad_heads(states: Tensor, members: int) -> Tensor:
    """Append zero heads up to a multiple of the group size."""
    missing = -states.shape[1] % members
    return F.pad(states, (0, 0) * (states.ndim - 2) + (0, missing)) if missing else states


class _AllToAll(torch.autograd.Function):
    """Split along one dimension, exchange, concatenate along another; the backward pass swaps the dimensions."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup, split_dim: int, cat_dim: int) -> Tensor:
        ctx.group, ctx.split_dim, ctx.cat_dim = group, split_dim, cat_dim
        return _all_to_all(states, group, split_dim, cat_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.group, ctx.cat_dim, ctx.split_dim), None, None, None


def _all_to_all(states: Tensor, group: dist.ProcessGroup, split_dim: int, cat_dim: int) -> Tensor:
    parts = torch.stack(states.chunk(group.size(), dim=split_dim))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), dim=cat_dim)
