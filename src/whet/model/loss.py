"""The loss, inside the root module: the sum of −log p over supervised tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whet.model.attention import described, wants_spans
from whet.model.chosen import Chosen
from whet.model.cross_entropy import LossSum, linear_cross_entropy
from whet.model.head import head_of


class LossModel(nn.Module):
    """A causal language model that answers with its loss. The head sees supervised positions only."""

    def __init__(self, language_model: nn.Module, smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        super().__init__()
        self.language_model = language_model
        self.smoothing = smoothing
        self.z_loss = z_loss
        self.alone = False
        """Each batch is one document, and the model attends as it likes."""
        self.chosen = Chosen()
        """What the last layer is told of the positions that the loss looks at."""

    def forward(self, batch: Any, weight: float = 1.0) -> LossSum:
        """`batch` is a PackedBatch. `weight`: 1 ÷ the supervised tokens of the whole step, so that gradients of all
        micro-batches and ranks need only be summed."""
        self.chosen.rows = None if self.alone else batch.learned_at
        if self.alone:  # without the padding, whose positions could change how positions are turned
            hidden = self.hidden_alone(batch.tokens[: batch.edges[1]])
        else:
            hidden = self.hidden(batch.tokens, batch.positions, batch.cu_seqlens, batch.longest, batch.edges)
        chosen = hidden.index_select(0, batch.supervised_at)
        targets = batch.labels.index_select(0, batch.supervised_at)
        head = head_of(self.language_model)
        return linear_cross_entropy(chosen, head, targets, weight, self.smoothing, self.z_loss)

    def hidden(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, longest: int, edges: Any) -> Tensor:
        """[T, E] of a row of packed documents."""
        body = self.language_model.base_model
        output = body(  # type: ignore[operator]
            input_ids=tokens[None], position_ids=positions[None], use_cache=False,
            **described(cu_seqlens, longest, edges, by_token=wants_spans(self.language_model)),
        )  # fmt: skip
        return output.last_hidden_state[0]

    def hidden_alone(self, tokens: Tensor) -> Tensor:
        """[T, E] of one document, by the model's own attention."""
        return self.language_model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]  # type: ignore[operator]
