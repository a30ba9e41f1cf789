"""The loss, inside the root module: the sum of −log p over supervised tokens, without ever holding all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.core.errors import WhetError

_CHUNK_BYTES = 64 * 2**20  # logits alive at a time


@dataclass(frozen=True, slots=True)
class LossSum:
    """Over one micro-batch: the sum of −log p, and how many of the supervised tokens the model would have said."""

    loss: Tensor
    correct: Tensor


class _LinearCrossEntropy(torch.autograd.Function):
    """hidden [S, E] × weight [V, E] → sum of −log p. Gradients are made on the way, chunk by chunk, so that [S, V]
    never exists; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        loss_type = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=loss_type, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=loss_type) if needs_weight else None
        rows = max(1, _CHUNK_BYTES // (weight.shape[0] * loss_type.itemsize))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            chunk, wanted = hidden[part], targets[part]
            logits = (chunk @ weight.T).to(loss_type)
            correct += (logits.argmax(dim=-1) == wanted).sum()
            log_p = F.log_softmax(logits, dim=-1)
            loss -= log_p.gather(1, wanted[:, None]).sum()
            if not (needs_hidden or needs_weight):
                continue
            d_logits = log_p.exp_()
            d_logits[torch.arange(len(wanted), device=wanted.device), wanted] -= 1
            d_logits = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                d_weight.addmm_(d_logits.T.to(loss_type), chunk.to(loss_type))
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            None if d_hidden is None else d_hidden * scale.to(d_hidden.dtype),
            None if d_weight is None else (d_weight * scale).to(ctx.weight_dtype),
            None,
        )


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> LossSum:
    """Sum of −log softmax(hidden @ weightᵀ)[targets], and the number of targets that have the highest logit."""
    return LossSum(*_LinearCrossEntropy.apply(hidden, weight, targets))


class LossModel(nn.Module):
    """A causal language model that answers with its loss. The head sees supervised positions only."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, batch: Any) -> LossSum:
        """`batch` is a PackedBatch; the result sums over its supervised tokens."""
        hidden = self._hidden(batch.tokens, batch.positions, batch.cu_seqlens, batch.longest, batch.edges)
        head = self.language_model.get_output_embeddings()  # type: ignore[operator]
        chosen = hidden[0].index_select(0, batch.supervised_at)
        targets = batch.labels.index_select(0, batch.supervised_at)
        return linear_cross_entropy(chosen, head.weight.to(chosen.dtype), targets)

    def _hidden(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, longest: int, edges: Any) -> Tensor:
        body = self.language_model.base_model
        output = body(  # type: ignore[operator]
            input_ids=tokens[None], position_ids=positions[None], use_cache=False,
            document_cu_seqlens=cu_seqlens, document_longest=longest, document_edges=edges,
        )  # fmt: skip
        return output.last_hidden_state

    @torch.no_grad()
    def check_head(self, vocabulary: int) -> None:
        """Compare this loss with the model's own logits on a few tokens; refuse a head that does something else.

        Some architectures scale or cap their logits, or add a bias; training them with a plain head would look
        healthy and be wrong.
        """
        cap = getattr(self.language_model.config, "final_logit_softcapping", None)
        if cap is not None:  # too gentle to be seen on small logits
            raise WhetError(f"model.path: this model caps its logits at {cap}, which whet cannot train yet")
        device = next(self.parameters()).device
        tokens = torch.arange(8, device=device) * 7919 % vocabulary
        edges = torch.tensor([0, 8], device=device, dtype=torch.int32)
        positions = torch.arange(8, device=device)
        hidden = self._hidden(tokens, positions, edges, 8, (0, 8))
        head = self.language_model.get_output_embeddings()  # type: ignore[operator]
        own = self.language_model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, document_cu_seqlens=edges,
            document_longest=8, document_edges=(0, 8),
        ).logits[0]  # fmt: skip
        ours = hidden[0] @ head.weight.to(hidden.dtype).T
        difference = (own.float() - ours.float()).abs().max().item()
        rounding = 0.05 if hidden.dtype in (torch.bfloat16, torch.float16) or own.dtype != hidden.dtype else 1e-3
        if not difference <= rounding * own.float().abs().max().item():
            raise WhetError(
                f"model.path: this model does more with its logits than a plain output layer (they differ by "
                f"{difference:.3g}), so whet would train it wrongly. It is not supported yet"
            )
