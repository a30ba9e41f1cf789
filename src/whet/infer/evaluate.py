"""Loss on conversations that were kept apart: the same model, batches and division as in training."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from whet.core.console import progress
from whet.core.ranks import Ranks
from whet.data.loader import Loader
from whet.model.loss import LossModel


@torch.no_grad()
def validation_loss(
    model: LossModel, loader: Loader, ranks: Ranks, arithmetic: AbstractContextManager[object]
) -> dict[str, float]:
    """val_loss: mean −log p over all supervised tokens; val_accuracy: the part of them with the highest logit."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    with progress("validating", None) as bar:
        for _, batch in loader.micro_batches(0):
            with arithmetic:
                result = model(batch.to(ranks.device))
            sums[0] += result.loss
            sums[1] += result.hits.sum()
            bar.advance()
    loss, correct = (ranks.sum_(sums) / loader.totals(0).supervised).tolist()
    return {"val_loss": loss, "val_accuracy": correct}
