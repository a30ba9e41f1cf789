"""From a few rows of logits to −log p, hits and the gradient of the logits: the definition, by torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Terms:
    """What is done to logits and what is minimised: with y = cap · tanh(scale · logits / cap) and ε = smoothing,
    (1 − ε) · −log p(target) + ε · mean over the vocabulary of −log p + z_loss · logsumexp(y)²."""

    scale: float = 1.0
    cap: float | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    boost: float = 1.0
    """The gradient comes out this many times too large: a power of two, for types whose small numbers are coarse."""


class Rows(NamedTuple):
    """R rows of V logits."""

    nll: Tensor
    """[R] −log p of the target."""
    cost: Tensor
    """[R] what is minimised."""
    hits: Tensor
    """[R] whether the target has the highest logit, the first of them where several are equal."""
    d_logits: Tensor | None
    """[R, V] derivative of the cost by the logits as they came in, `boost` times."""


class RowsFunction(Protocol):
    def __call__(self, logits: Tensor, targets: Tensor, terms: Terms, gradient: torch.dtype | None) -> Rows:
        """`logits` [R, V] may be overwritten; `gradient`: in which type it is wanted, if at all."""


def rows_torch(logits: Tensor, targets: Tensor, terms: Terms, gradient: torch.dtype | None) -> Rows:
    """Runs everywhere, in the type of the logits."""
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
    nll = cost = log_total - own  # not logsumexp − logit: that would round by the size of the logits
    log_sum = highest[:, 0] + log_total
    if mean is not None:
        cost = (1 - terms.smoothing) * nll + terms.smoothing * (log_total - mean)
    if terms.z_loss:
        cost = cost + terms.z_loss * log_sum**2
    if gradient is None:
        return Rows(nll, cost, hits, None)
    d_logits = exponentials.mul_(((1 + 2 * terms.z_loss * log_sum) / total)[:, None])
    if terms.smoothing:
        d_logits.sub_(terms.smoothing / logits.shape[1])
    d_logits[torch.arange(len(targets), device=targets.device), targets] -= 1 - terms.smoothing
    if slope is not None:
        d_logits.mul_(slope)
    if terms.scale * terms.boost != 1:
        d_logits.mul_(terms.scale * terms.boost)
    return Rows(nll, cost, hits, d_logits.to(gradient))
