"""The same as `rows_torch` in one Triton kernel: logits are read twice and their gradient is written once, over
them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.model.loss.linear_cross_entropy import LossTerms, RowLosses

_BLOCK = 2048  # 8 numbers a thread: with more, too few programs run at once to keep the memory busy


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _row_losses_kernel(  # type: ignore[no-untyped-def]
    logits_at, targets_at, nll_at, cost_at, hits_at, d_logits_at, row_size, d_row_size, vocabulary,
    scale, cap, smoothing, z_loss, gradient_scale,
    has_cap: tl.constexpr, has_smoothing: tl.constexpr, has_gradient: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program, one row. First the softmax's denominator by the online way, a maximum and a sum for each lane."""
    row = tl.program_id(0).to(tl.int64)
    logits_at += row * row_size
    target = tl.load(targets_at + row)
    lanes = tl.arange(0, block)
    own = tl.load(logits_at + target).to(tl.float32) * scale
    if has_cap:
        own = cap * _tanh(own / cap)
    highest = tl.full((block,), -1e38, tl.float32)  # finite, so that a lane without a token adds 0 and not NaN
    total = tl.zeros((block,), tl.float32)
    everything = tl.zeros((block,), tl.float32)
    equal_before = tl.zeros((block,), tl.int32)
    for start in range(0, vocabulary, block):
        token = start + lanes
        known = token < vocabulary
        y = tl.load(logits_at + token, mask=known, other=0.0).to(tl.float32) * scale
        if has_cap:
            y = cap * _tanh(y / cap)
        y = tl.where(known, y, float("-inf"))
        above = y - highest
        part = tl.exp(-tl.abs(above))  # of the lower one, by the higher one
        total = tl.where(above > 0, total * part + 1, total + part)
        highest = tl.maximum(highest, y)
        equal_before += ((token < target) & (y == own)).to(tl.int32)
        if has_smoothing:
            everything += tl.where(known, y, 0.0)
    top = tl.max(highest, axis=0)
    denominator = tl.sum(total * tl.exp(highest - top), axis=0)
    log_total = tl.log(denominator)
    log_sum = top + log_total
    nll = log_total + (top - own)
    cost = (1 - smoothing) * nll + z_loss * log_sum * log_sum
    if has_smoothing:
        cost += smoothing * (log_total + (top - tl.sum(everything, axis=0) / vocabulary))
    tl.store(nll_at + row, nll)
    tl.store(cost_at + row, cost)
    hit = (own == top) & (tl.sum(equal_before, axis=0) == 0) & (nll == nll)
    tl.store(hits_at + row, hit.to(tl.uint8))
    if has_gradient:
        d_logits_at += row * d_row_size
        factor = (1 + 2 * z_loss * log_sum) / denominator
        following = tl.load(logits_at + lanes, mask=lanes < vocabulary, other=0.0)
        for start in range(0, vocabulary, block):
            token = start + lanes
            y = following.to(tl.float32) * scale
            # on its way while this block is computed
            following = tl.load(logits_at + token + block, mask=token + block < vocabulary, other=0.0)
            slope = tl.full((block,), 1.0, tl.float32)
            if has_cap:
                tanh = _tanh(y / cap)
                y = cap * tanh
                slope = 1 - tanh * tanh
            tl.debug_barrier()  # the gradient may be written over logits: all lanes have read theirs
            d_y = tl.exp(y - top) * factor - smoothing / vocabulary - tl.where(token == target, 1 - smoothing, 0.0)
            d_logit = (d_y * slope * scale * gradient_scale).to(d_logits_at.dtype.element_ty)
            tl.store(d_logits_at + token, d_logit, mask=token < vocabulary)


def row_losses_triton(logits: Tensor, targets: Tensor, terms: LossTerms, gradient: torch.dtype | None) -> RowLosses:
    """Computes in fp32. Rows beyond those that have a target are zeros, and so is their gradient."""
    count, vocabulary = len(targets), logits.shape[1]
    nll = torch.empty(count, dtype=torch.float32, device=logits.device)
    cost, hits = torch.empty_like(nll), torch.empty_like(nll, dtype=torch.uint8)
    if gradient is None:
        d_logits = logits
    elif vocabulary % 4 == 0:
        # in the front of its row: a block's gradient ends before the logits of the next begin
        d_logits = logits.view(gradient)[:, :vocabulary]
    else:  # rows begin where matrix products are fast
        room = triton.cdiv(vocabulary, 8) * 8
        d_logits = torch.zeros(len(logits), room, dtype=gradient, device=logits.device)[:, :vocabulary]
    if count:
        _row_losses_kernel[(count,)](
            logits, targets, nll, cost, hits, d_logits, logits.stride(0), d_logits.stride(0), vocabulary,
            terms.scale, float(terms.cap or 1), terms.smoothing, terms.z_loss, terms.gradient_scale,
            has_cap=terms.cap is not None, has_smoothing=terms.smoothing > 0, has_gradient=gradient is not None,
            block=min(_BLOCK, triton.next_power_of_2(vocabulary)), num_warps=8,
        )  # fmt: skip
    return RowLosses(nll, cost, hits.view(torch.bool), None if gradient is None else d_logits)
