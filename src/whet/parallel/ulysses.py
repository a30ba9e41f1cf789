"""Ulysses sequence parallelism: all-to-all between sequence shards and head shards around attention."""

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
from whet.model.loss.loss_model import LossModel
from whet.parallel.mesh import Mesh

# Ulysses: processes that compute a row together trade tokens for heads where attention needs all tokens, and back.
#
# Each holds a slice of the tokens with all heads. Before attention they exchange, and each has some of the heads with all
# tokens; after it they exchange back. The model around it stays plain.
#
# Heads that share a key stay together. Where key heads do not divide among the processes, each query head brings its own
# copy of its key and value; where query heads do not divide either, heads of zeros fill up, whose results are dropped.

AttentionFunction = Callable[[Tensor, Tensor, Tensor, AttentionSpec, Documents], Tensor]


def apply_ulysses(root: LossModel, mesh: Mesh) -> None:
    """Let a model's attention work across those that compute the same rows, if there are any."""
    if mesh.slices is None:
        return
    if root.alone:
        raise WhetError(
            f"parallel.context: {mesh.context}, but this model does more from token to token than attend, so a row "
            "cannot be divided among processes. Set parallel.context=1"
        )
    install_backend(root.language_model, current_backend(root.language_model), ulysses_attention(mesh.slices))


def ulysses_attention(group: dist.ProcessGroup) -> Callable[[AttentionFunction], AttentionFunction]:
    """What makes of a back-end one that works across a group, whose members hold the slices of a row in order."""

    def around(compute: AttentionFunction) -> AttentionFunction:
        @torch.compiler.disable  # it talks to others
        def attend(query: Tensor, key: Tensor, value: Tensor, ask: AttentionSpec, documents: Documents) -> Tensor:
            heads, members = query.shape[1], group.size()
            key, value = (_repeat_kv_heads(states, heads, members) for states in (key, value))
            query, key, value = (
                _AllToAll.apply(_pad_heads(states, members), group, 1, 2) for states in (query, key, value)
            )
            if ask.sinks is not None:
                ask = replace(ask, sinks=_pad_heads(ask.sinks[None], members)[0].chunk(members)[group.rank()])
            out = compute(query, key, value, ask, documents)  # [1 T H/n V]
            whole: Tensor = _AllToAll.apply(out, group, 1, 2)
            return whole[:, :, :heads]

        return attend

    return around


def _repeat_kv_heads(states: Tensor, heads: int, members: int) -> Tensor:
    """Keys or values such that each member's share of the heads finds its own: [1 K T E] → [1 K' T E]."""
    kept = states.shape[1]
    if kept % members == 0 and heads % members == 0:
        return states
    if members % kept == 0 and heads % members == 0:  # each member needs one of them
        return states.repeat_interleave(members // kept, dim=1)
    return states.repeat_interleave(heads // kept, dim=1)


def _pad_heads(states: Tensor, members: int) -> Tensor:
    """With zeros behind, so that the heads divide."""
    missing = -states.shape[1] % members
    return F.pad(states, (0, 0) * (states.ndim - 2) + (0, missing)) if missing else states


class _AllToAll(torch.autograd.Function):
    """Cut along one dimension, give each member its part, and put what comes together along another; back, the same
    with both turned around."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return _all_to_all(states, group, cut, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.group, ctx.join, ctx.cut), None, None, None


def _all_to_all(states: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    parts = torch.stack(states.chunk(group.size(), dim=cut))
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return torch.cat(found.unbind(), dim=join)
