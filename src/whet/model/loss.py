"""The loss, inside the root module: the sum of −log p over supervised tokens, without ever holding all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model.attention import described, plain, unserved

_CHUNK_BYTES = 64 * 2**20  # logits alive at a time


@dataclass(frozen=True, slots=True)
class LossSum:
    """Over one micro-batch; S: its supervised positions, in the order of `supervised_at`."""

    objective: Tensor
    """What is differentiated: `weight` times the sum of what is to be made small."""
    nll: Tensor
    """[S] −log p of each supervised token, without a gradient."""
    hits: Tensor
    """[S] whether the model would have said that token."""

    @property
    def loss(self) -> Tensor:
        """The sum of −log p."""
        return self.nll.sum(dtype=torch.promote_types(self.nll.dtype, torch.float64))


class _LinearCrossEntropy(torch.autograd.Function):
    """hidden [S, E] × weight [V, E] → scale × sum of −log p. Gradients are made on the way, chunk by chunk, so that
    [S, V] never exists, and scaled while they are fp32: 1/n of a step, applied to bf16, would be off by up to 0.4 %."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        loss_type = torch.promote_types(hidden.dtype, torch.float32)
        nll = torch.empty(len(targets), dtype=loss_type, device=hidden.device)
        hits = torch.empty(len(targets), dtype=torch.bool, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=loss_type) if needs_weight else None
        rows = max(1, _CHUNK_BYTES // (weight.shape[0] * loss_type.itemsize))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            chunk, wanted = hidden[part], targets[part]
            logits = (chunk @ weight.T).to(loss_type)
            hits[part] = logits.argmax(dim=-1) == wanted
            log_p = F.log_softmax(logits, dim=-1)
            nll[part] = -log_p.gather(1, wanted[:, None])[:, 0]
            if not (needs_hidden or needs_weight):
                continue
            d_logits = log_p.exp_()
            d_logits[torch.arange(len(wanted), device=wanted.device), wanted] -= 1
            d_logits = d_logits.mul_(scale).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                d_weight.addmm_(d_logits.T.to(loss_type), chunk.to(loss_type))
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(nll, hits)
        return nll.sum() * scale, nll, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        outer = grads[0]  # 1 in training, so multiplying a bf16 tensor rounds nothing
        return (
            None if d_hidden is None else (d_hidden * outer).to(d_hidden.dtype),
            None if d_weight is None else (d_weight * outer).to(ctx.weight_dtype),
            None,
            None,
        )


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0) -> LossSum:
    """−log softmax(hidden @ weightᵀ)[targets] of each target; the objective is their sum, scaled."""
    return LossSum(*_LinearCrossEntropy.apply(hidden, weight, targets, scale))


class LossModel(nn.Module):
    """A causal language model that answers with its loss. The head sees supervised positions only."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, batch: Any, weight: float = 1.0) -> LossSum:
        """`batch` is a PackedBatch. `weight`: 1 ÷ the supervised tokens of the whole step, so that gradients of all
        micro-batches and ranks need only be summed."""
        hidden = self._hidden(batch.tokens, batch.positions, batch.cu_seqlens, batch.longest, batch.edges)
        head = self.language_model.get_output_embeddings()  # type: ignore[operator]
        chosen = hidden[0].index_select(0, batch.supervised_at)
        targets = batch.labels.index_select(0, batch.supervised_at)
        return linear_cross_entropy(chosen, head.weight.to(chosen.dtype), targets, weight)

    def _hidden(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, longest: int, edges: Any) -> Tensor:
        body = self.language_model.base_model
        output = body(  # type: ignore[operator]
            input_ids=tokens[None], position_ids=positions[None], use_cache=False,
            **described(cu_seqlens, longest, edges),
        )  # fmt: skip
        return output.last_hidden_state

    @torch.no_grad()
    def check(self, vocabulary: int) -> None:
        """Compare two packed documents with what the model itself makes of each alone; refuse where they differ.

        Some architectures carry state from token to token or have an attention of their own, so that packed
        conversations would see each other; some scale or cap their logits. Training them would look healthy and be
        wrong.
        """
        cap = getattr(self.language_model.config, "final_logit_softcapping", None)
        if cap is not None:  # too gentle to be seen on small logits
            raise WhetError(f"model.path: this model caps its logits at {cap}, which whet cannot train yet")
        wanted = unserved(self.language_model)
        if wanted is not None:  # windows are too wide for the documents below to notice
            raise WhetError(f"model.path: whet cannot attend as this model does: {wanted}")
        was_training = self.training
        self.eval()
        tokens = torch.arange(16, device=next(self.parameters()).device) * 7919 % vocabulary
        try:
            ours = self._logits_of_two(tokens)
            other = self._logits_of_two(torch.cat([tokens[:8].flip(0), tokens[8:]]))
            with plain(self.language_model):
                parts = [
                    self.language_model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split(8)
                ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WhetError(
                f"model.path: this architecture cannot be trained on packed documents ({error!r})"
            ) from None
        self.train(was_training)
        own = torch.cat(parts).float()
        leak = (ours[8:] - other[8:]).float().abs().max().item()  # the same kernels on the same shapes: no rounding
        if not leak <= 1e-5 * own.abs().max().item():
            raise WhetError(
                f"model.path: conversations packed into one row would see each other in this model (logits move by "
                f"{leak:.3g} when another conversation changes): it has layers with state, or an attention of its own. "
                "whet refuses to train it"
            )
        rounding = 0.05 if torch.is_autocast_enabled(tokens.device.type) or ours.dtype.itemsize < 4 else 1e-4
        difference = (own - ours.float()).abs().max().item()
        if not difference <= rounding * own.abs().max().item():
            raise WhetError(
                f"model.path: whet computes other logits for this model than it does itself (they differ by "
                f"{difference:.3g}): it does more with its logits than a product, or has an attention of its own. whet "
                "would train it wrongly, so it refuses"
            )

    def _logits_of_two(self, tokens: Tensor) -> Tensor:
        """Logits of a row whose halves are two documents."""
        half = len(tokens) // 2
        edges = (0, half, 2 * half)
        positions = torch.arange(half, device=tokens.device).repeat(2)
        cu_seqlens = torch.tensor(edges, device=tokens.device, dtype=torch.int32)
        hidden = self._hidden(tokens, positions, cu_seqlens, half, edges)[0]
        head = self.language_model.get_output_embeddings()  # type: ignore[operator]
        return hidden @ head.weight.to(hidden.dtype).T
