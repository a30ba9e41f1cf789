"""Loss on conversations that were kept apart: the same model, batches and division as in training."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from whet.core.console import progress
from whet.core.ranks import Ranks
from whet.core.whereabouts import HERE
from whet.data.loader import Loader
from whet.infer.tally import Kinds, Tally
from whet.model.loss import LossModel


@torch.no_grad()
def validation_loss(
    model: LossModel, loader: Loader, ranks: Ranks, arithmetic: AbstractContextManager[object], kinds: Kinds
) -> dict[str, float]:
    """val_loss: mean −log p over all supervised tokens; val_accuracy: the part of them with the highest logit.

    val_bpb, bits per byte, is the loss in a unit that does not depend on the tokenizer: Σ −log₂ p ÷ Σ bytes over the
    supervised tokens that stand for text. Special tokens have no bytes and are left out of both sums.
    """
    model.eval()
    tally = Tally(loader.documents(0), kinds)
    with progress("validating", loader.count(0)) as bar:
        for _, batch in loader.micro_batches(0):
            HERE.at("validating")
            with arithmetic:
                result = model(batch.to(ranks.device))
            tally.add(batch, result)
            bar.advance()
    return tally.results(ranks)
