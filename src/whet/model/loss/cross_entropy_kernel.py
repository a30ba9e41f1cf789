"""`row_losses_torch` as one Triton kernel, which reads logits twice and overwrites them with their gradient once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.model.loss.linear_cross_entropy import LossTerms, RowLosses

_BLOCK = 2048  # 8 elements for each thread: with more, occupancy is too low to saturate memory


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _row_losses_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, nll_ptr, cost_ptr, hits_ptr, d_logits_ptr, row_stride, d_row_stride, vocabulary,
    scale, cap, smoothing, z_loss, gradient_scale,
    has_cap: tl.constexpr, has_smoothing: tl.constexpr, has_gradient: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program for one row. First the softmax denominator, online, with a maximum and a sum for each lane."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    lane = tl.arange(0, block)
    target_logit = tl.load(logits_ptr + target).to(tl.float32) * scale
    if has_cap:
        target_logit = cap * _tanh(target_logit / cap)
    lane_max = tl.full((block,), -1e38, tl.float32)  # finite, so that a lane without tokens gives 0, not NaN
    lane_sum = tl.zeros((block,), tl.float32)
    lane_logits = tl.zeros((block,), tl.float32)
    earlier_ties = tl.zeros((block,), tl.int32)
    for start in range(0, vocabulary, block):
        token = start + lane
        mask = token < vocabulary
        y = tl.load(logits_ptr + token, mask=mask, other=0.0).to(tl.float32) * scale
        if has_cap:
            y = cap * _tanh(y / cap)
        y = tl.where(mask, y, float("-inf"))
        excess = y - lane_max
        part = tl.exp(-tl.abs(excess))  # the smaller term relative to the larger one
        lane_sum = tl.where(excess > 0, lane_sum * part + 1, lane_sum + part)
        lane_max = tl.maximum(lane_max, y)
        earlier_ties += ((token < target) & (y == target_logit)).to(tl.int32)
        if has_smoothing:
            lane_logits += tl.where(mask, y, 0.0)
    row_max = tl.max(lane_max, axis=0)
    denominator = tl.sum(lane_sum * tl.exp(lane_max - row_max), axis=0)
    log_denominator = tl.log(denominator)
    log_sum = row_max + log_denominator
    nll = log_denominator + (row_max - target_logit)
    cost = (1 - smoothing) * nll + z_loss * log_sum * log_sum
    if has_smoothing:
        cost += smoothing * (log_denominator + (row_max - tl.sum(lane_logits, axis=0) / vocabulary))
    tl.store(nll_ptr + row, nll)
    tl.store(cost_ptr + row, cost)
    hit = (target_logit == row_max) & (tl.sum(earlier_ties, axis=0) == 0) & (nll == nll)
    tl.store(hits_ptr + row, hit.to(tl.uint8))
    if has_gradient:
        d_logits_ptr += row * d_row_stride
        gradient_factor = (1 + 2 * z_loss * log_sum) / denominator
        next_logits = tl.load(logits_ptr + lane, mask=lane < vocabulary, other=0.0)
        for start in range(0, vocabulary, block):
            token = start + lane
            y = next_logits.to(tl.float32) * scale
            # prefetch while this block is computed
            next_logits = tl.load(logits_ptr + token + block, mask=token + block < vocabulary, other=0.0)
            cap_slope = tl.full((block,), 1.0, tl.float32)
            if has_cap:
                tanh = _tanh(y / cap)
                y = cap * tanh
                cap_slope = 1 - tanh * tanh
            tl.debug_barrier()  # the gradient may overwrite logits: wait until all lanes have read theirs
            d_y = (
                tl.exp(y - row_max) * gradient_factor
                - smoothing / vocabulary
                - tl.where(token == target, 1 - smoothing, 0.0)
            )
            d_logit = (d_y * cap_slope * scale * gradient_scale).to(d_logits_ptr.dtype.element_ty)
            tl.store(d_logits_ptr + token, d_logit, mask=token < vocabulary)


def row_losses_triton(logits: Tensor, targets: Tensor, terms: LossTerms, gradient: torch.dtype | None) -> RowLosses:
    """Computes in fp32. Rows without a target are zeros, and so is their gradient."""
    count, vocabulary = len(targets), logits.shape[1]
    nll = torch.empty(count, dtype=torch.float32, device=logits.device)
    cost, hits = torch.empty_like(nll), torch.empty_like(nll, dtype=torch.uint8)
    if gradient is None:
        d_logits = logits
    elif vocabulary % 4 == 0:
        # in place, at the front of each row: the gradient of a block ends before the next block's logits begin
        d_logits = logits.view(gradient)[:, :vocabulary]
    else:  # align rows for the matrix products that follow
        row_stride = triton.cdiv(vocabulary, 8) * 8
        d_logits = torch.zeros(len(logits), row_stride, dtype=gradient, device=logits.device)[:, :vocabulary]
    if count:
        _row_losses_kernel[(count,)](
            logits, targets, nll, cost, hits, d_logits, logits.stride(0), d_logits.stride(0), vocabulary,
            terms.scale, float(terms.cap or 1), terms.smoothing, terms.z_loss, terms.gradient_scale,
            has_cap=terms.cap is not None, has_smoothing=terms.smoothing > 0, has_gradient=gradient is not None,
            block=min(_BLOCK, triton.next_power_of_2(vocabulary)), num_warps=8,
        )  # fmt: skip
    return RowLosses(nll, cost, hits.view(torch.bool), None if gradient is None else d_logits)
