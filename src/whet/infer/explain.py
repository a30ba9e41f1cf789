"""How likely each token of an answer was, and what else the model might have said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from whet.model.attention import plain


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that was or could have been said."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True, slots=True)
class Explained:
    """A token of an answer. Probabilities are the model's own: before temperature, filters and penalties."""

    token: str
    id: int
    probability: float
    rank: int
    """1: no token was likelier."""
    likeliest: tuple[Choice, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def explain(
    model: nn.Module, prompt: Sequence[int], answer: Sequence[int], text: Callable[[Sequence[int]], str], top: int = 5
) -> list[Explained]:
    """Of every token of `answer`, in one pass over the whole text, with transformers' own attention."""
    if not answer:
        return []
    device = next(model.parameters()).device
    with plain(model):
        logits = model(input_ids=torch.tensor([[*prompt, *answer]], device=device)).logits[0]
    shares = logits[len(prompt) - 1 : -1].float().softmax(dim=-1).cpu()
    values, tokens = shares.topk(min(top, shares.shape[1]), dim=-1)
    found = []
    for row, number in enumerate(answer):
        own = shares[row, number]
        likeliest = zip(tokens[row].tolist(), values[row].tolist(), strict=True)
        found.append(
            Explained(
                text([number]), number, own.item(), 1 + int((shares[row] > own).sum()),
                tuple(Choice(text([other]), other, value) for other, value in likeliest),
            )
        )  # fmt: skip
    return found
