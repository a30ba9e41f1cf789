"""Linear cross-entropy: from hidden states to the loss and its gradients in chunks, without materialising all logits.

Shape letters: S supervised positions, E hidden size, V vocabulary, R rows of a chunk."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.core.resources import has_triton
from whet.model.loss.output_head import OutputHead

# Losses of rows of logits: the definition in plain torch


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The cost of a row: with y = cap · tanh(scale · logits / cap) and ε = smoothing,
    (1 − ε) · −log p(target) + ε · mean over the vocabulary of −log p + z_loss · logsumexp(y)²."""

    scale: float = 1.0
    cap: float | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    gradient_scale: float = 1.0
    """Factor on the gradient of the logits, a power of two, against underflow in fp16."""


class RowLosses(NamedTuple):
    """Results for R rows of V logits."""

    nll: Tensor
    """[R] −log p of the target."""
    cost: Tensor
    """[R] the objective: with smoothing and z-loss."""
    hits: Tensor
    """[R] whether the target is the argmax (the first one among ties)."""
    d_logits: Tensor | None
    """[R, V] gradient of the cost with respect to the raw logits, times `gradient_scale`."""


class RowLossFunction(Protocol):
    def __call__(self, logits: Tensor, targets: Tensor, terms: LossTerms, gradient: torch.dtype | None) -> RowLosses:
        """`logits` [R, V] may be overwritten. `gradient`: the dtype of d_logits; None: do not compute it."""


def row_losses_torch(logits: Tensor, targets: Tensor, terms: LossTerms, gradient: torch.dtype | None) -> RowLosses:
    """Computes in the dtype of the logits, on any device."""
    slope = None
    if terms.scale != 1:
        logits = logits.mul_(terms.scale)
    if terms.cap is not None:
        tanh = logits.div_(terms.cap).tanh_()
        slope = None if gradient is None else 1 - tanh * tanh
        logits = tanh.mul_(terms.cap)
    hits = logits.argmax(dim=-1) == targets
    highest = logits.amax(dim=-1, keepdim=True)
    shifted = logits.sub_(highest)
    own = shifted.gather(1, targets[:, None])[:, 0]
    mean = shifted.mean(dim=-1) if terms.smoothing else None
    exponentials = shifted.exp_()
    total = exponentials.sum(dim=-1)
    log_total = total.log()
    nll = cost = log_total - own  # logsumexp − logit would lose precision for large logits
    log_sum = highest[:, 0] + log_total
    if mean is not None:
        cost = (1 - terms.smoothing) * nll + terms.smoothing * (log_total - mean)
    if terms.z_loss:
        cost = cost + terms.z_loss * log_sum**2
    if gradient is None:
        return RowLosses(nll, cost, hits, None)
    d_logits = exponentials.mul_(((1 + 2 * terms.z_loss * log_sum) / total)[:, None])
    if terms.smoothing:
        d_logits.sub_(terms.smoothing / logits.shape[1])
    d_logits[torch.arange(len(targets), device=targets.device), targets] -= 1 - terms.smoothing
    if slope is not None:
        d_logits.mul_(slope)
    if terms.scale * terms.gradient_scale != 1:
        d_logits.mul_(terms.scale * terms.gradient_scale)
    return RowLosses(nll, cost, hits, d_logits.to(gradient))


# Linear cross-entropy, chunk by chunk

_CHUNK_BYTES_CPU = 64 * 2**20  # logits and their gradient in memory at a time
_CHUNK_BYTES_GPU = 2**29
_CHUNK_BYTES_GPU_TRAINED = 2**30  # each chunk reads and writes all of d_weight, so fewer chunks are faster
_ROW_TILE = 256  # chunks are multiples of this on a GPU: full tiles are faster


@dataclass(frozen=True, slots=True)
class LossSum:
    """The loss of one micro-batch. S: its supervised positions, in the order of `supervised_at`."""

    objective: Tensor
    """What is differentiated: `weight` times the sum of the cost."""
    nll: Tensor
    """[S] −log p of each supervised token, without a gradient, smoothing or z-loss."""
    hits: Tensor
    """[S] whether the supervised token is the argmax."""

    @property
    def loss(self) -> Tensor:
        """The sum of −log p."""
        return self.nll.sum(dtype=torch.promote_types(self.nll.dtype, torch.float64))


def linear_cross_entropy(
    hidden: Tensor, head: OutputHead, targets: Tensor, scale: float = 1.0, smoothing: float = 0.0, z_loss: float = 0.0
) -> LossSum:
    """−log p of each target after `hidden` [S, E]; the objective is their sum, with smoothing and z-loss, scaled."""
    terms = LossTerms(head.scale, head.cap, smoothing, z_loss)
    return LossSum(
        *_LinearCrossEntropy.apply(hidden, head.weight, head.bias, targets, scale, terms, torch.is_grad_enabled())
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes gradients in the forward pass, chunk by chunk, so that [S, V] logits never exist. Gradients are summed
    and scaled in fp32 and rounded once, to the dtype of their tensor: scaling bf16 gradients errs by up to 0.4 %.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, terms: LossTerms,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        needs_hidden, needs_weight, needs_bias = (with_gradient and needed for needed in ctx.needs_input_grad[:3])
        compute = _compute_dtype(hidden)
        exact = torch.promote_types(compute, torch.float32)
        if compute == torch.float16:  # 1 / V is subnormal in fp16
            terms = replace(terms, gradient_scale=1024.0)
        gradient = compute if needs_hidden or needs_weight or needs_bias else None
        nll = torch.empty(len(targets), dtype=exact, device=hidden.device)
        cost, hits = torch.empty_like(nll), torch.empty_like(nll, dtype=torch.bool)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=exact) if needs_bias else None  # type: ignore[arg-type]
        matrix = weight.to(compute)
        count = rows_per_chunk(hidden.is_cuda, len(weight) * exact.itemsize, needs_weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), count):
                part = slice(start, start + count)
                chunk = _pad_to_tile(hidden[part].to(compute))
                rows = _chunk_losses(chunk, matrix, bias, targets[part], terms, gradient)
                nll[part], cost[part], hits[part] = rows.nll, rows.cost, rows.hits
                if rows.d_logits is None:
                    continue
                if d_hidden is not None:
                    here = _matmul_fp32(rows.d_logits, matrix)[: len(rows.nll)]
                    d_hidden[part] = here.mul_(scale / terms.gradient_scale)
                if d_weight is not None:
                    _addmm_fp32_(d_weight, rows.d_logits.T, chunk)
                if d_bias is not None:
                    d_bias += rows.d_logits.sum(dim=0, dtype=exact)
                del rows  # before the next chunk allocates its logits
        sums = [
            None if total is None else total.mul_(scale / terms.gradient_scale).to(like.dtype)
            for total, like in ((d_weight, weight), (d_bias, weight if bias is None else bias))
        ]
        ctx.save_for_backward(d_hidden, *sums)
        ctx.mark_non_differentiable(nll, hits)
        return cost.sum() * scale, nll, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        outer = grads[0]  # 1 in training, so that multiplying bf16 rounds nothing
        found = [None if saved is None else saved * outer.to(saved.dtype) for saved in ctx.saved_tensors]
        return (*found, None, None, None, None)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of the products' operands: 16 bits on CUDA, which accumulates in fp32; at least fp32 elsewhere."""
    if not hidden.is_cuda or torch.version.hip is not None:
        return torch.promote_types(hidden.dtype, torch.float32)
    if torch.is_autocast_enabled("cuda") and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype("cuda")  # norms with fp32 weights return fp32 there
    return hidden.dtype


def _matmul_fp32(left: Tensor, right: Tensor) -> Tensor:
    """left @ right; fp32 for 16-bit operands."""
    return torch.mm(left, right, out_dtype=torch.float32) if left.dtype.itemsize == 2 else left @ right


def _addmm_fp32_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; 16-bit operands accumulate into fp32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def rows_per_chunk(on_cuda: bool, bytes_of_row: int, needs_weight: bool) -> int:
    """Positions whose logits, `bytes_of_row` each, are in memory at a time; `needs_weight`: the head is trained."""
    if not on_cuda:
        return max(1, _CHUNK_BYTES_CPU // bytes_of_row)
    count = max(1, (_CHUNK_BYTES_GPU_TRAINED if needs_weight else _CHUNK_BYTES_GPU) // bytes_of_row)
    return count if count < _ROW_TILE else count // _ROW_TILE * _ROW_TILE


def _pad_to_tile(chunk: Tensor) -> Tensor:
    """Pad the last chunk with zero rows on a GPU: its size differs from step to step, and for each new size cuBLAS
    selects a kernel again, which takes 1 to 2 ms."""
    missing = -len(chunk) % _ROW_TILE if chunk.is_cuda else 0
    return F.pad(chunk, (0, 0, 0, missing)) if missing else chunk


def _chunk_losses(
    chunk: Tensor, matrix: Tensor, bias: Tensor | None, targets: Tensor, terms: LossTerms, gradient: torch.dtype | None
) -> RowLosses:
    """Losses of the rows that have a target; the gradient of the others, which are padding, is zero."""
    logits = _matmul_fp32(chunk, matrix.T)
    fused = _triton_row_losses() if logits.is_cuda and logits.dtype == torch.float32 else None
    if bias is not None:
        logits[: len(targets)] += bias
    if fused is not None or len(targets) == len(logits):
        return (fused or row_losses_torch)(logits, targets, terms, gradient)
    rows = row_losses_torch(logits[: len(targets)], targets, terms, gradient)
    if rows.d_logits is None:
        return rows
    return rows._replace(d_logits=F.pad(rows.d_logits, (0, 0, 0, len(logits) - len(targets))))


@functools.cache
def _triton_row_losses() -> RowLossFunction | None:
    if not has_triton():
        return None
    from whet.model.loss.cross_entropy_kernel import row_losses_triton

    return row_losses_triton
